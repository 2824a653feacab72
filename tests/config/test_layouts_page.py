"""Tests that the settings in docs/layouts.md give the described layouts, and that the page's tables
are correct.
"""

import re
from pathlib import Path

import pytest
import yaml

from sbpflow import Fields, Layout, Placement, load_config
from sbpflow.embedding.plan.exchanges import exchange_names, legal_exchanges
from sbpflow.models.registry import MODELS
from sbpflow.run.planning.build_plan import plan_run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "layouts.md").read_text()
SETTINGS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SIZES = {"C1": 1000, "C3": 800, "C4": 600, "C5": 450, "C6": 500, "C7": 90, "C8": 40}
FIELDS = Fields.of(["I1"], SIZES)
MODEL = {"wide": {"columns": ["C1"], "crosses": []}, "hidden": [8, 8]}


def planned(tmp_path: Path, tree: dict):
    """Return the plan for these settings on 4 ranks."""
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"model": MODEL, **tree}))
    config = load_config(tmp_path / "a.yaml", models=MODELS)
    return plan_run(config, FIELDS, world_size=4, device_type="cpu")[1]


@pytest.mark.parametrize("text", SETTINGS)
def test_the_settings_of_the_page_can_be_planned(tmp_path, text):
    planned(tmp_path, yaml.safe_load(text))


def test_each_rule_for_one_table_decides_its_layout(tmp_path):
    (text,) = [text for text in SETTINGS if "deep.C3" in text]
    tree = yaml.safe_load(text)
    plan = planned(tmp_path, tree)
    assert len(tree["parallel"]["tables"]) == 6
    for name, rule in tree["parallel"]["tables"].items():
        layout = plan.layouts[name].layout
        sizes = f"{rule['sizes']}" if "sizes" in rule else ""
        ranks = rule.get("ranks", list(range(4)))
        assert str(layout) == f"{rule['sbp']}{sizes}@{ranks}"
        assert plan.layouts[name].exchange == rule.get("exchange", plan.layouts[name].exchange)


def table(head: str) -> list[list[str]]:
    """Return the rows of the table whose first header cell is ``head``."""
    body = PAGE.split(f"\n| {head} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body.splitlines()[2:]]


def test_the_table_of_schemes_holds(tmp_path):
    rows = table("scheme")
    assert [row[0] for row in rows] == ["`dp`", "`1`", "`2`", "`3`"]
    for scheme, wide, deep, _ in rows:
        plan = planned(tmp_path, {"parallel": {"scheme": scheme.strip("`")}})
        for name, layout in plan.layouts.items():
            sbp = wide if name.startswith("wide") else deep
            assert str(layout.layout) == f"{sbp.strip('`')}@[0, 1, 2, 3]"


# The page makes these statements about layouts in prose.
LAYOUTS = {
    "local": ["B@[0, 1]"],
    "columns": ["S(1)@[0, 1]", "B@[1]"],
    "reduce": ["S(0)@[0, 1]", "(S(0), S(1))@[[0, 1], [2, 3]]"],
    "unique": ["S(0)@[0, 1]", "S(1)@[0, 1]", "(S(0), S(0))@[[0, 1], [2, 3]]"],
}


def test_the_table_of_exchanges_is_complete_and_holds():
    rows = {row[0].strip("`"): row[1] for row in table("exchange")}
    assert sorted(rows) == sorted(exchange_names())
    for name, texts in LAYOUTS.items():
        for text in texts:
            sbp, _, ranks = text.partition("@")
            layout = Layout(Placement.of("cpu", yaml.safe_load(ranks)), sbp)
            size = max(2, layout.placement.size)
            assert name in legal_exchanges(layout, size), text
            assert sbp.startswith("(") or text == "B@[1]" or f"`{sbp}`" in rows[name]

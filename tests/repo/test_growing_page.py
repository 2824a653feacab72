"""Tests that the example in docs/growing.md is complete: its settings suit the set that its command
prepares.
"""

import re
from pathlib import Path

import yaml

from sbpflow.config.load import config_of
from sbpflow.models.registry import MODELS
from sbpflow.run.model.spec import Fields, IdField
from sbpflow.run.planning.build_plan import plan_run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "growing.md").read_text()


def test_the_settings_suit_the_prepared_set():
    (settings,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (keyed,) = re.findall(r"^sbpflow prepare .*--schema .* --keys (\w+)", PAGE, re.MULTILINE)
    config = config_of(yaml.safe_load(settings), models=MODELS)
    fields = Fields(
        dense=("price",),
        sparse=(IdField(name=keyed, rows=0, keyed=True), IdField(name="item", rows=100)),
        timed=True,
    )
    _, plan = plan_run(config, fields, world_size=2, device_type="cpu")
    tables = [table for output in plan.embeddings.outputs for table in output.tables]
    grow = {table.name for table in tables if table.growth is not None}
    assert grow == {f"wide.{keyed}", f"deep.{keyed}"}

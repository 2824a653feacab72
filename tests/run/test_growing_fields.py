"""Tests growing fields: their configuration, plans without copies, reports, and messages."""

import logging
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch

import sbpflow
from sbpflow.checkpoint.folder import list_checkpoints
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.commands.checkpoint import checkpoint
from sbpflow.config.load import load_config
from sbpflow.config.model_tables import FieldRule
from sbpflow.data.growth import growing_text
from sbpflow.data.prepare.keys import string_keys
from sbpflow.embedding.plan.growth import Eviction, Growth, GrowthCounts
from sbpflow.errors import ConfigError, DataError
from sbpflow.models.dcnv2 import DcnV2Config
from sbpflow.models.deepfm import DeepFmConfig
from sbpflow.models.dlrm import DlrmConfig
from sbpflow.models.registry import MODELS
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.planner.shapes import shapes_of
from sbpflow.run.model.spec import Fields, IdField, embedding_output
from sbpflow.run.planning.auto_scheme import candidates
from sbpflow.run.report.page import write_report
from sbpflow.run.saved import keys
from sbpflow.serving.scorer import load
from sbpflow.training.growth_watch import GrowthWatch
from tests.planner.tasks import make_task
from tests.run.test_report_page import events, write

USER = Growth(
    admit_count=3,
    forget_after_samples=200_000,
    evict=Eviction(policy="lfu", idle_samples=500_000, max_rows=100_000),
)
DYNAMIC = {
    "vocabulary": "dynamic",
    "admit_count": 3,
    "forget_after_samples": 200_000,
    "evict": USER.evict,
}
FIELDS = Fields(
    dense=("I1", "I2"),
    sparse=(
        IdField(name="user", rows=0, keyed=True),
        IdField(name="shop", rows=11),
        IdField(name="home", rows=0, keyed=True, vocabulary="city"),
        IdField(name="work", rows=0, keyed=True, vocabulary="city"),
    ),
    crosses=(IdField(name="userxshop", rows=0, keyed=True),),
)
RULES = {
    "*": FieldRule(**DYNAMIC),
    "shop": FieldRule(vocabulary="fitted"),
    "[hw]o*": FieldRule(table="city", admit_count=1),
}
CONFIGS = [
    WdlConfig(wide=WideConfig(columns=("user",), crosses=(("user", "shop"),)), fields=RULES),
    DeepFmConfig(fields=RULES),
    DlrmConfig(fields=RULES),
    DcnV2Config(fields=RULES),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_table_of_a_growing_field_grows(config):
    tables = [table for output in config.spec(FIELDS).outputs for table in output.tables]
    growth = {table.name: table.growth for table in tables}
    names = [name.partition(".")[2] for name in growth]
    assert names.count("user") == {"wdl": 2, "deepfm": 2}.get(config.name, 1)
    for table in tables:
        expected = {"shop": None, "city": replace(USER, admit_count=1)}
        assert table.growth == expected.get(table.name.partition(".")[2], USER)
        assert table.num_rows == (11 if table.growth is None else 100_000)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, r"model\.fields\.user: the data has 64-bit keys .* \{vocabulary: dynamic, evict:"),
        (
            {**RULES, "shop": FieldRule(**DYNAMIC)},
            r"model\.fields\.shop\.vocabulary is dynamic, but .* prepare .* with `--keys shop",
        ),
        (
            {"*": FieldRule(vocabulary="dynamic"), "shop": FieldRule(vocabulary="fitted")},
            r"model\.fields\.user\.evict is not given, but a growing table needs a row limit",
        ),
        (
            {**RULES, "work": FieldRule(admit_count=9)},
            r"home and work share table city, but their vocabulary settings differ",
        ),
        (
            {name: RULES["*"] for name in ("user", "home", "work", "userxshop")}
            | {"shop": FieldRule(admit_count=2)},
            r"model\.fields\.shop\.admit_count has no effect without vocabulary: dynamic",
        ),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(rules, message):
    with pytest.raises(ConfigError, match=message):
        DcnV2Config(fields=rules).spec(FIELDS)


def test_hashed_crosses_do_not_grow_and_the_message_says_how_to_set_them():
    wide = WideConfig(crosses=(("user", "shop"),), hash_size=97)
    with pytest.raises(ConfigError, match=r"a hashed cross cannot grow, .* add .+") as refused:
        WdlConfig(fields=RULES, wide=wide).spec(FIELDS)
    assert "hashed.*: {vocabulary: fitted}" in str(refused.value)
    rules = {**RULES, "hashed.*": FieldRule(vocabulary="fitted")}
    outputs = WdlConfig(fields=rules, wide=wide).spec(FIELDS).outputs
    growth = {table.name: table.growth for output in outputs for table in output.tables}
    assert growth["wide.hashed.userxshop"] is None
    assert growth["deep.user"] == USER


def test_fields_of_hashed_crosses_are_not_converted_to_keys(tmp_path, monkeypatch):
    """The cross would hash the keys instead of the ids, so its values would get other rows."""
    wide = WideConfig(columns=("C3",), crosses=(("C1", "C2"), ("C3", "C7")), hash_size=97)
    fields = Fields.of(("I1",), {"C1": 5, "C2": 5, "C3": 5, "C7": 5}, {})
    features = [column.feature() for column in fields.ids]
    outputs = WdlConfig(wide=wide).spec(fields).outputs
    tables = [table for output in outputs for table in output.tables]
    plan = SimpleNamespace(tables=tables, features=features)
    monkeypatch.setattr(keys, "_plan", lambda checkpoint: plan)
    values = {"C3": keys.Values(*torch.zeros(3, 1, dtype=torch.int64))}
    with pytest.raises(ConfigError, match=r"field C3: the cross hashed\.C3xC7 hashes its ids"):
        keys.to_keys(SimpleNamespace(tensors={}), values, {"path": "set"}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("field", "is_crossed"), [("ta", False), ("tax", True), ("a", True)])
def test_names_that_contain_an_x_are_not_taken_for_crosses(field, is_crossed):
    names, cross = ["ta", "tax", "a", "b"], "hashed.taxxaxb"
    with pytest.raises(ConfigError, match=f"field {field}:") if is_crossed else nullcontext():
        keys._check_crosses([cross], [*names, cross], [field])


def test_a_model_without_field_rules_refuses_keys():
    with pytest.raises(ConfigError, match=r"model\.fields\.user: the data has 64-bit keys"):
        embedding_output("deep", FIELDS.sparse, dim=4)
    with pytest.raises(ConfigError, match="admit_count has no effect with vocabulary: fitted"):
        FieldRule(vocabulary="fitted", admit_count=3)


YAML = """
model:
  name: dcnv2
  fields:
    user:
      {{vocabulary: dynamic, admit_count: {count}, forget_after_samples: 200000,
        evict: {{policy: {policy}, idle_samples: 500000, idle_time: null, max_rows: {rows}}}}}
"""


def test_the_settings_are_read_from_yaml(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(YAML.format(count=3, policy="lfu", rows=100_000))
    rule = load_config(file, [], models=MODELS).model.fields["user"]
    assert rule == FieldRule(**DYNAMIC)
    given = "model.fields={user: {vocabulary: dynamic, evict: {max_rows: 70000}}}"
    rule = load_config(file, [given], models=MODELS).model.fields["user"]
    assert rule == FieldRule(vocabulary="dynamic", evict=Eviction(max_rows=70_000))


@pytest.mark.parametrize("evict", ["{}", "65536"])
def test_the_example_of_a_missing_limit_is_accepted(tmp_path, evict):
    given = "model.fields={user: {vocabulary: dynamic, evict: %s}}"
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: dcnv2}\n")
    with pytest.raises(ConfigError, match=r"evict.*max_rows: 1048576") as caught:
        load_config(file, [given % evict], models=MODELS)
    assert "null" not in str(caught.value)
    load_config(file, [given % "{max_rows: 1048576}"], models=MODELS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, r"model\.fields\.user\.admit_count must be >= 1 and <= 1073741824, got 0"),
        ({"count": 2**30 + 1}, r"admit_count must be >= 1 and <= 1073741824, got 1073741825"),
        ({"policy": "fifo"}, r"model\.fields\.user\.evict\.policy: .*fifo.* lru"),
        (
            {"rows": 1000},
            r"model\.fields\.user\.evict\.max_rows must be 65536 or more, .* got 1000",
        ),
    ],
)
def test_values_out_of_range_are_refused(tmp_path, changes, message):
    file = tmp_path / "run.yaml"
    file.write_text(YAML.format(**{"count": 3, "policy": "lfu", "rows": 100_000, **changes}))
    with pytest.raises(ConfigError, match=message):
        load_config(file, [], models=MODELS)


def test_automatic_plans_have_no_copies_of_growing_tables():
    spec = CONFIGS[0].spec(FIELDS)
    tables = [table for output in spec.outputs for table in output.tables]
    features = [field.feature() for field in FIELDS.ids]
    found = candidates(tables, features, 4, 10**6)
    assert len(found) > 5
    for rules in found.values():
        for table in tables:
            rule = rules[table.name]
            assert table.growth is None or rule.sbp != "B" or rule.ranks is not None
    assert any(rules["deep.shop"].exchange == "local" for rules in found.values())
    alone = candidates(tables, features, 1, 10**6)["all B"]
    assert {rule.sbp for rule in alone.values()} == {"B"}


def test_the_planner_searches_no_copies_of_growing_tables():
    task = make_task()
    table = task.tables[0]
    growing = replace(table, num_rows=100_000, growth=USER)
    shapes = shapes_of(task, growing)
    assert "local" not in {shape.exchange for shape in shapes}
    assert {shape.parts[0] for shape in shapes} == {1, task.world_size}
    assert set(shapes) < set(shapes_of(task, replace(growing, growth=None)))


def counts(**values):
    return GrowthCounts(**{"max_rows": 100_000, "rows_per_rank": (30_000, 20_000), **values})


def test_an_interval_reports_counts_and_shares_of_each_field():
    reports = [
        {"user": counts(lookups=500, refused_lookups=500), "c.1": counts()},
        {
            "user": counts(
                live=50_000, pending=7, admitted=60_000, evicted=10_000, forgotten=3, lookups=1500,
                pending_lookups=250, refused_lookups=505,
            ),
            "c.1": counts(live=5, rows_per_rank=(5, 0)),
        },
    ]  # fmt: skip
    figures = GrowthWatch(iter(reports).__next__).figures()
    own = {k[len("growth.user.") :]: v for k, v in figures.items() if k.startswith("growth.user.")}
    assert own == {
        "live": 50_000,
        "pending": 7,
        "admitted": 60_000,
        "evicted": 10_000,
        "forgotten": 3,
        "load_factor": 0.5,
        "pending_share": 0.25,
        "refused_share": 0.005,
        "rows_of_rank_0": 30_000,
        "rows_of_rank_1": 20_000,
    }
    assert figures["growth.c.1.live"] == 5
    assert figures["growth_live"] == 50_005
    assert figures["growth_load_factor"] == 0.5
    assert figures["growth_refused_share"] == 0.005
    assert GrowthWatch(dict).figures() == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"live": 96_000}, "96,000 of 100,000 rows have keys, so new keys often replace others"),
        (
            {"live": 96_000, "evicted": 30_000},
            "30,000 keys were evicted from the 100,000 rows during 1,000 lookups",
        ),
        ({"live": 100_000, "refused_lookups": 20}, "2.0% of the lookups .* example, 400000"),
        ({"live": 90_000, "evicted": 100, "refused_lookups": 5}, None),
    ],
)
def test_small_limits_are_reported_only_once(caplog, values, message):
    start, later = counts(), counts(lookups=1000, **values)
    again = replace(later, lookups=2000, evicted=2 * later.evicted,
                    refused_lookups=2 * later.refused_lookups)  # fmt: skip
    reports = [{"user": c} for c in (start, later, again)]
    watch, silent = GrowthWatch(iter(reports).__next__), GrowthWatch(iter(reports).__next__, 1)
    with caplog.at_level(logging.WARNING):
        for each in (watch, watch, silent, silent):
            each.figures()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (message is not None)
    if message is not None:
        assert texts[0].startswith("model.fields.user")
        assert re.search(message, texts[0])


def test_frequent_reports_notice_evictions_and_slow_turnover_is_normal(caplog):
    for lookups, warns in ((3_000, True), (300_000, False)):
        steps = [
            counts(live=80_000, lookups=n * lookups, evicted=1_000 * n, admitted=1_000 * n)
            for n in range(100)
        ]
        watch = GrowthWatch(iter([{"user": step} for step in steps]).__next__)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in steps[1:]:
                watch.figures()
        texts = [record.getMessage() for record in caplog.records]
        assert [("21,000 keys were evicted" in text) for text in texts] == [True] * warns


def test_the_report_page_shows_growing_fields(tmp_path):
    lines = events()
    for line in lines:
        if line["event"] == "step":
            line |= {
                "growth.user.live": 10.0 * line["step"],
                "growth.user.load_factor": 0.01 * line["step"],
                "growth_live": 10.0 * line["step"],
            }
    text = write_report([write(tmp_path / "run", lines)]).read_text()
    assert "Growing tables" in text
    assert "keys with a row" in text
    assert "Growing tables" not in write_report([write(tmp_path / "plain", events())]).read_text()


def test_the_report_page_shows_slices_by_key(tmp_path):
    lines = [{**line, "value": -(2**63)} if line["event"] == "slice" else line for line in events()]
    assert str(-(2**63)) in write_report([write(tmp_path / "run", lines)]).read_text()
    damaged = [{**line, "value": 2**63} if line["event"] == "slice" else line for line in lines]
    with pytest.raises(DataError, match="value cannot be"):
        write_report([write(tmp_path / "damaged", damaged)])


def test_explain_compares_the_limit_with_the_keys_of_the_data():
    entry = {
        "table": "deep.user", "fields": ["user"], "train_keys": 123_456, "admit_count": 1,
        "forget_after_samples": None,
        "evict": {"policy": "lru", "idle_samples": 9000, "idle_time": None, "max_rows": 65_536},
    }  # fmt: skip
    assert growing_text([entry]) == (
        "growing tables:\n  deep.user: a key gets a row after 1 occurrence; at most 65,536 rows, "
        "then lru eviction; eviction after 9,000 samples without use; train has 123,456 keys, so "
        "an epoch evicts keys (raise evict.max_rows or admit_count to avoid this)"
    )
    assert "evicts keys" not in growing_text([{**entry, "train_keys": 5}])
    assert growing_text([]) == ""


@pytest.fixture(scope="module")
def cities(tmp_path_factory):
    """Return a run with a growing table for two fields, and the rows of its set."""
    pytest.importorskip("numba", reason="growing tables need numba")
    cities = ["Oslo", "Rome", "Aarhus", ""]
    table = pl.DataFrame({
        "home": [cities[row % 3] for row in range(400)],
        "work": [f"only {row}" if row % 7 == 0 else cities[row // 7 % 4] for row in range(400)],
        "shop": [row % 11 for row in range(400)],
        "click": [row // 2 % 2 for row in range(400)],
    })  # fmt: skip
    kind = {"kind": "string", "vocabulary": "city"}
    evict = {"max_rows": 65_536}
    run = sbpflow.fit(
        {
            "data": {"batch_size": 80, "loader": "memmap"},
            "model": {
                "name": "deepfm",
                "embedding_dim": 4,
                "hidden": [4],
                "fields": {
                    "[hw]*": {
                        "table": "cities", "vocabulary": "dynamic", "admit_count": 2, "evict": evict
                    }
                },
            },
            "parallel": {"kernel": "torch", "device": "cpu"},
            "train": {"max_steps": 4, "eval_every": 0},
        },
        data=table,
        schema={"label": "click", "sparse": {"home": kind, "work": kind, "shop": "integer"}},
        prepare={"keys": ["home", "work"], "min_count": 1},
        run={"dir": tmp_path_factory.mktemp("cities") / "run"},
    )  # fmt: skip
    return run, table


def test_fields_that_share_a_table_share_the_ids_of_a_bundle(cities, tmp_path):
    run, table = cities
    run.export(tmp_path / "model")
    model = load(tmp_path / "model")
    scores = model.score(table)
    np.testing.assert_allclose(scores, run.predict(table)["score"], rtol=0, atol=1e-6)
    assert scores.std() > 1e-4
    encoded = model.encode(table)
    home, work = (encoded.ids[:, model.content["columns"][name][0]] for name in ("home", "work"))
    assert set(home) <= set(work) | {1}
    assert encoded.unknown["work"] >= 57
    assert encoded.missing["work"] == (table["work"] == "").sum()
    keys, vectors = run.embeddings("deep.cities", values=["Oslo", "only 0", "Rome"])
    assert keys.tolist() == ["Oslo", "Rome"]
    place = model.content["tables"]["deep.cities"]
    rows = torch.from_numpy(home[:2].astype(np.int64)) + place["first"]
    np.testing.assert_array_equal(model.stores[place["store"]].gather(rows).numpy(), vectors)


@pytest.mark.parametrize("field", ["home+work", "work"])
def test_values_of_a_shared_vocabulary_are_erased(cities, tmp_path, field):
    run, _ = cities
    shutil.copytree(run.dir, tmp_path / "run")
    (tmp_path / "keys.txt").write_text("Oslo\nRome\nnowhere\n")
    words = ["erase", str(tmp_path / "run"), "--field", field]
    before = set(saved_keys(tmp_path / "run"))
    assert checkpoint([*words, "--keys", str(tmp_path / "keys.txt")]) == 0
    gone = before - set(saved_keys(tmp_path / "run"))
    keys, _ = string_keys(pl.Series(["Oslo", "Rome"]))
    assert gone == set(keys.to_numpy().view(np.int64).tolist())


def saved_keys(run):
    saved = open_checkpoint(list_checkpoints(run / "checkpoints")[0])
    return saved.tensor("vocabularies/home+work/keys").tolist()

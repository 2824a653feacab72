"""Tests what each key affects, and thus which keys must be unchanged for a run to resume."""

import re
import runpy
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, get_args

import pytest

from sbpflow.config.load import config_facts, load_config
from sbpflow.config.schema import Config
from sbpflow.models.registry import MODELS
from sbpflow.run.saved.resume import DataFacts, relevant_facts
from sbpflow.runtime.fields.keys import Affects, Key
from sbpflow.runtime.fields.ranges import Range
from tests.config.test_config import CONFIGS

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "configuration.py"))
SCHEME1 = CONFIGS[0].parent / "scheme1.yaml"
SET = DataFacts(path="set", fingerprint="a", content_id="b")

# These keys may change when a run resumes.
EXECUTION = """
run.dir data.path data.cache.dir data.cache.size data.loader
train.epochs train.max_steps train.lookahead train.early_rows train.late_gradients train.log_every
train.progress
train.profile
train.trackers train.prometheus.port train.prometheus.host
parallel.device parallel.scheme parallel.plan parallel.link_gb_per_s
parallel.tables.deep.C1.sbp parallel.tables.deep.C1.ranks parallel.tables.deep.C1.sizes
parallel.tables.deep.C1.exchange parallel.dense.mlp.0.*
parallel.kernel parallel.kernels.deep.C1
parallel.storage.deep.C1.kind parallel.storage.deep.C1.cache parallel.storage.deep.C1.path
parallel.tf32 parallel.overlap parallel.cuda_graph parallel.row_buffer_fraction parallel.timeout_s
parallel.checked parallel.shared_memory
checkpoint.dir checkpoint.every checkpoint.keep checkpoint.keep_best checkpoint.background
checkpoint.resume checkpoint.on_signal checkpoint.deltas
export.dir export.every_seconds export.deltas export.rows
""".split()
EXECUTION += [
    "parallel.storage (order)",
    "parallel.tables (order)",
    "parallel.kernels (order)",
    "parallel.dense (order)",
]
# These keys may also change, unless `train.stop` or `train.plateau` makes training depend on
# scores.
SCORES = ["train.eval_every", "train.eval_rows", "train.exact_auc_rows", "train.slices"]
# These keys of the group ``parallel`` must not change, nor may any key outside these lists.
RESULTS_OF_PARALLEL = ["dtype", "table_dtype", "comm_dtype", "tables.deep.C1.comm_dtype"]

EVERYTHING = (
    *("data.path=out/set", "train.max_steps=10", "train.profile=[1, 2]", "train.slices=[C1]"),
    *("train.eval_rows=1000", "checkpoint.dir=out/saved", "data.out_of_range=hash"),
    "data.cache.dir=out/cache",
    "parallel.tables.deep.C1={sbp: S(0), ranks: [0, 1], sizes: [60, 40], exchange: unique}",
    "parallel.tables.deep.C1.comm_dtype=bfloat16",
    "parallel.storage.deep.C1={kind: file, cache: 10%, path: out/rows}",
    *("parallel.dense.mlp.0.*=S(0)", "parallel.kernels.deep.C1=torch", "parallel.scheme=2"),
    *("parallel.table_dtype=bfloat16", "parallel.comm_dtype=float16"),
    *(
        "parallel.link_gb_per_s=0.125",
        "parallel.row_buffer_fraction=0.5",
        "train.loss.focal_gamma=1.0",
    ),
    *("optimizer.clip.norm=5.0", "optimizer.dense_schedule.warmup_steps=3"),
    *("optimizer.tables.wide.*={name: lazy_adam, betas: [0.9, 0.99]}", "optimizer.tables.*.lr=1.0"),
    *("optimizer.sparse_schedule.warmup_steps=3", "model.wide.hash_size=100"),
    *("model.fields.*_shop.table=shop", "model.tables.deep.C1={dim: 8, pooling: mean}"),
    *("checkpoint.deltas=24", "export.dir=out/model", "train.prometheus.port=9464"),
)
STOP, PLATEAU = "train.stop.metric=auc", "train.plateau.metric=auc"
CASES = [
    *[(path, ()) for path in CONFIGS],
    *[(SCHEME1, (f"model={{name: {name}, autocast: bf16}}",)) for name in MODELS],
    *[(SCHEME1, (*EVERYTHING, *more)) for more in ((), (STOP,), (PLATEAU,), (STOP, PLATEAU))],
    *[(SCHEME1, (f"optimizer.sparse.name={name}",)) for name in ("sgd", "adagrad", "lazy_adam")],
    *[(SCHEME1, (f"optimizer.dense.name={name}",)) for name in ("sgd", "adagrad", "rmsprop")],
    (SCHEME1, ("parallel.plan=auto",)),
    (SCHEME1, ("optimizer.sparse.name=ftrl", "optimizer.dense.name=adamw")),
]


@pytest.mark.parametrize(("path", "overrides"), CASES)
def test_which_keys_must_be_equal_for_a_run_to_resume(path, overrides):
    config = load_config(path, overrides, models=MODELS)
    free = set(EXECUTION)
    if not {STOP, PLATEAU} & set(overrides):
        free |= set(SCORES)
    facts = relevant_facts(config, SET)
    assert facts.pop("the set in data.path") == "b"
    assert facts == {key: text for key, text in config_facts(config).items() if key not in free}


def test_every_listed_key_is_in_a_case():
    tried: set[str] = set()
    for path, overrides in CASES:
        tried |= config_facts(load_config(path, overrides, models=MODELS)).keys()
    assert {*EXECUTION, *SCORES, *(f"parallel.{key}" for key in RESULTS_OF_PARALLEL)} <= tried


def test_keys_of_a_users_class_affect_results_unless_marked():
    @dataclass(frozen=True, kw_only=True)
    class Own:
        name: str = "own"
        dim: int = 8
        threads: Annotated[int, Key("execution", "Threads that read.")] = 2

    facts = config_facts(Config(model=Own()), ("results",))
    assert (facts["model.name"], facts["model.dim"]) == ("own", "8")
    assert "model.threads" not in facts


def test_marks_in_annotations_that_are_strings_count():
    """A module with ``from __future__ import annotations`` has such annotations."""

    @dataclass(frozen=True, kw_only=True)
    class Own:
        name: str = "own"
        threads: "Annotated[int, Key('execution', 'Threads that read.')]" = 2

    assert "model.threads" in config_facts(Config(model=Own()))
    assert "model.threads" not in config_facts(Config(model=Own()), ("results",))


def test_annotations_that_cannot_be_resolved_have_no_marks():
    """A type may be imported only for type checkers."""

    own = make_dataclass("Own", [("name", str, "own"), ("known", "Unknown | None", None)])
    assert config_facts(Config(model=own()))["model.name"] == "own"


def test_a_users_model_may_use_the_names_of_groups_of_patterns():
    @dataclass(frozen=True, kw_only=True)
    class Own:
        name: str = "own"
        fields: tuple[str, ...] | None = None
        tables: bool = True

    facts = config_facts(Config(model=Own()))
    assert (facts["model.fields (order)"], facts["model.tables"]) == ("[]", "true")


def test_every_key_has_a_description_and_an_effect():
    rows = [row for section in SCRIPT["sections"]() for row in section.rows]
    assert len({row.line for row in rows}) > 90
    for row in rows:
        assert row.affects in get_args(Affects), row
        assert re.fullmatch(r"[^\n|]{10,240}\.", row.line), row


def test_a_key_without_a_mark_is_named():
    @dataclass(frozen=True, kw_only=True)
    class Group:
        size: Annotated[int, Key("results", "Size of the group.")] = 1
        depth: Annotated[int, Range(low=0)] | None = None

    with pytest.raises(LookupError, match=r"Group\.depth: add Annotated"):
        SCRIPT["rows_of"](Group)

"""Tests ``model.fields`` and ``model.tables``: options by pattern, shared tables, and mistakes."""

from dataclasses import replace

import numpy as np
import pytest

from sbpflow.boxing.executor import Boxing
from sbpflow.config.model_tables import FieldRule, TableShape
from sbpflow.errors import ConfigError
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import build_job
from sbpflow.run.model.spec import Fields, IdField
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.kernels import _measurable
from sbpflow.runtime.ranks.world import World
from tests.training.wdl_case import make_batches, make_config, pieces_of

# The sizes fit ``make_batches``, whose ids are below 37 in C1, 11 in C2, 53 in C3 and 3 in C4; two
# crosses follow.
FIELDS = Fields(
    dense=("I1", "I2", "I3"),
    sparse=(
        IdField(name="home", rows=60, vocabulary="city"),
        IdField(name="shop", rows=11),
        IdField(name="work", rows=60, vocabulary="city"),
        IdField(name="kind", rows=3),
    ),
    crosses=(IdField(name="a", rows=71), IdField(name="b", rows=29)),
)
MODEL = WdlConfig(
    embedding_dim=5,
    hidden=(7, 6),
    dropout=0.0,
    wide=WideConfig(columns=("shop",), crosses=()),
    fields={"*o[mr]*": FieldRule(table="city")},
    tables={
        "*": TableShape(initial_range=0.5),
        "deep.*": TableShape(initial_range=0.01, pooling="mean"),
        "deep.city": TableShape(dim=4),
        "deep.k*": TableShape(initial_range=0.0),
    },
)


def test_the_last_pattern_that_gives_a_key_decides_it():
    wide, deep = MODEL.spec(FIELDS).outputs
    assert [(t.name, t.features, t.dim, t.initial_range) for t in deep.tables] == [
        ("deep.city", ("home", "work"), 4, 0.01),
        ("deep.shop", ("shop",), 5, 0.01),
        ("deep.kind", ("kind",), 5, 0.0),
    ]
    assert {t.pooling for t in deep.tables} == {"mean"}
    assert [(t.name, t.dim, t.initial_range) for t in wide.tables] == [("wide.shop", 1, 0.5)]
    assert MODEL.spec(FIELDS).mlp.inputs == 4 + 4 + 5 + 5 + 3


def _train(world: World, scheme: str):
    config = replace(make_config(scheme, "adagrad"), model=MODEL)
    spec, plan = plan_run(config, FIELDS, world_size=world.size, device_type="cpu")
    job = build_job(config, spec, plan, Boxing(world))
    first = {(name, place): weights for name, place, weights, _ in pieces_of(job)}
    losses = [
        float(job.trainer.step(batch.part(world.rank, world.size))) for batch in make_batches(6, 30)
    ]
    return losses, first, pieces_of(job)


@pytest.mark.parametrize("scheme", ["dp", "1", "2", "3"])
def test_shared_and_uneven_tables_train_equally_on_any_number_of_ranks(ranks, scheme):
    ((want, first, tables),) = ranks(1, _train, scheme)
    spread = {name: np.abs(weights).max() for (name, _), weights in first.items()}
    assert 0.009 < spread["deep.city"] <= 0.01
    assert spread["deep.kind"] == 0.0
    assert 0.3 < spread["wide.shop"] <= 0.5
    moved = {name: (w != first[name, place]).any(1) for name, place, w, _ in tables}
    assert set(moved) == {"deep.city", "deep.shop", "deep.kind", "wide.shop"}
    # Ids from 37 on occur only in ``work``; all other ids occur in both fields.
    assert moved["deep.city"][:37].any()
    assert moved["deep.city"][37:53].any()
    assert not moved["deep.city"][53:].any()
    for losses, _, _ in ranks(2, _train, scheme):
        assert losses == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "tables", "message"),
    [
        (
            {},
            {"*": TableShape(dim=8)},
            "model.tables.*: dim is 8, but the dim of wide.shop must be 1",
        ),
        ({}, {"deep.C1": TableShape(dim=8)}, "model.tables.deep.C1 matches no table; did you"),
        ({"C1": FieldRule(table="x")}, {}, "model.fields.C1 matches no field; did you"),
        ({"*o*": FieldRule(table="all")}, {}, "home and shop share table all"),
        ({"home": FieldRule(table="shop")}, {}, "table shop, which is the default table of shop"),
    ],
)
def test_states_that_do_not_fit_are_refused(fields, tables, message):
    model = replace(MODEL, fields=fields, tables=tables)
    config = replace(make_config("1", "adagrad"), model=model)
    with pytest.raises(ConfigError) as caught:
        plan_run(config, FIELDS, world_size=1, device_type="cpu")
    assert message in str(caught.value)


def test_fields_of_one_table_need_equal_numbers_of_rows():
    odd = replace(FIELDS, sparse=(*FIELDS.sparse[:2], replace(FIELDS.sparse[2], rows=61)))
    with pytest.raises(ConfigError, match="60 and 61 rows"):
        MODEL.spec(odd)


def test_kernels_are_requested_by_pattern():
    """Tables with different kernels are stored separately; the last matching pattern wins."""
    pytest.importorskip("numba", reason="two kernels are needed")
    config = make_config("1", "adagrad", kernel="numba")
    patterns = {"*": "torch", "deep.*": "auto", "deep.sho?": "torch"}
    parallel = replace(config.parallel, kernels=patterns, dtype="float32")
    config = replace(config, model=MODEL, parallel=parallel)
    _, plan = plan_run(config, FIELDS, world_size=2, device_type="cpu")
    names = {name: choice.name for name, choice in plan.kernels.items()}
    assert names == {
        "wide.shop": "torch", "deep.city": "numba", "deep.shop": "torch", "deep.kind": "numba",
    }  # fmt: skip
    stacks = [[t.name for t in s.tables] for g in plan.embeddings.groups for s in g.stacks]
    assert ["deep.kind"] in stacks
    assert ["deep.shop"] in stacks
    measurable = [stack.tables[0].name for stack, _, _ in _measurable(plan, "numba")]
    assert set(measurable) <= {"deep.city", "deep.kind"}
    with pytest.raises(ConfigError, match=r"parallel.kernels.dep\.\* matches no table"):
        plan_run(replace(config, parallel=replace(parallel, kernels={"dep.*": "torch"})), FIELDS,
                 world_size=2, device_type="cpu")  # fmt: skip


def _train_with_kernels(world: World, kernels: dict[str, str]):
    config = make_config("2", "adagrad")
    parallel = replace(config.parallel, kernels=kernels)
    spec, plan = plan_run(
        replace(config, model=MODEL, parallel=parallel), FIELDS, world_size=world.size,
        device_type="cpu",
    )  # fmt: skip
    job = build_job(config, spec, plan, Boxing(world))
    return [float(job.trainer.step(b.part(world.rank, world.size))) for b in make_batches(4, 30)]


def test_tables_with_different_kernels_train_equally(ranks):
    pytest.importorskip("numba", reason="two kernels are needed")
    (want,) = ranks(1, _train_with_kernels, {})
    for losses in ranks(2, _train_with_kernels, {"deep.city": "numba"}):
        assert losses == pytest.approx(want, rel=1e-12)

"""Tests a user's sparse optimizer, which consists of a module and a function for one kernel.

It trains like a reference for every layout and exchange, and can be saved, restored, planned and
priced. Kernels that do not support it are not chosen.
"""

import json
import sys
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.commands.checkpoint import checkpoint
from sbpflow.commands.explain import explain
from sbpflow.config.load import config_from_tree, dump_config, load_config
from sbpflow.config.parse import plain
from sbpflow.embedding.rules.kernels import StackFacts
from sbpflow.embedding.rules.registry import RULES, kernel_function, sparse_optimizer
from sbpflow.embedding.rules.sgd import Sgd
from sbpflow.embedding.storage.choose import (
    choose_kernel,
    choose_kernels,
    kernel_faults,
)
from sbpflow.errors import CheckpointError, ConfigError, SbpError
from sbpflow.models.registry import MODELS
from sbpflow.run.execution.job import build_job
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe
from sbpflow.run.planning.plan_file import plan_from_json, plan_to_json
from sbpflow.run.saved.keys import check_grows, import_optimizers
from sbpflow.run.saved.save import Saver
from sbpflow.runtime.random.streams import fill_uniform
from tests.embedding.cases import SEED, Case, Spec, join_outputs, join_tables, train
from tests.embedding.own_rule import ScaledMomentum
from tests.quick import quick
from tests.training.wdl_case import FIELDS, make_batches, make_config
from tests.training.wdl_case import train as train_wdl

NAME = "tests.embedding.own_rule:ScaledMomentum"
RULE = ScaledMomentum(lr=0.05, momentum=0.8, weight_decay=0.1)
WIDE = (("wide.a", 37, 1), ("wide.b", 5, 1))
DEEP = (("deep.a", 41, 6), ("deep.b", 9, 6), ("deep.c", 64, 6))
GRIDS = {2: ((0, 1),), 4: ((0, 1), (3, 2))}


def specs_of(layout: str, size: int) -> tuple[Spec, Spec]:
    """Return the layouts of the wide tables (their columns cannot be split) and of the deep
    tables.
    """
    rows = {"reduce": Spec("S(0)", "reduce"), "unique": Spec("S(0)", "unique")}
    last = size - 1
    return {
        "dp": (Spec("B", "local"), Spec("B", "local")),
        "scheme 1": (rows["reduce"], Spec("S(1)", "columns")),
        "scheme 2": (rows["reduce"], rows["reduce"]),
        "scheme 3": (rows["unique"], rows["unique"]),
        "S(1) unique": (rows["unique"], Spec("S(1)", "unique")),
        "grid": (rows["reduce"], Spec("(S(0), S(1))", "reduce", ranks=GRIDS.get(size, ((0,),)))),
        "whole": (Spec("B", "columns", ranks=(last,)), Spec("S(0)", "columns", ranks=(last,))),
        "uneven columns": (
            rows["reduce"],
            Spec("S(1)", "columns", ranks=(last, 0), sizes=(1, 5)) if last else Spec("B", "local"),
        ),
        "uneven unique": (
            rows["unique"],
            Spec("S(1)", "unique", sizes={1: (6,), 2: (5, 1), 4: (2, 1, 1, 2)}[size]),
        ),
    }[layout]


LAYOUTS = [
    "dp",
    "scheme 1",
    "scheme 2",
    "scheme 3",
    "S(1) unique",
    "grid",
    "whole",
    "uneven columns",
    "uneven unique",
]


def case_of(layout: str, size: int, kernel: str) -> Case:
    wide, deep = specs_of(layout, size)
    return Case(
        tables={"wide": WIDE, "deep": DEEP},
        specs=dict.fromkeys((name for name, *_ in WIDE), wide)
        | dict.fromkeys((name for name, *_ in DEEP), deep),
        optimizer=RULE,
        sums=("wide",),
        kernel=kernel,
    )


def reference(case: Case) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return outputs per step and whole tables, computed row by row in numpy."""
    tables, velocity, scale = {}, {}, {}
    for output in case.outputs():
        for table in output.tables:
            start = torch.empty(table.shape, dtype=torch.float64)
            fill_uniform(start, seed=SEED, name=table.name, bound=0.05, num_columns=table.dim)
            tables[table.name] = start.numpy()
            velocity[table.name] = np.zeros(table.shape)
            scale[table.name] = np.zeros(table.num_rows)
    outputs = []
    for ids, factors in case.batches():
        made = {}
        for output in case.outputs():
            is_sum = output.combine == "sum"
            columns = [ids[:, case.features().index(t.name)].numpy() for t in output.tables]
            parts = [tables[t.name][rows] for t, rows in zip(output.tables, columns, strict=True)]
            made[output.name] = sum(parts) if is_sum else np.concatenate(parts, 1)
            grad = factors[output.name].numpy() * (1 - np.tanh(made[output.name]) ** 2)
            for n, (table, rows) in enumerate(zip(output.tables, columns, strict=True)):
                mine = grad if is_sum else grad[:, n * table.dim : (n + 1) * table.dim]
                for row in np.unique(rows):
                    g, key = mine[rows == row].sum(0), table.name
                    velocity[key][row] = RULE.momentum * velocity[key][row] + g
                    scale[key][row] += (g**2).mean()
                    step = velocity[key][row] / (np.sqrt(scale[key][row]) + RULE.eps)
                    decayed = tables[key][row] * (1 - RULE.lr * RULE.weight_decay)
                    tables[key][row] = decayed - RULE.lr * step
        outputs.append(made)
    return outputs, tables


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("size", "layout", "kernel"),
    quick(product([1, 2, 4], LAYOUTS, ["torch", "numba"]), lambda n: n % 11 == 0),
)
def test_every_layout_equals_the_reference(ranks, size, layout, kernel):
    """After three steps with table values near 0.1, errors of float64 sums in a different order
    stay below 1e-12.
    """
    if kernel == "numba":
        pytest.importorskip("numba")
    case = case_of(layout, size, kernel)
    results = ranks(size, train, case)
    outputs, tables = reference(case)
    for output, wanted in zip(join_outputs(results), outputs, strict=True):
        for name, value in wanted.items():
            np.testing.assert_allclose(output[name], value, rtol=0, atol=1e-12)
    for name, (weights, state) in join_tables(case, results).items():
        np.testing.assert_allclose(weights, tables[name], rtol=0, atol=1e-12)
        assert {key: value.ndim for key, value in state.items()} == {"velocity": 2, "scale": 1}


def config_of(scheme: str, **more):
    config = make_config(scheme, "sgd", **more)
    return replace(config, optimizer=replace(config.optimizer, sparse=RULE))


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["dp", "1", "2", "3"])
def test_losses_of_a_model_do_not_depend_on_the_ranks(ranks, scheme):
    config = config_of(scheme, kernel="auto")
    (one,) = ranks(1, train_wdl, config, 6)
    for size in (2, 4):
        for result in ranks(size, train_wdl, config, 6):
            np.testing.assert_allclose(result["losses"], one["losses"], rtol=0, atol=1e-12)


def job_of(world, scheme):
    config = config_of(scheme)
    spec, plan = plan_run(config, FIELDS, world_size=world.size, device_type="cpu")
    return build_job(config, spec, plan, Boxing(world))


def losses_of(world, job, batches):
    return [float(job.trainer.step(batch.part(world.rank, world.size))) for batch in batches]


def save_and_go_on(world, folder):
    batches = make_batches(8, 30)
    job = job_of(world, "3")
    losses_of(world, job, batches[:4])
    path = Saver(folder, job.boxing, job.state, run="r", deadline_s=60).save(4, {})
    wanted = losses_of(world, job, batches[4:])
    found = []
    for scheme in ("3", "1"):
        other = job_of(world, scheme)
        losses_of(world, other, batches[:1])  # ensures that no value is correct by chance
        other.restore(open_checkpoint(path))
        found.append(losses_of(world, other, batches[4:]))
    return wanted, found


def test_checkpoints_resume_under_any_layout(ranks, memory):
    for wanted, (same, other) in ranks(2, save_and_go_on, memory):
        assert same == wanted
        np.testing.assert_allclose(other, wanted, rtol=0, atol=1e-12)
    saved = open_checkpoint(memory / "step-4")
    assert saved.tensors["tables/deep.C1/velocity"].shape == (37, 5)
    assert saved.tensors["tables/deep.C1/scale"].shape == (37,)


def facts(device_type="cpu", **changes) -> StackFacts:
    given = {"width": 8, "optimizer": RULE, "dtype": torch.float32, "row_dtype": torch.float32}
    given |= {"column_split": False, "device_type": device_type}
    return StackFacts(**given | changes)


def test_kernels_without_the_optimizer_are_not_chosen():
    for device in ("cpu", "cuda"):
        faults = kernel_faults(facts(device), {})
        for kernel in ("fbgemm", "triton"):
            assert faults[kernel] == f"kernel {kernel} does not support scaled_momentum"
            choice = choose_kernel(kernel, facts(device), {})
            assert (choice.name, choice.reason) == ("torch", faults[kernel])
            with pytest.raises(SbpError, match=f"kernel {kernel} does not support scaled_momentum"):
                kernel_function(RULE, kernel)
    assert choose_kernel("auto", facts(), {}).name == "numba"
    assert choose_kernel("auto", facts("cuda"), {}).name == "torch"


def test_a_kernel_that_supports_no_table_is_refused():
    pytest.importorskip("fbgemm_gpu")
    plan = case_of("scheme 3", 2, "auto").plan(2)
    with pytest.raises(ConfigError, match=r"fbgemm supports none .* support scaled_momentum"):
        choose_kernels(plan, "fbgemm")


@pytest.mark.parametrize(
    "place", ["tests.embedding.own_rule_loops:scaled_momentun", "tests.no_loops:scaled_momentum"]
)
def test_functions_of_kernels_that_do_not_exist_are_named(monkeypatch, place):
    pytest.importorskip("numba")
    monkeypatch.setattr(ScaledMomentum, "kernels", {"numba": place})
    with pytest.raises(SbpError, match=rf"kernels\['numba'\] is '{place}'"):
        kernel_function(RULE, "numba")


def test_mistakes_in_kernel_declarations_are_named(monkeypatch):
    monkeypatch.setattr(ScaledMomentum, "kernels", {"nunba": "own_rule_loops:scaled_momentum"})
    with pytest.raises(ConfigError, match=r"kernels contains nunba; use one of numba"):
        ScaledMomentum()


def test_mistakes_in_state_declarations_are_named(monkeypatch):
    monkeypatch.setattr(ScaledMomentum, "state", {"velocity": "elements", "scale": "column"})
    with pytest.raises(
        ConfigError, match=r"state contains column, elements; use element .* or row"
    ):
        ScaledMomentum()


@pytest.mark.parametrize("factors", [{"a": 1.0}, ([0.5], 1.0)])
def test_constants_that_cannot_be_compared_are_named(factors):
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Mapped(ScaledMomentum):
        factors: object = ()

    with pytest.raises(ConfigError, match="factors must be a number, a string, or a tuple of"):
        Mapped(factors=factors)


def test_a_user_optimizer_is_planned_and_priced():
    _, plan = plan_run(config_of("auto", kernel="auto"), FIELDS, world_size=4, device_type="cpu")
    assert plan.priced
    assert all(candidate.ms > 0 for candidate in plan.priced)
    (table,) = [table for table in describe(plan)["tables"] if table["name"] == "deep.C1"]
    for shard in table["shards"]:
        rows, columns = (stop - start for start, stop in (shard["rows"], shard["columns"]))
        assert shard["state_bytes"] == 8 * rows * (columns + 1)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_optimizers_are_selected_by_module_and_class(synth_set, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    text = "parallel: {{scheme: 3}}\noptimizer: {{sparse: {{name: '{}', momentum: 0.7}}}}"
    path.write_text(text.format(NAME))
    key = f"optimizer.tables.wide.*={{name: '{NAME}', lr: 0.2}}"
    more = [key, "optimizer.tables.wide.*.momentum=0.5"]
    config = load_config(path, more, models=MODELS)
    sparse, wide = config.optimizer.sparse, config.optimizer.tables["wide.*"]
    assert (type(sparse), sparse.name, sparse.momentum) == (ScaledMomentum, NAME, 0.7)
    assert (type(wide), wide.lr, wide.momentum) == (ScaledMomentum, 0.2, 0.5)
    assert sparse_optimizer(NAME, momentum=0.7) == sparse
    path.write_text(dump_config(config))
    assert load_config(path, models=MODELS) == config

    words = ["--ranks", "2", "--json", f"data.path={synth_set}", "data.batch_size=256"]
    assert explain(["--config", str(path), *words]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert {table["kernel"] for table in tables} <= {"numba", "torch"}

    kept = plain(config)
    with pytest.raises(ConfigError, match=f"--optimizer: .* add --optimizer {NAME}"):
        config_from_tree(kept, models=MODELS)
    assert config_from_tree(kept, models=MODELS, own_optimizers=[NAME]) == config
    kept = plain(load_config(path, ["optimizer={}"], models=MODELS))
    with pytest.raises(ConfigError, match=f"--optimizer: no table uses {NAME}"):
        config_from_tree(kept, models=MODELS, own_optimizers=[NAME])


MISTAKES = {
    "tests.embedding.own_rule": r"sparse\.name: .* does not have the form package\.module:Class",
    "no_such_module:Rule": r"optimizer\.sparse\.name: .* module no_such_module does not exist",
    "tests.embedding.own_rule:ScaledMomentun": r"did you mean ScaledMomentum\?",
    "tests.embedding.own_rule:RowBlock": r"RowBlock is not a sparse optimizer",
    "sbpflow:SparseOptimizer": r"SparseOptimizer is not a sparse optimizer",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_unknown_optimizer_names_are_refused(tmp_path, name):
    (tmp_path / "config.yaml").write_text(f"optimizer: {{sparse: {{name: '{name}'}}}}")
    with pytest.raises(ConfigError, match=MISTAKES[name]):
        load_config(tmp_path / "config.yaml", models=MODELS)


def test_every_kernel_of_a_rule_exists():
    pytest.importorskip("numba")
    pytest.importorskip("triton")
    pytest.importorskip("fbgemm_gpu")
    found = {}
    for kernel, device in (("numba", "cpu"), ("triton", "cuda"), ("fbgemm", "cpu")):
        rules = [sparse_optimizer(name) for name in RULES]
        rules = [r for r in rules if kernel_faults(facts(device, optimizer=r), {})[kernel] is None]
        assert all(kernel_function(rule, kernel).__name__ == rule.name for rule in rules)
        found[kernel] = {rule.name for rule in rules}
    assert found["numba"] == found["triton"] == set(RULES)
    assert found["fbgemm"] == {"sgd", "adagrad", "rowwise_adagrad"}


def test_kernels_without_a_function_for_a_built_in_rule_are_not_chosen(monkeypatch):
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Tripled(Sgd):
        name: str = "tripled"
        built_into: ClassVar = ("numba",)

    monkeypatch.setitem(RULES, "tripled", Tripled)
    for device, chosen in (("cpu", "numba"), ("cuda", "torch")):
        faults = kernel_faults(facts(device, optimizer=Tripled()), {})
        for kernel in ("fbgemm", "triton"):
            assert faults[kernel] == f"kernel {kernel} does not support tripled"
        assert choose_kernel("auto", facts(device, optimizer=Tripled()), {}).name == chosen


def test_a_class_derived_from_a_built_in_rule_does_not_inherit_its_functions():
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Doubled(Sgd):
        name: str = "doubled"

        def step(self, block):
            block.subtract(2 * block.grads)

    faults = kernel_faults(facts(optimizer=Doubled()), {})
    assert faults["numba"] == "kernel numba does not support doubled"


def test_commands_that_rewrite_keys_import_the_optimizer_only_by_name(monkeypatch, tmp_path):
    _, plan = plan_run(config_of("3"), FIELDS, world_size=1, device_type="cpu")
    saved = SimpleNamespace(path=tmp_path, documents={"plan": json.loads(plan_to_json(plan))})
    monkeypatch.delitem(sys.modules, "tests.embedding.own_rule")
    with pytest.raises(CheckpointError, match=r"has not been imported.*name its class"):
        check_grows(saved, "C1")
    import_optimizers([NAME])
    with pytest.raises(ConfigError, match="--field C1 does not grow"):
        check_grows(saved, "C1")
    erase = ["erase", str(tmp_path), "--field", "C1", "--keys", str(tmp_path / "keys")]
    to_keys = ["to-keys", str(tmp_path), "--data", str(tmp_path), "--output", str(tmp_path / "out")]
    for words in (erase, to_keys):
        with pytest.raises(ConfigError, match="--optimizer: no_such:Rule cannot be imported"):
            checkpoint([*words, "--optimizer", "no_such:Rule"])

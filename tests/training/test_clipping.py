"""Tests that clipping by the global norm does not depend on the layouts.

The oracle uses numpy: in a step of SGD, a parameter's change divided by the learning rate is its
negative gradient. The norm is computed over the changes of all full tensors.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sbpflow.config.schema import Config
from sbpflow.config.table_rules import TableRule
from sbpflow.config.train_options import ClipConfig
from sbpflow.embedding.rules.sgd import Sgd
from sbpflow.runtime.ranks.world import World
from tests.training.wdl_case import make_batches, make_config, make_job

RATE = 0.1  # learning rate of both optimizers in `make_config`


def one_step(world: World, config: Config, together: int = 1) -> dict[str, Any]:
    """Train a step; return the changes of this rank's parts by name, and the trainer's norm."""
    job = make_job(world, config)
    before = {name: whole(world, tensor) for name, tensor in job.state().items()}
    batches = [b.part(world.rank, world.size) for b in make_batches(3, 30)[:together]]
    job.trainer.step(batches)
    changes = {
        name: whole(world, tensor) - before[name]
        for name, tensor in job.state().items()
        if name.count("/") == 1
    }
    norm = job.trainer.gradient_norm
    return {"changes": changes, "norm": None if norm is None else float(norm)}


def whole(world: World, tensor: Any) -> np.ndarray:
    """Return this rank's rectangles in a full tensor, NaN elsewhere."""
    full = np.full(tensor.shape, np.nan).reshape(tensor.shape[0], -1)
    for part in tensor.rectangles:
        place = part.place
        rows, columns = (
            slice(place.row_start, place.row_stop),
            slice(place.col_start, place.col_stop),
        )
        full[rows, columns] = (
            part.values.detach().double().numpy().reshape(full[rows, columns].shape)
        )
    return full.reshape(tensor.shape)


def joined(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Assemble the full changes from the parts of all ranks."""
    return {
        name: np.nanmean(np.stack([result["changes"][name] for result in results]), 0)
        for name in results[0]["changes"]
    }


def norm_of(changes: dict[str, np.ndarray], *, rows: bool) -> float:
    parts = [c for name, c in changes.items() if rows or name.startswith("dense/")]
    return float(np.sqrt(sum((part**2).sum() for part in parts))) / RATE


MIXED = {
    "deep.C1": TableRule(sbp="S(0)", ranks=(1,)),
    "deep.C2": TableRule(sbp="S(0)", ranks=(1, 0), sizes=(4, 7), exchange="unique"),
    "deep.C3": TableRule(sbp="S(1)"),
    "deep.C4": TableRule(sbp="B"),
    "wide.C3xC4": TableRule(sbp="B"),
}
GRID = {
    "deep.C1": TableRule(sbp="(S(0), S(1))", ranks=((0, 1), (2, 3))),
    "deep.C3": TableRule(sbp="(S(0), S(1))", ranks=((3, 1),), sizes=((53,), (1, 4))),
    "wide.*": TableRule(sbp="S(0)", exchange="reduce"),
}
SPLIT = {"mlp.0.*": "S(0)", "mlp.1.weight": "S(1)"}
CASES = {
    "dp": (2, make_config("dp", "sgd")),
    "scheme 1": (2, make_config("1", "sgd")),
    "scheme 2": (3, make_config("2", "sgd")),
    "scheme 3": (3, make_config("3", "sgd")),
    "split linears": (2, make_config("3", "sgd", dense_layouts=SPLIT)),
    "mixed": (2, make_config("2", "sgd", tables=MIXED, dense_layouts=SPLIT)),
    "grid": (4, make_config("1", "sgd", tables=GRID)),
}


def with_clip(config: Config, norm: float, *, rows: bool) -> Config:
    clip = ClipConfig(norm=norm, rows=rows)
    return replace(config, optimizer=replace(config.optimizer, clip=clip))


@pytest.fixture(scope="module")
def plain() -> dict[int, dict[str, np.ndarray]]:
    return {}


def unclipped(ranks, plain, together: int) -> dict[str, np.ndarray]:
    """Return the changes on one rank without clipping."""
    if together not in plain:
        plain[together] = joined(ranks(1, one_step, make_config("dp", "sgd"), together))
    return plain[together]


@pytest.mark.few(5)
@pytest.mark.parametrize("rows", [True, False], ids=["all", "dense"])
@pytest.mark.parametrize("case", CASES)
def test_the_norm_is_of_the_full_gradient_in_every_layout(ranks, plain, case, rows):
    changes = unclipped(ranks, plain, 1)
    norm = norm_of(changes, rows=rows)
    world_size, config = CASES[case]
    results = ranks(world_size, one_step, with_clip(config, norm / 3, rows=rows))
    # float64 sums are computed in another order
    assert [result["norm"] for result in results] == pytest.approx([norm] * world_size, rel=1e-12)
    factor = norm / 3 / (norm + 1e-6)
    for name, change in joined(results).items():
        scaled = rows or name.startswith("dense/")
        want = changes[name] * (factor if scaled else 1.0)
        np.testing.assert_allclose(change, want, rtol=0, atol=1e-12, err_msg=name)
    assert factor < 0.4
    assert all(np.abs(change).max() > 1e-6 for change in changes.values())


def test_accumulated_batches_are_clipped_as_one_gradient(ranks, plain):
    changes = unclipped(ranks, plain, 2)
    norm = norm_of(changes, rows=True)
    assert norm != pytest.approx(norm_of(unclipped(ranks, plain, 1), rows=True), rel=1e-3)
    config = with_clip(make_config("3", "sgd"), norm / 2, rows=True)
    results = ranks(2, one_step, config, 2)
    assert results[0]["norm"] == pytest.approx(norm, rel=1e-12)
    for name, change in joined(results).items():
        np.testing.assert_allclose(change, changes[name] * (0.5 * norm / (norm + 1e-6)), atol=1e-12)


@pytest.mark.parametrize("kernel", ["torch", "fbgemm", "numba"])
def test_kernels_agree_on_norm_and_rows(ranks, kernel):
    pytest.importorskip({"fbgemm": "fbgemm_gpu"}.get(kernel, kernel))
    config = make_config("1", "sgd", dtype="float32", dim=8, kernel=kernel)
    exact = make_config("1", "sgd", dim=8)
    (want,) = ranks(1, one_step, with_clip(exact, 0.01, rows=True))
    results = ranks(2, one_step, with_clip(config, 0.01, rows=True))
    # float32 gradients
    assert results[0]["norm"] == pytest.approx(want["norm"], rel=1e-5)
    for name, change in joined(results).items():
        np.testing.assert_allclose(change, want["changes"][name], rtol=0, atol=1e-7, err_msg=name)


def test_norms_below_the_limit_change_nothing(ranks):
    config = make_config("2", "sgd")
    for one, other in zip(
        ranks(2, one_step, config),
        ranks(2, one_step, with_clip(config, 1e9, rows=True)),
        strict=True,
    ):
        for name, change in one["changes"].items():
            np.testing.assert_array_equal(change, other["changes"][name])


def planned_and_sent(world: World, config: Config) -> tuple[list[str], list[str]]:
    """Return the transfers for clipping in the plan and in the log."""
    job = make_job(world, config)
    world.log.records.clear()
    job.trainer.step(make_batches(3, 30)[0].part(world.rank, world.size))
    clip = [f"{r.step_id} {r.bytes_sent}" for r in world.log.records if r.step_id.startswith("cl")]
    planned = [
        f"{step.id} {step.bytes_sent(world.rank)}"
        for phase, step in job.plan.steps()
        if phase == "clip"
    ]
    return planned, clip


def test_clipping_sends_one_number_or_none(ranks):
    rows = with_clip(make_config("3", "sgd"), 1.0, rows=True)
    for planned, sent in ranks(2, planned_and_sent, rows):
        assert planned == sent == ["clip/bwd/norm 8"]
    whole = with_clip(make_config("3", "sgd"), 1.0, rows=False)
    assert ranks(2, planned_and_sent, whole) == [([], []), ([], [])]
    split = with_clip(make_config("3", "sgd", dense_layouts=SPLIT), 1.0, rows=False)
    for planned, sent in ranks(2, planned_and_sent, split):
        assert planned == sent == ["clip/bwd/norm 8"]


def test_the_factor_is_that_of_torch(ranks):
    """The oracle is ``clip_grad_norm_`` on the gradients derived from SGD steps."""
    config = make_config("dp", "sgd")
    changes = joined(ranks(1, one_step, config))
    leaves = []
    for change in changes.values():
        leaf = torch.zeros(change.shape, dtype=torch.float64, requires_grad=True)
        leaf.grad = torch.from_numpy(change / -RATE)
        leaves.append(leaf)
    norm = torch.nn.utils.clip_grad_norm_(leaves, 0.05)
    (result,) = ranks(1, one_step, with_clip(config, 0.05, rows=True))
    assert result["norm"] == pytest.approx(float(norm), rel=1e-12)
    for leaf, change in zip(leaves, result["changes"].values(), strict=True):
        np.testing.assert_allclose(change, -RATE * leaf.grad.numpy(), rtol=0, atol=1e-12)


def test_tables_of_one_group_have_separate_rates_and_are_clipped_together(ranks):
    optimizer = replace(
        make_config("1", "sgd").optimizer,
        tables={"deep.C2": Sgd(lr=0.3)},
        clip=ClipConfig(norm=0.05, rows=True),
    )
    config = replace(make_config("1", "sgd"), optimizer=optimizer)
    base = with_clip(make_config("1", "sgd"), 0.05, rows=True)
    one, other = ranks(2, one_step, base), ranks(2, one_step, config)
    assert one[0]["norm"] == pytest.approx(other[0]["norm"], rel=1e-12)
    slow, fast = joined(one), joined(other)
    for name, change in fast.items():
        times = 3.0 if name == "tables/deep.C2" else 1.0
        np.testing.assert_allclose(change, times * slow[name], rtol=0, atol=1e-12, err_msg=name)

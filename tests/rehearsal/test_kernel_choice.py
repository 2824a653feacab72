"""Tests that rank 0 measures the kernels of a CUDA run on the device, once per machine."""

from unittest import mock

import pytest

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage import measure
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.kernels import with_measured_kernels
from tests.training.wdl_case import FIELDS, make_config


def measured(world, folder, kernels):
    """Choose kernels with only these available; return the kernels and the reasons, and the device
    and the kernels of each measurement.
    """
    shapes, real = [], measure.measure

    def spy(shape, names):
        shapes.append((shape.device, list(names)))
        return real(shape, names)

    world.checked = False
    there = {"fbgemm": "FBGEMM is not installed", "numba": "numba is not installed"}
    if "triton" not in kernels:
        there["triton"] = "Triton is not installed"
    config = make_config("1", "adagrad", dtype="float32", dim=4, kernel="auto", batch_size=12)
    with (
        mock.patch("sbpflow.run.planning.kernels.missing_kernels", return_value=there),
        mock.patch("sbpflow.run.planning.kernels.measure", spy),
        mock.patch.object(measure, "cache_dir", return_value=folder),
        mock.patch.object(measure, "SECONDS", 0.0),
        mock.patch.object(measure, "LEAST_ROUNDS", 1),
    ):
        _, plan = plan_run(config, FIELDS, world_size=world.size, device_type="cuda")
        plan = with_measured_kernels(plan, "auto", Boxing(world))
        again = with_measured_kernels(plan, "auto", Boxing(world))
    assert again.kernels == plan.kernels
    return sorted({(choice.name, choice.reason[:8]) for choice in plan.kernels.values()}), shapes


def test_single_available_kernel_is_not_measured(rehearsed_ranks, tmp_path):
    ((found, shapes),) = rehearsed_ranks(1, measured, tmp_path, ["torch"])
    assert [name for name, _ in found] == ["torch"]
    assert shapes == []


def test_kernels_are_timed_on_the_device(rehearsed_ranks, tmp_path):
    pytest.importorskip("triton")
    first, second = rehearsed_ranks(2, measured, tmp_path, ["torch", "triton"])
    assert first[0] == second[0]
    assert {reason for _, reason in first[0]} == {"measured"}
    assert first[1]
    assert all(shape == ("rehearsed CUDA device", ["torch", "triton"]) for shape in first[1])
    assert second[1] == []


def times_of_torch(world):
    shape = measure.StackShape(
        rows=40,
        width=4,
        dim=4,
        ids=64,
        per_bag=2,
        lists=2,
        home_ids=16,
        optimizer=sparse_optimizer("adagrad", lr=0.1),
        dtype=measure.torch.float32,
        row_dtype=measure.torch.bfloat16,
        device="rehearsed CUDA device",
    )
    assert "rehearsed" in shape.key()
    with mock.patch.object(measure, "MOST_ROUNDS", 1):
        return measure.measure(shape, ["torch"])


def test_turns_are_timed_by_device_events(rehearsed_ranks):
    (times,) = rehearsed_ranks(1, times_of_torch)
    assert times["torch"] > 0

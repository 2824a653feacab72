"""Tests the choice of kernels by measurement: the tolerance band, the cache, and one choice for all
ranks."""

import json
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage import measure as module
from sbpflow.embedding.storage.choose import KernelChoice
from sbpflow.embedding.storage.measure import Profile, StackShape, choose_by_times, measure
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.kernels import with_known_kernels, with_measured_kernels
from sbpflow.runtime.ranks.world import World
from tests.training.wdl_case import FIELDS, make_config

NUMBA = KernelChoice("numba", "compiled for this CPU")
KERNELS = ["torch", *(name for name in ("numba",) if find_spec(name))]


def shape_of(**changes) -> StackShape:
    given = {
        "rows": 100,
        "width": 4,
        "dim": 4,
        "ids": 64,
        "per_bag": 1,
        "lists": 0,
        "home_ids": 0,
        "optimizer": sparse_optimizer("rowwise_adagrad", lr=0.1),
        "dtype": torch.float32,
        "row_dtype": torch.float32,
    }
    return StackShape(**{**given, **changes})


@pytest.mark.parametrize(
    ("times", "name"),
    [
        # The default kernel, numba, is kept if it is at most 5 % slower than the fastest.
        ({"torch": 1.0, "numba": 1.05}, "numba"),
        ({"torch": 1.0, "numba": 1.06}, "torch"),
        ({"torch": 1.0, "fbgemm": 0.9}, "fbgemm"),
        ({"torch": 2.0, "numba": 1.0, "fbgemm": 0.99}, "numba"),
    ],
)
def test_the_default_kernel_is_kept_within_the_tolerance(times, name):
    choice = choose_by_times(NUMBA, times)
    assert choice.name == name
    assert f"measured {times[name]:.2f} ms" in choice.reason
    assert all(f"{key} {ms:.2f}" in choice.reason for key, ms in times.items() if key != name)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"per_bag": 4},
        {"lists": 2, "home_ids": 32},
        {"row_dtype": torch.bfloat16},
        {"optimizer": sparse_optimizer("ftrl", lr=0.1), "width": 3},
    ],
)
def test_every_kernel_is_timed_on_every_shape(changes):
    times = measure(shape_of(**changes), KERNELS)
    assert list(times) == KERNELS
    assert all(0 < ms < 1000 for ms in times.values())


@pytest.mark.parametrize("rows", [1, 500, 7919, 2 * 7919])
def test_the_ids_of_a_measurement_reach_every_row(rows):
    ids = module._draw(20 * rows, rows, 1.0, torch.Generator().manual_seed(1))
    assert ids.unique().tolist() == list(range(rows))


def test_profile_stores_times_by_shape_with_their_origin(tmp_path):
    path = tmp_path / "a" / "profile.json"
    one, other = shape_of(), shape_of(ids=65)
    Profile(path).keep(one, {"torch": 1.5})
    Profile(path).keep(other, {"torch": 2.5, "numba": 1.0})
    assert Profile(path).find(one, ["torch"]) == {"torch": 1.5}
    assert Profile(path).find(one, ["torch", "numba"]) is None
    assert Profile(path).find(other, ["torch", "numba"]) == {"torch": 2.5, "numba": 1.0}
    assert Profile(path).find(other, ["torch"]) is None
    assert Profile(path).find(shape_of(width=5), ["torch"]) is None
    assert all(entry["taken"] and "cpu" in entry for entry in json.loads(path.read_text()).values())
    path.write_text("{ half")  # kernels are measured again if the file is corrupt
    assert Profile(path).find(one, ["torch"]) is None
    Profile(path).keep(one, {"torch": 3.5})
    assert Profile(path).find(one, ["torch"]) == {"torch": 3.5}
    for entry in ({}, {"ms": {}}, {"ms": 3}, [1]):
        path.write_text(json.dumps({one.key(): entry}))
        assert Profile(path).find(one, ["torch"]) is None


@pytest.mark.parametrize("package", ["numba", "fbgemm-gpu", "triton"])
def test_times_are_not_reused_with_another_version_of_a_kernel(package, monkeypatch):
    find, key = module.metadata.version, shape_of().key()
    monkeypatch.setattr(
        module.metadata, "version", lambda name: "0.0" if name == package else find(name)
    )
    assert shape_of().key() != key


def test_unwritable_cache_logs_a_warning(tmp_path, caplog):
    """A read-only home directory, as in a container, must not end the run."""
    (tmp_path / "file").touch()
    Profile(tmp_path / "file" / "profile.json").keep(shape_of(), {"torch": 1.5})
    (record,) = caplog.records
    assert "cannot cache kernel times" in record.message
    assert str(tmp_path / "file") in record.message
    assert "set XDG_CACHE_HOME to a folder that you can write to" in record.message


def choose(world: World, folder: Path) -> tuple[dict[str, tuple[str, str]], int]:
    """Return each table's kernel and the reason for it, and the number of measurements on this
    rank.
    """
    config = make_config("3", "rowwise_adagrad", dtype="float32", dim=8, kernel="auto")
    _, plan = plan_run(config, FIELDS, world_size=world.size, device_type="cpu")
    calls = []

    def fake(shape, names):
        calls.append(shape)
        return {name: 3.0 - names.index(name) + 0.25 * len(calls) for name in names}

    with (
        mock.patch("sbpflow.run.planning.kernels.measure", fake),
        mock.patch.object(module, "cache_dir", return_value=folder / str(world.rank)),
    ):
        plan = with_measured_kernels(plan, "auto", Boxing(world))
        again = with_measured_kernels(plan, "auto", Boxing(world))
        known = with_known_kernels(plan, "auto")
    assert again.kernels == plan.kernels
    if world.rank == 0:
        assert known.kernels == plan.kernels
    return {name: (c.name, c.reason) for name, c in plan.kernels.items()}, len(calls)


@pytest.mark.skipif(len(KERNELS) < 2, reason="one kernel is no choice")
def test_rank_0_measures_for_all_ranks(ranks, tmp_path):
    (first, measured), (second, none) = ranks(2, choose, tmp_path)
    assert first == second
    assert all("measured" in reason for _, reason in first.values())
    assert measured == len({reason for _, reason in first.values()}) > 0
    assert none == 0


def test_requested_kernel_is_not_measured(ranks):
    assert ranks(1, asked_for) == [True]


def asked_for(world: World) -> bool:
    config = make_config("3", "rowwise_adagrad", dtype="float32", dim=8, kernel="torch")
    _, plan = plan_run(config, FIELDS, world_size=1, device_type="cpu")
    return with_measured_kernels(plan, "torch", Boxing(world)) is plan

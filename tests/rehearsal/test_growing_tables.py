"""Tests growing tables on rehearsed devices: the same vocabularies and rows as on CPU."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from sbpflow.embedding.plan.growth import MIN_ROWS, Eviction, Growth
from sbpflow.embedding.plan.row_storage import RowStorage
from tests.embedding.cases import Spec
from tests.embedding.growing_case import UNIQUE, GrowingCase, check_equal, joined, run_case
from tests.embedding.test_growing import SHARE, cached, resumed
from tests.training.test_growing_sets import MODEL, make

pytest.importorskip("numba", reason="growing tables need numba")
EVICTING = Growth(
    evict=Eviction(max_rows=MIN_ROWS, idle_samples=150), admit_count=2, forget_after_samples=100
)
CASE = GrowingCase(growth=EVICTING)


def both(ranks, rehearsed_ranks, tmp_path, world_size, function, case, *args):
    """Return the results on CPU and on rehearsed devices; the function saves in a folder."""
    results = []
    for run, device in ((ranks, "cpu"), (rehearsed_ranks, "cuda")):
        (tmp_path / device).mkdir()
        case = replace(case, device=device)
        results.append(run(world_size, function, case, tmp_path / device, *args))
    return results


@pytest.mark.few(1)
@pytest.mark.parametrize(("world_size", "ragged"), [(1, False), (2, True)])
def test_growing_tables_equal_those_on_cpu(ranks, rehearsed_ranks, tmp_path, world_size, ragged):
    case = replace(CASE, ragged=ragged)
    plain, on_cuda = both(ranks, rehearsed_ranks, tmp_path, world_size, run_case, case)
    assert plain[0]["counts"] == on_cuda[0]["counts"]
    for key in ("outputs", "evaluated"):
        for one, other in zip(joined(plain, key), joined(on_cuda, key), strict=True):
            for name, values in one.items():
                np.testing.assert_allclose(other[name], values, rtol=0, atol=1e-9)
    check_equal(tmp_path / "cpu" / "step-24", tmp_path / "cuda" / "step-24")


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "deep"), [(1, UNIQUE), (2, Spec("S(0)", "reduce"))])
def test_16_bit_growing_tables_round_as_on_cpu(ranks, rehearsed_ranks, tmp_path, world_size, deep):
    case = replace(CASE, dtype=torch.float32, row_dtype=torch.bfloat16, deep=deep)
    both(ranks, rehearsed_ranks, tmp_path, world_size, run_case, case)
    check_equal(tmp_path / "cpu" / "step-24", tmp_path / "cuda" / "step-24", atol=1e-6)


@pytest.mark.slow
def test_growing_cached_tables_equal_those_on_cpu(ranks, rehearsed_ranks, tmp_path):
    storage = RowStorage(kind="host", share=SHARE, key="parallel.storage.deep")
    case = replace(CASE, ahead=4, storage=storage)
    (one,), (other,) = both(ranks, rehearsed_ranks, tmp_path, 1, cached, case)
    for wanted, value in zip(one[0], other[0], strict=True):
        np.testing.assert_allclose(value["deep"], wanted["deep"], rtol=0, atol=1e-9)
    check_equal(tmp_path / "cpu" / "step-24", tmp_path / "cuda" / "step-24")


@pytest.mark.slow
def test_background_save_of_growing_tables_equals_one_on_cpu(ranks, rehearsed_ranks, tmp_path):
    case = replace(CASE, ahead=3)
    for run, device in ((ranks, "cpu"), (rehearsed_ranks, "cuda")):
        (tmp_path / device).mkdir()
        own = replace(case, device=device)
        run(2, resumed, own, 0, 12, None, tmp_path / device, True)
        run(2, resumed, own, 12, 18, tmp_path / device / "step-12", tmp_path / device, False)
    check_equal(tmp_path / "cpu" / "step-12", tmp_path / "cuda" / "step-12")
    check_equal(tmp_path / "cpu" / "step-18", tmp_path / "cuda" / "step-18")


def run_of_one_rank(world, arguments):
    from sbpflow.commands import train

    return train.main(arguments)


def test_run_with_growing_tables_equals_one_on_cpu(rehearsed_ranks, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(MODEL)
    path = make(tmp_path, "first", 1, "--keys", "C3,C7")
    scores = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        more = ["--config", str(config), f"data.path={path}", f"run.dir={folder}"]
        more += [f"parallel.device={device}", "checkpoint.deltas=2", "train.log_every=1"]
        more += ["train.max_steps=20", "model.dropout=0"]  # masks differ between devices
        if device == "cpu":
            assert run_of_one_rank(None, more) == 0
        else:
            assert rehearsed_ranks(1, run_of_one_rank, more) == [0]
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        scores.append([line["loss"] for line in lines if line["event"] == "step"])
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)

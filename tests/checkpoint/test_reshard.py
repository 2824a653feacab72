"""Tests that state saved under one layout gives the same results when resumed under another.

The tests run a seeded sample of the cases; ``benchmarks/reshard.py`` runs the full matrix.
"""

import pytest
import torch

from benchmarks.reshard import (
    bound_of,
    cases,
    go_on_all,
    save_all,
    saved_folder,
)
from sbpflow.checkpoint.read import open_checkpoint


@pytest.mark.parametrize("count", [6, pytest.param(14, marks=pytest.mark.slow)])
def test_runs_resume_under_another_layout(ranks, memory, count):
    sample = cases(seed=1, count=count, before=3, after=4)
    for size in (1, 2, 4):
        ranks(size, save_all, str(memory), sample)
    found = [result for size in (1, 2, 4) for result in ranks(size, go_on_all, str(memory), sample)]
    beyond = [
        (sample[number], name, difference)
        for of_rank in found
        for number, differences in of_rank.items()
        for name, difference in differences.items()
        if not difference <= bound_of(sample[number])
    ]
    assert beyond == []
    assert {number for of_rank in found for number in of_rank} == set(range(len(sample)))
    assert sum(bound_of(case) == 0.0 for case in sample) >= count // 4, (
        "some are to be equal bit by bit"
    )
    assert (
        {case.saved.size for case in sample} == {case.loaded.size for case in sample} == {1, 2, 4}
    )
    for case in sample[:5]:
        saved = open_checkpoint(saved_folder(memory, case) / f"step-{case.before}")
        saved.verify()
        whole = sum(t.whole.num_elements * t.dtype.itemsize for t in saved.tensors.values())
        assert saved.num_bytes == whole, "copies are written once"
        rows = torch.bfloat16 if case.half else torch.float64
        assert saved.tensors["tables/deep.C1"].dtype == rows

"""Tests that state saved under one layout gives the same results when resumed under another.

The tests run a seeded sample of the cases; ``benchmarks/reshard.py`` runs the full matrix.
"""

import torch

from benchmarks.reshard import (
    bound_of,
    cases,
    go_on_all,
    save_all,
    saved_folder,
)
from sbpflow.checkpoint.read import open_checkpoint

SAMPLE = cases(seed=5, count=5, before=3, after=4)


def test_runs_resume_under_another_layout(ranks, memory):
    for size in (1, 2, 4):
        ranks(size, save_all, str(memory), SAMPLE)
    found = [result for size in (1, 2, 4) for result in ranks(size, go_on_all, str(memory), SAMPLE)]
    beyond = [
        (SAMPLE[number], name, difference)
        for of_rank in found
        for number, differences in of_rank.items()
        for name, difference in differences.items()
        if not difference <= bound_of(SAMPLE[number])
    ]
    assert beyond == []
    assert {number for of_rank in found for number in of_rank} == set(range(len(SAMPLE)))
    assert sum(bound_of(case) == 0.0 for case in SAMPLE) >= 3, "some are to be equal bit by bit"
    assert (
        {case.saved.size for case in SAMPLE} == {case.loaded.size for case in SAMPLE} == {1, 2, 4}
    )
    for case in SAMPLE[:5]:
        saved = open_checkpoint(saved_folder(memory, case) / f"step-{case.before}")
        saved.verify()
        whole = sum(t.whole.num_elements * t.dtype.itemsize for t in saved.tensors.values())
        assert saved.num_bytes == whole, "copies are written once"
        rows = torch.bfloat16 if case.half else torch.float64
        assert saved.tensors["tables/deep.C1"].dtype == rows

"""What was saved under one layout goes on under another, as if it had never stopped.

A seeded sample; ``benchmarks/reshard.py`` has the whole matrix.
"""

import torch

from benchmarks.reshard import (
    bound_of,
    cases,
    differences,
    go_on_all,
    save_all,
    saved_folder,
)
from sbpflow.checkpoint.read import open_checkpoint

SAMPLE = cases(seed=5, count=40, before=3, after=4)


def test_a_run_goes_on_under_another_layout(ranks, memory):
    for phase in (save_all, go_on_all):
        for size in (1, 2, 4):
            ranks(size, phase, str(memory), SAMPLE)
    beyond = [
        (case, name, difference)
        for case in SAMPLE
        for name, difference in differences(memory, case).items()
        if not difference <= bound_of(case)
    ]
    assert beyond == []
    assert sum(bound_of(case) == 0.0 for case in SAMPLE) >= 5, "some are to be equal bit by bit"
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

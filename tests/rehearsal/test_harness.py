"""Tests that the rehearsal rejects what would fail or compute garbage on a GPU, and lists host
waits.
"""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed


def cpu_among_cuda(world):
    return torch.ones(3, device="cuda") + torch.ones(3)


def cpu_index(world):
    return torch.ones(3, device="cuda").index_select(0, torch.tensor([0]))


def integer_product(world):
    return torch.ones(2, 2, dtype=torch.int64, device="cuda") @ torch.ones(
        2, 2, dtype=torch.int64, device="cuda"
    )


def narrow_copy_index(world):
    rows = torch.zeros(1, dtype=torch.int32, device="cuda")
    return torch.ones(3, device="cuda").index_copy_(0, rows, torch.ones(1, device="cuda"))


def numpy_of_it(world):
    return torch.ones(3, device="cuda").numpy()


def late_read_into_pageable_memory(world):
    return torch.ones(3, device="cuda").to("cpu", non_blocking=True)


def int16_on_nccl(world):
    dist.all_reduce(torch.ones(4, dtype=torch.int16, device="cuda"))


def strided_on_nccl(world):
    dist.all_reduce(torch.ones(4, 2, device="cuda").t())


def two_dtypes_on_nccl(world):
    sent = torch.ones(2, dtype=torch.float64, device="cuda")
    dist.all_to_all_single(torch.empty(2, device="cuda"), sent)


def cpu_on_nccl(world):
    dist.all_to_all_single(torch.empty(2, device="cuda"), torch.ones(2))


def wrong_splits(world):
    mine = torch.ones(4, device="cuda")
    dist.all_to_all_single(torch.empty(4, device="cuda"), mine, [2, 2], [2, 1])


def read_before_wait(world):
    out, mine = torch.empty(2, device="cuda"), torch.ones(2, device="cuda")
    dist.all_to_all_single(out, mine, async_op=True)
    return out + 1


def read_a_view_before_wait(world):
    out, mine = torch.empty(2, device="cuda"), torch.ones(2, device="cuda")
    dist.all_to_all_single(out, mine, async_op=True)
    return out[1:].view(1).tolist()


def change_input_before_wait(world):
    out, mine = torch.empty(2, device="cuda"), torch.ones(2, device="cuda")
    dist.all_to_all_single(out, mine, async_op=True)
    mine.view(1, 2)[:, 1].zero_()


def send_what_is_coming(world):
    out, mine = torch.empty(2, device="cuda"), torch.ones(2, device="cuda")
    dist.all_to_all_single(out, mine, async_op=True)
    dist.all_reduce(out)


def never_wait(world):
    dist.all_reduce(torch.ones(2, device="cuda"), async_op=True)


REFUSED = {
    cpu_among_cuda: "a CPU tensor torch.float32[3] among CUDA tensors",
    cpu_index: "a CPU tensor torch.int64[1] among CUDA tensors",
    integer_product: "not implemented on CUDA for torch.int64",
    narrow_copy_index: "an index of torch.int32",
    numpy_of_it: "can't convert cuda device type tensor",
    late_read_into_pageable_memory: "use pinned memory",
    int16_on_nccl: "NCCL does not support torch.int16",
    strided_on_nccl: "is not contiguous",
    two_dtypes_on_nccl: "dtypes [torch.float32, torch.float64] differ",
    cpu_on_nccl: "a CPU tensor torch.float32[2] on NCCL",
    wrong_splits: "splits [2, 1] of 4 rows",
    read_before_wait: "reads memory that all_to_all (tests",
    read_a_view_before_wait: "reads memory that all_to_all",
    change_input_before_wait: "changes memory that all_to_all",
    send_what_is_coming: "changes memory that all_to_all",
    never_wait: "never waited for: ['all_reduce",
}


def refusals(world, cases):
    """Return the error of each case; discard the transfers that the case started."""
    from tests.rehearsal.install import check_end, forget

    found = {}
    for case in cases:
        try:
            case(world)
            check_end()
            found[case.__name__] = "nothing was raised"
        except (RuntimeError, TypeError, AssertionError) as error:
            found[case.__name__] = str(error)
        forget()
    return found


def test_operations_that_a_gpu_rejects_are_rejected(rehearsed_ranks):
    for result in rehearsed_ranks(2, refusals, list(REFUSED)):
        for case, words in REFUSED.items():
            assert words in result[case.__name__], f"{case.__name__}: {result[case.__name__]}"


def test_unfinished_transfer_fails_the_test(rehearsed_ranks):
    with pytest.raises(RanksFailed, match="never waited for"):
        rehearsed_ranks(2, never_wait)


def syncing(world):
    from tests.rehearsal.journal import journal

    x = torch.arange(6.0, device="cuda")
    pageable = torch.ones(6)
    waits = {
        "item": lambda: float(x[0]),
        "bool": lambda: bool((x > 3).any()),
        "mask": lambda: x[x > 3],
        "nonzero": lambda: x.nonzero(),
        "unique": lambda: torch.unique(x),
        "runs": lambda: torch.unique_consecutive(x),
        "list": lambda: x.tolist(),
        "host": lambda: x.cpu(),
        "into the host": lambda: pageable.copy_(x),
        "lengths": lambda: torch.repeat_interleave(x, x.long()),
        "upload": lambda: pageable.to("cuda"),
        "upload of a list": lambda: torch.tensor([1, 2], device="cuda"),
        "upload of an index": lambda: x[torch.tensor([1, 2])],
        "synchronize": torch.cuda.synchronize,
    }
    does_not = {
        "sort": lambda: x.sort(stable=True),
        "sum": lambda: x.sum(),
        "fill": lambda: x.masked_fill_(x > 3, 0.0),
        "fill by index": lambda: x.__setitem__(x > 3, 0.0),
        "lengths": lambda: torch.repeat_interleave(x, x.long() * 0 + 1, output_size=6),
        "pinned upload": lambda: torch.ones(6).pin_memory().to("cuda", non_blocking=True),
        "shape": lambda: x.view(2, 3).shape,
    }
    counts = []
    for cases in (waits, does_not):
        for name, case in cases.items():
            with journal() as made:
                case()
            counts.append((name, [tuple(entry) for entry in made.syncs]))
    return counts, len(waits)


def test_host_waits_are_listed_with_their_line(rehearsed_ranks):
    ((counts, num_waits),) = rehearsed_ranks(1, syncing)
    for name, entries in counts[:num_waits]:
        assert len(entries) == 1, f"{name}: {entries}"
        assert entries[0][2].startswith("tests/rehearsal/test_harness.py:") or name == "synchronize"
    for name, entries in counts[num_waits:]:
        assert not entries, f"{name}: {entries}"


def async_scalar_read(world):
    from tests.rehearsal.journal import journal

    host = torch.empty(2, pin_memory=True)
    with journal() as made:
        host.copy_(torch.tensor([3.0, 4.0], device="cuda"), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        too_early = host.tolist()
        event.synchronize()
    return too_early, host.tolist(), [entry.kind for entry in made.entries]


def test_pinned_copy_is_valid_only_after_its_event(rehearsed_ranks):
    ((too_early, then, kinds),) = rehearsed_ranks(1, async_scalar_read)
    assert then == [3.0, 4.0]
    assert str(too_early) == "[nan, nan]"
    assert kinds == ["upload", "late read", "event wait"]


def ops_and_gradients(world):
    x = torch.linspace(0, 1, 6, device="cuda").view(2, 3).requires_grad_()
    y = torch.nn.functional.softmax(x @ x.t(), 1)
    y[0, 1].backward()
    assert x.is_cuda
    assert x.grad.is_cuda
    assert str(x.grad.device).startswith("cuda")
    return x.grad.cpu().numpy()


def test_numbers_and_gradients_are_real(rehearsed_ranks):
    (found,) = rehearsed_ranks(1, ops_and_gradients)
    x = torch.linspace(0, 1, 6).view(2, 3).requires_grad_()
    torch.nn.functional.softmax(x @ x.t(), 1)[0, 1].backward()
    assert (found == x.grad.numpy()).all()

"""Tests that the rehearsal rejects memory that streams use without synchronization, and memory that
is freed too early.
"""

import gc

import pytest
import torch


def made_elsewhere(world):
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.ones(3, device="cuda")
    return x + 1


def changed_elsewhere(world):
    x = torch.ones(3, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    x.zero_()
    return y


def waited_before_the_work_was_submitted(world):
    side = torch.cuda.Stream()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.stream(side):
        x = torch.ones(3, device="cuda")
    return x[1:] * 2


def event_of_too_early(world):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        event = torch.cuda.Event()
        event.record()
        x = torch.ones(3, device="cuda")
    torch.cuda.current_stream().wait_event(event)
    return x * 2


def given_back_too_early(world):
    side = torch.cuda.Stream()
    x = torch.ones(3, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    del x
    gc.collect()
    return torch.ones(3, device="cuda"), y


def transfer_waited_for_elsewhere(world):
    out, mine = torch.empty(2, device="cuda"), torch.ones(2, device="cuda")
    work = torch.distributed.all_to_all_single(out, mine, async_op=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
    return out + 1


REFUSED = {
    made_elsewhere: "reads memory that its allocation wrote on stream",
    changed_elsewhere: "changes memory that aten.add.Tensor reads on stream",
    waited_before_the_work_was_submitted: "without waiting for it",
    event_of_too_early: "without waiting for it",
    given_back_too_early: "was freed while stream",
    transfer_waited_for_elsewhere: "reads memory that all_to_all wrote on NCCL's stream",
}


def joined(world):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(3, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    return x + 1


def host_waited(world):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(3, device="cuda")
    side.synchronize()
    return x + 1


def event_waited(world):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(3, device="cuda")
        event = side.record_event()
        x.view(3) + 1
    torch.cuda.current_stream().wait_event(event)
    return x + 1


def other_parts(world):
    out = torch.empty(4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out[:2].zero_()
    out[2:].zero_()
    torch.cuda.current_stream().wait_stream(side)
    return out.sum()


def recorded(world):
    side = torch.cuda.Stream()
    x = torch.ones(3, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    x.record_stream(side)
    del x
    gc.collect()
    return torch.ones(3, device="cuda"), y


def ordered_before_it_is_taken_again(world):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(3, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    x + 1
    del x
    gc.collect()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.ones(3, device="cuda")


TAKEN = (
    joined,
    host_waited,
    event_waited,
    other_parts,
    recorded,
    ordered_before_it_is_taken_again,
)


def outcomes(world, cases):
    """Return the error of each case, or "" if there is none."""
    from tests.rehearsal.install import forget
    from tests.rehearsal.memory import RefusedError

    found = {}
    for case in cases:
        try:
            case(world)
            found[case.__name__] = ""
        except RefusedError as error:
            found[case.__name__] = str(error)
        forget()
    return found


def test_unordered_use_of_streams_is_rejected(rehearsed_ranks):
    (found,) = rehearsed_ranks(1, outcomes, [*REFUSED, *TAKEN])
    for case, words in REFUSED.items():
        assert words in found[case.__name__], f"{case.__name__}: {found[case.__name__]!r}"
    assert {found[case.__name__] for case in TAKEN} == {""}, found


def step_without(world, config, what):
    """Run a step of an engine from which the action ``what`` is removed."""
    from sbpflow.embedding.ids.ahead import IdStream
    from tests.training.wdl_case import train

    real = getattr(IdStream, what)
    try:
        setattr(IdStream, what, lambda self: None)
        train(world, config, 2)
    finally:
        setattr(IdStream, what, real)


@pytest.mark.parametrize("scheme", ["1", "3"])
def test_rows_wait_for_the_id_stream(rehearsed_ranks, scheme):
    from tests.ranks import RanksFailed
    from tests.training.wdl_case import make_config

    with pytest.raises(RanksFailed, match="without waiting for it"):
        rehearsed_ranks(1, step_without, make_config(scheme, "sgd"), "join")

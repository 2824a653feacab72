"""Tests the world, the communication log, the checked mode, and starting and waiting for
conversions.
"""

import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.errors import ConfigError, SbpError
from sbpflow.runtime.ranks.comm_log import CommRecord
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split, parse_nd_sbp
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.infer_shape import infer_shape
from tests import oracle
from tests.deadlines import run
from tests.oracle import line_layout
from tests.ranks import RanksFailed

B, P, S0, S1 = Broadcast(), Partial(), Split(0), Split(1)
ROOT = Path(__file__).parents[2]


def _steps(world_size, a, b, shape=(6, 4), id="x"):
    src, dst = line_layout("cpu", world_size, a), line_layout("cpu", world_size, b)
    return plan_boxing(src, dst, shape, torch.float32, id=id, backend="gloo")


def _log(world):
    boxing = Boxing(world)
    full = torch.arange(24.0).view(6, 4)
    for a, b, channel in ((S0, B, "ids"), (B, S0, "ids"), (S0, S1, "vectors"), (P, B, "dense")):
        steps = _steps(world.size, a, b, id=f"{channel}/fwd/0")
        boxing.run(steps, oracle.shares(full, steps[0].src)[world.rank], channel)
    world.log.enabled = False
    boxing.run(_steps(world.size, S0, B), oracle.shares(full, steps[0].dst)[world.rank][:3])
    return world.log.records


def test_the_log_lists_transfers_in_order(ranks):
    """Conversions without traffic leave no record; a disabled log records nothing."""
    assert ranks(2, _log)[1] == [
        CommRecord("ids/fwd/0", "all_gather", "ids", (0, 1), 3 * 4 * 4),
        CommRecord("vectors/fwd/0", "all_to_all", "vectors", (0, 1), 3 * 2 * 4),
        CommRecord("dense/fwd/0", "all_reduce", "dense", (0, 1), 6 * 4 * 4),
    ]


def _overlap(world):
    boxing = Boxing(world)
    full = torch.arange(24.0).view(6, 4)
    first, second = _steps(world.size, S0, S1, id="a"), _steps(world.size, S0, B, id="b")
    part = oracle.shares(full, first[0].src)[world.rank]
    boxing.prepare(first + second, "ids")
    pending = boxing.start(first, part, "ids")
    other = boxing.start(second, part, "vectors")
    gathered, split = other.wait(), pending.wait()
    assert torch.equal(gathered, full)
    assert torch.equal(split, oracle.shares(full, first[0].dst)[world.rank])
    with pytest.raises(SbpError, match="already called"):
        pending.wait()
    chain = plan_boxing(
        Layout(Placement.of("cpu", [0, 1]), (Partial("max"),)),
        Layout(Placement.of("cpu", [0, 1]), (P,)),
        (6, 4),
        torch.float32,
        id="c",
        backend="gloo",
    )
    assert len(chain) == 2
    part = boxing.start(chain, full - world.rank).wait()
    dist.all_reduce(part)
    assert torch.equal(part, full)


def test_start_and_wait(ranks):
    ranks(2, _overlap)


def _different_steps(world):
    boxing = Boxing(world)
    mine = (
        _steps(2, S0, B, id="wide/fwd/0") if world.rank == 0 else _steps(2, S0, S1, id="deep/fwd/0")
    )
    boxing.run(mine, torch.zeros(3, 4))


@pytest.mark.checked
def test_ranks_with_different_steps_are_named(ranks):
    with pytest.raises(RanksFailed) as caught:
        ranks(2, _different_steps)
    assert len(caught.value.errors) == 2
    for text in caught.value.errors.values():
        assert "SbpError: ranks take different steps" in text
        assert "rank 0 is at wide/fwd/0 (all_gather, 96 bytes" in text
        assert "rank 1 is at deep/fwd/0 (all_to_all, 48 bytes" in text


def _skipped_step(world):
    boxing = Boxing(world)
    for number in range(3):
        if (world.rank, number) != (2, 1):
            steps = _steps(3, S0, B, id=f"step/{number}")
            boxing.run(steps, torch.zeros(2, 4))


@pytest.mark.checked
def test_a_skipped_step_is_named(ranks):
    with pytest.raises(RanksFailed) as caught:
        ranks(3, _skipped_step)
    assert "rank 1 is at step/1" in caught.value.errors[0]
    assert "rank 2 is at step/2" in caught.value.errors[0]


def _other_channel(world):
    steps = _steps(2, S0, B)
    Boxing(world).run(steps, torch.zeros(3, 4), channel="ids" if world.rank else "vectors")


@pytest.mark.checked
def test_a_channel_is_part_of_the_step(ranks):
    with pytest.raises(RanksFailed, match=r"channel vectors.*channel ids"):
        ranks(2, _other_channel)


def _one_raises(world):
    if world.rank == 1:
        raise SbpError("the table deep.C3 has no rows")
    Boxing(world).run(_steps(3, S0, B), torch.zeros(2, 4))


def test_all_ranks_end_when_one_raises(ranks, monkeypatch):
    monkeypatch.setattr("tests.ranks.GRACE_S", 0.5)  # the others wait for the rank that raises
    with pytest.raises(RanksFailed) as caught:
        ranks(3, _one_raises)
    assert "the table deep.C3 has no rows" in caught.value.errors[1]
    assert ranks(3, _rank) == [0, 1, 2]  # the pool has been rebuilt


def _dies(world):
    boxing = Boxing(world)
    boxing.run(_steps(2, S0, B), torch.zeros(3, 4))
    if world.rank == 1:
        os._exit(3)
    boxing.run(_steps(2, S0, B), torch.zeros(3, 4))


def test_a_rank_that_dies_ends_the_others(ranks):
    with pytest.raises(RanksFailed) as caught:
        ranks(2, _dies)
    assert "died with exit code 3" in caught.value.errors[1]
    assert "Connection" in caught.value.errors[0]


def _rank(world):
    return world.rank


def _bad_part(world, kind):
    boxing = Boxing(world)
    if kind == "shape":
        boxing.run(_steps(2, S0, B), torch.zeros(4, 4))
    elif kind == "dtype":
        boxing.run(_steps(2, S0, B), torch.zeros(3, 4, dtype=torch.float64))
    elif kind == "none":
        boxing.run(_steps(2, S0, B), None)
    elif kind == "global":
        GlobalTensor.from_local(torch.zeros(2, 4), line_layout("cpu", 2, S0), (6, 4), boxing)
    elif kind == "world":
        steps = plan_boxing(line_layout("cpu", 3, S0), line_layout("cpu", 3, B), (6, 4),
                            torch.float32, id="x", backend="gloo")  # fmt: skip
        boxing.run(steps, torch.zeros(2, 4))


REFUSED = {
    "shape": r"passed torch.float32\[4, 4\], but its part of \[6, 4\] with S\(0\)@.* is",
    "dtype": r"passed torch.float64\[3, 4\]",
    "none": "passed None",
    "global": r"shape \[2, 4\], but a tensor \[6, 4\] with S\(0\)@\[0, 1\] needs .*\[3, 4\]",
    "world": r"ranks \[2\] are not in this world of 2; use 0..1",
}


def _refusals(world):
    """Return the errors for all kinds of parts. Every rank refuses its part before it sends."""
    found = {}
    for kind in REFUSED:
        with pytest.raises(SbpError) as caught:
            _bad_part(world, kind)
        found[kind] = str(caught.value)
    return found


def test_a_part_that_does_not_fit_is_refused(ranks):
    for found in ranks(2, _refusals):
        for kind, message in REFUSED.items():
            assert re.search(message, found[kind]), kind


def _part_outside(world):
    src, dst = Layout(Placement.of("cpu", [0]), (B,)), line_layout("cpu", 2, B)
    steps = plan_boxing(src, dst, (3, 4), torch.float32, id="x", backend="gloo")
    if world.rank == 0:  # it would wait for rank 1
        return ""
    with pytest.raises(SbpError) as caught:
        Boxing(world).run(steps, torch.zeros(3, 4))
    return str(caught.value)


def test_a_part_on_a_rank_outside_the_layout_is_refused(ranks):
    assert re.search(r"rank 1 is not in B@\[0\], .* pass None", ranks(2, _part_outside)[1])


LONG_ID = "tower." * 40 + "weight/fwd"


def _one_refuses(world):
    Boxing(world).run(
        _steps(4, S0, B, (8, 4), LONG_ID), torch.zeros(3 if world.rank == 1 else 2, 4)
    )


def _one_refuses_many_sizes(world):
    """Let two ranks check a step whose layouts have 16 explicit sizes; rank 1 has a long reason to
    refuse it.
    """
    sizes = tuple(100_000 + n for n in range(16))
    src, dst = line_layout("cpu", 16, Split(0, sizes)), line_layout("cpu", 16, S1)
    step = f"all_to_all, 123 bytes, {src} -> {dst} torch.float32[{sum(sizes)}, 64], channel main"
    world.check(LONG_ID, step, f"{src} has no part of {'3 x ' * 300}end" if world.rank else "")


@pytest.mark.checked
@pytest.mark.parametrize(
    ("size", "fn", "reasons"),
    [
        (4, _one_refuses, ["rank 1: TOWERS: rank 1 passed torch.float32[3, 4], but its part of [8, "
         "4] with S(0)@[0, 1, 2, 3] is torch.float32[2, 4]"]),
        (2, _one_refuses_many_sizes,
         ["rank 1: S(0)[100000, 100001, ", "3 x " * 300 + "end"]),
    ],
)  # fmt: skip
def test_reasons_are_never_truncated(ranks, size, fn, reasons):
    """Step names and messages may have any length."""
    with pytest.raises(RanksFailed) as caught:
        ranks(size, fn)
    assert len(caught.value.errors) == size
    for error in caught.value.errors.values():
        assert all(reason.replace("TOWERS", LONG_ID) in error for reason in reasons)
        assert "take different steps" not in error


def _inferred(world, lengths):
    boxing = Boxing(world)
    layout = Layout(Placement.of("cpu", [0, 2]), (S0,))
    part = None if world.rank == 1 else torch.zeros(lengths[world.rank], 5)
    return infer_shape(part, layout, boxing)


def test_shapes_are_inferred_from_parts(ranks):
    assert ranks(3, _inferred, [3, 0, 2]) == [(5, 5)] * 3


def test_sizes_that_are_not_balanced_are_shown_on_every_rank(ranks):
    with pytest.raises(RanksFailed) as caught:
        ranks(3, _inferred, [2, 0, 3])
    assert sorted(caught.value.errors) == [0, 1, 2]
    for text in caught.value.errors.values():
        assert "parts of shapes {0: [2, 5], 2: [3, 5]} do not fit layout S(0)" in text
        assert "for other sizes, use Split(dim, sizes=(..))" in text


def _script(text):
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return run(
        [sys.executable, "-W", "error::FutureWarning", "-c", textwrap.dedent(text)],
        60,
        env=clean | {"PYTHONPATH": str(ROOT)},
    )


ALONE = """
    import torch
    from sbpflow.boxing.executor import Boxing
    from sbpflow.boxing.plan import plan_boxing
    from sbpflow.runtime.ranks.world import World
    from tests.oracle import line_layout
    from sbpflow.sbp.sbp import parse_sbp

    with World.start("cpu") as world:
        world.log.enabled = True
        boxing = Boxing(world)
        for a in ("S(0)", "S(1)", "B", "P"):
            for b in ("S(0)", "S(1)", "B", "P"):
                src, dst = (line_layout("cpu", 1, parse_sbp(s)) for s in (a, b))
                steps = plan_boxing(src, dst, (3, 4), torch.float32, id="x", backend="gloo")
                full = torch.arange(12.0).view(3, 4)
                assert torch.equal(boxing.run(steps, full), full), (a, b)
                assert sum(step.total_bytes for step in steps) == 0
        world.barrier()
        print(world.rank, world.size, world.backend, world.log.records)
"""


def test_one_process_needs_no_launcher():
    done = _script(ALONE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "gloo", "[]"]


def test_an_incomplete_environment_is_rejected(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    message = "RANK is set but MASTER_ADDR, MASTER_PORT is not.*torchrun"
    with pytest.raises(ConfigError, match=message):
        World.start("cpu")


def test_unknown_devices_and_backends():
    with pytest.raises(ConfigError, match="device must be auto, cpu, or cuda, got 'tpu'"):
        World.start("tpu")
    with pytest.raises(SbpError, match="backend 'mpi' is unknown; use gloo or nccl"):
        plan_boxing(line_layout("cpu", 2, S0), line_layout("cpu", 2, B), (2,), torch.float32,
                    id="x", backend="mpi")  # fmt: skip
    if not torch.cuda.is_available():
        with pytest.raises(
            ConfigError, match=r"parallel\.device: cuda is not available, because .*; use parallel"
        ):
            World.start("cuda")


def test_layouts_on_missing_devices_are_refused():
    world = World(0, 1, torch.device("cpu"), owns_default_group=False)
    with pytest.raises(SbpError, match=r'on cuda, but this world runs on cpu; .*device="cuda"'):
        Boxing(world).device_of(line_layout("cuda", 1, B))


def test_a_dry_run_lists_the_steps_of_any_rank():
    for rank in range(3):
        boxing = DryBoxing(3, rank)
        layout = line_layout("cpu", 3, P)
        part = torch.empty(6, 4, device="meta", requires_grad=True)
        x = GlobalTensor(part, layout, (6, 4), boxing)
        y = x.to("S(0)", id="a").to("B", id="b")
        y.backward(GlobalTensor(torch.empty(6, 4, device="meta"), y.layout, (6, 4), boxing))
        ran = [(step.id, step.collective) for step in boxing.trace]
        assert ran == [
            ("a/fwd", "all_to_all"),
            ("b/fwd", "all_gather"),
            ("seed/fwd", "none"),
            ("b/bwd", "all_to_all"),
            ("a/bwd", "all_gather"),
        ]
        assert x.part.grad.shape == (6, 4)


def test_a_dry_run_plans_for_the_device_of_the_layout():
    """``explain`` on a machine without GPUs can plan for a cluster with GPUs."""
    ran = []
    for device_type in ("cpu", "cuda"):
        boxing = DryBoxing(4)
        layout = line_layout(device_type, 4, P)
        x = GlobalTensor(torch.empty(8, 4, device="meta"), layout, (8, 4), boxing)
        x.to("S(0)")
        ran.append(boxing.trace[0].collective)
    assert ran == ["all_to_all", "reduce_scatter"]


def convert_differently(world, case):
    boxing = Boxing(world)
    line = Placement.line("cpu", 2)
    s0, s1, b = (Layout(line, parse_nd_sbp(text)) for text in ("S(0)", "S(1)", "B"))
    first = world.rank == 0
    try:
        if case == "layouts":
            src, dst = (s0, s1) if first else (s1, s0)
            x = GlobalTensor.from_full(torch.arange(16.0).view(4, 4), src, boxing)
            x.to(dst)
        elif case == "dtypes":
            dtype = torch.float32 if first else torch.int32
            GlobalTensor.from_full(torch.ones(16, dtype=dtype), s0, boxing).to(b)
        else:
            steps = plan_boxing(s0, b, (6,), torch.float32, id="mine", backend="gloo")
            boxing.run(steps, torch.ones(3 if first else 2))
    except SbpError as error:
        return str(error)
    return "no error"


@pytest.mark.checked
@pytest.mark.parametrize("case", ["layouts", "dtypes", "parts"])
def test_equal_sizes_of_different_steps_are_not_mixed_up(ranks, case):
    messages = ranks(2, convert_differently, case)
    assert messages[0] == messages[1]
    if case == "parts":
        assert messages[0].startswith(
            "rank 1: mine: rank 1 passed torch.float32[2], but its part of [6]"
        )
    else:
        assert messages[0].startswith("ranks take different steps: rank 0 is at ")


def look_closely(world):
    boxing = Boxing(world)
    line = Placement.line("cpu", 2)
    uneven = Layout(line, (Split(0, (5, 0)),))
    x = GlobalTensor.from_full(torch.arange(10.0).view(5, 2) - 20, uneven, boxing)
    x.requires_grad_()
    most = ops.reduce_max(x, [0])
    ops.reduce_sum(most).backward()
    copy = GlobalTensor.from_full(torch.ones(4), Layout(line, parse_nd_sbp("B")), boxing)
    copy.full().add_(5)
    outside = Layout(Placement.of("cpu", [0, 7]), parse_nd_sbp("B"))
    try:
        GlobalTensor.from_full(torch.ones(4), outside, boxing)
    except SbpError as error:
        message = str(error)
    return most.full().tolist(), x.part.grad.sum().item(), copy.part.tolist(), message


def test_empty_parts_copies_and_ranks_that_do_not_exist(ranks):
    for most, gradient, kept, message in ranks(2, look_closely):
        assert most == [-12.0, -11.0]
        assert gradient in (0.0, 2.0)
        assert kept == [1.0] * 4
        assert "names ranks outside this world of 2" in message

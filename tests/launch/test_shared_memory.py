"""Tests messages between the ranks on a host through shared memory."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from sbpflow.boxing import collectives, pairs
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.errors import SbpError
from sbpflow.runtime.ranks import shared_memory
from sbpflow.runtime.ranks.shared_messages import IN_FLIGHT, Arena, Ring, Sending
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split
from tests.deadlines import output_of
from tests.launch.machines import PORT, Machine, needs_namespaces, two_machines
from tests.ranks import RanksFailed

pytest.importorskip("numba")
ROOT = Path(__file__).resolve().parents[2]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def message(seed: int, size: int) -> torch.Tensor:
    values = torch.arange(size, dtype=torch.int64) * 7919 + seed * 31
    return (values % 251).to(DTYPES[seed % len(DTYPES)])


def exchange_at_random(world: World, seed: int) -> int:
    """Send random messages on random channels, and wait for them in a random order."""
    rng = random.Random(seed)  # the same random numbers on all ranks
    others = [rank for rank in range(world.size) if rank != world.rank]
    links = [world.link(range(world.size), f"random {name}") for name in range(3)]
    waiting = []
    for number in range(120):
        link = rng.choice(links)
        if len(waiting) > rng.randint(0, 40):
            rng.shuffle(waiting)
        size_of = {
            (a, b): rng.choice([0, 1, 7, 300, 5_000, 90_000])
            for a in range(world.size)
            for b in range(world.size)
        }
        sends = {r: message(number + world.rank, size_of[world.rank, r]) for r in others}
        expected = {r: message(number + r, size_of[r, world.rank]) for r in others}
        receives = {r: torch.empty_like(wanted) for r, wanted in expected.items()}
        waiting.append((pairs.pass_messages(sends, receives, link), receives, expected))
        for sent in sends.values():
            sent.zero_()  # a sent tensor may be overwritten
        while len(waiting) > 30:
            check(waiting.pop(rng.randrange(len(waiting))))
    for entry in waiting:
        check(entry)
    world.barrier()
    return world._shared.arenas[world.rank].end  # pyright: ignore


def check(entry) -> None:
    messages, receives, expected = entry
    messages.wait()
    for rank, wanted in expected.items():
        assert torch.equal(receives[rank], wanted)


@pytest.fixture
def sharing(ranks):
    """Return ``ranks``; skip if the suite runs without shared memory."""
    if os.environ.get("SBPFLOW_TEST_SHARED_MEMORY", "1") != "1":
        pytest.skip("the suite runs without shared memory")
    return ranks


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (2, 2), (3, 3), (4, 4)])
def test_messages_arrive_in_any_order_of_waits(sharing, size, seed):
    sharing(size, exchange_at_random, seed)


def test_memory_of_messages_is_reused(sharing):
    first = sharing(2, exchange_at_random, 5)
    for seed in (6, 7, 8):
        again = sharing(2, exchange_at_random, seed)
    assert max(again) < 2 * max(first)


def send_much(world: World) -> bool:
    """Both ranks send 200 MB before either receives, half of it with two threads."""
    link, threads = world.link([0, 1], "much"), torch.get_num_threads()
    sent = torch.full((1_000_000,), float(world.rank))
    waiting = []
    for number in range(50):
        torch.set_num_threads(1 + number % 2)
        target = torch.empty_like(sent)
        peer = 1 - world.rank
        waiting.append((pairs.pass_messages({peer: sent}, {peer: target}, link), target))
    for number, (messages, target) in enumerate(waiting):
        torch.set_num_threads(1 + number % 2)
        messages.wait()
        assert bool((target == peer).all())
    torch.set_num_threads(threads)
    return True


def test_two_ranks_can_send_without_waiting_for_each_other(sharing):
    assert sharing(2, send_much) == [True, True]


def wait_long_after(world: World) -> bool:
    """Do not wait for two of three messages until many later ones have arrived."""
    link, peer = world.link([0, 1], "late"), 1 - world.rank
    waiting = []
    for number in range(3 * IN_FLIGHT):
        target = torch.empty(1, dtype=torch.int64)
        messages = pairs.pass_messages({peer: torch.tensor([number])}, {peer: target}, link)
        if number % 3:
            waiting.append((messages, target, number))
            continue
        messages.wait()
        assert target.item() == number
    for messages, target, number in waiting:
        messages.wait()
        assert target.item() == number
    return True


def test_a_message_that_nobody_waits_for_does_not_block_later_ones(sharing):
    assert sharing(2, wait_long_after) == [True, True]


def send_one_element(world: World) -> bool:
    """A contiguous tensor of one element can have the stride 0."""
    link, peer = world.link([0, 1], "one"), 1 - world.rank
    sent, target = torch.tensor(7.0 + world.rank).expand(1), torch.empty(1)
    assert sent.stride() == (0,)
    pairs.pass_messages({peer: sent}, {peer: target}, link).wait()
    return target.item() == 7.0 + peer


def test_a_message_of_one_element(sharing):
    assert sharing(2, send_one_element) == [True, True]


def drop_messages(world: World) -> bool:
    """Drop every second message without waiting for it, as happens to messages of batches that are
    not used for training.
    """
    link, peer = world.link([0, 1], "dropped"), 1 - world.rank
    for number in range(3000):
        target = torch.empty(number % 3)
        sent = torch.full_like(target, number)
        messages = pairs.pass_messages({peer: sent}, {peer: target}, link)
        if number % 2:
            messages.wait()
            assert bool((target == number).all())
    return True


def test_dropped_messages_do_not_stay_in_flight(sharing):
    assert sharing(2, drop_messages) == [True, True]


def send_large(world: World) -> bool:
    shared_memory.MOST_BYTES = 1000
    try:
        link = world.link([0, 1], "large")
        sent, peer = torch.full((251,), float(world.rank)), 1 - world.rank
        target = torch.empty_like(sent)
        pairs.pass_messages({peer: sent}, {peer: target}, link).wait()
        return link.shared._sending[peer]._number == 0 and bool((target == peer).all())
    finally:
        shared_memory.MOST_BYTES = 1 << 28


def test_long_messages_use_the_process_group(sharing):
    assert sharing(2, send_large) == [True, True]


def gather_parts(world: World, limit: str) -> list[int]:
    """Gather parts that are too large for shared memory, and then parts that are not, without
    gloo's all-gather, which would need a second buffer; return the number of messages in shared
    memory so far after each.
    """
    boxing, counts = Boxing(world), []
    others = world.size - 1
    module, most = (pairs, 1000 * others) if limit == "MOST_GATHERED" else (shared_memory, 1000)
    usual = getattr(module, limit)
    world.barrier()
    setattr(module, limit, most)
    try:
        for size in (251, 249):
            line = Placement.line("cpu", world.size)
            split, whole = (Layout(line, (sbp,)) for sbp in (Split(0), Broadcast()))
            shape = (world.size * size,)
            steps = plan_boxing(split, whole, shape, torch.float32, id="x", backend="gloo")
            part = torch.arange(size, dtype=torch.float32) + world.rank * size
            negated = torch._neg_view(-part)  # a view whose memory contains the negated values
            with patch.object(collectives, "all_gather_single", None):
                found = boxing.run(steps, negated)
            assert torch.equal(found, torch.arange(world.size * size, dtype=torch.float32))
            link = world.link(range(world.size), "main")
            counts.append(sum(to._number for to in link.shared._sending.values()))
    finally:
        setattr(module, limit, usual)
    return counts


@pytest.mark.parametrize("limit", ["MOST_BYTES", "MOST_GATHERED"])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_are_gathered_through_shared_memory(sharing, size, limit):
    for before, after in sharing(size, gather_parts, limit):
        assert after == before + size - 1


def reduce_parts(world: World) -> int:
    """Reduce parts of several sizes, five at a time; return the number of messages in shared memory
    that this took.
    """
    line, everyone = Placement.line("cpu", world.size), range(world.size)
    boxing, link = Boxing(world), world.link(everyone, "main")
    before = sum(to._number for to in link.shared._sending.values())
    for op, combine in (("sum", torch.sum), ("max", torch.amax), ("min", torch.amin)):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
            pending = []
            for size in (1, 2, 5, 1000, 300_000):
                parts = [message(0, size).to(dtype) * (-1) ** rank + rank for rank in everyone]
                src, dst = Layout(line, (Partial(op),)), Layout(line, (Broadcast(),))
                steps = plan_boxing(src, dst, (size,), dtype, id="x", backend="gloo")
                wanted = combine(torch.stack(parts), 0)
                pending.append((boxing.start(steps, parts[world.rank].clone()), wanted))
            for work, wanted in pending:
                assert torch.equal(work.wait(), wanted)
    return sum(to._number for to in link.shared._sending.values()) - before


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_reduced_through_shared_memory(sharing, size):
    rounds = 1 if size == 2 else 2
    small, large = 3 * 4 * 4, 3 * 4  # two rounds of the large ones
    assert sharing(size, reduce_parts) == [(small * rounds + large * 2) * (size - 1)] * size


def die_while_awaited(world: World) -> float:
    link = world.link([0, 1], "death")
    if world.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    target, start = torch.empty(10), time.monotonic()
    try:
        pairs.pass_messages({}, {1: target}, link).wait()
    except RuntimeError as error:
        assert "rank 1 has ended" in str(error)  # noqa: PT017
        raise RuntimeError(f"noticed after {time.monotonic() - start:.2f} s") from error
    return 0.0


def test_a_killed_peer_is_noticed_at_once(sharing):
    with pytest.raises(RanksFailed) as failure:
        sharing(2, die_while_awaited)
    text = failure.value.errors[0]
    seconds = float(text.rsplit("noticed after ", 1)[1].split()[0])
    assert 0.25 < seconds < 5


def send_too_few(world: World) -> str:
    link = world.link([0, 1], "too few")
    if world.rank == 0:
        pairs.pass_messages({1: torch.ones(3)}, {}, link).wait()
        world.barrier()
        return ""
    with pytest.raises(RuntimeError, match="12 bytes from rank 0, expected 16") as error:
        pairs.pass_messages({}, {0: torch.ones(4)}, link).wait()
    world.barrier()
    return str(error.value)


def test_another_size_than_expected_is_an_error(sharing):
    assert "enforce fail" in sharing(2, send_too_few)[1]


SCRIPT = """
import os, sys
from pathlib import Path
import torch
from sbpflow.boxing import collectives, pairs
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split
if "refuse" in sys.argv and os.environ["RANK"] == "1":
    def refused(name):
        raise PermissionError(1, "memfd_create is not permitted")
    os.memfd_create = refused
with World.start("cpu", timeout_s=60) as world:
    link = world.link([0, 1], "x")
    peer, target = 1 - world.rank, torch.empty(1000)
    pairs.pass_messages({peer: torch.full((1000,), 3.0)}, {peer: target}, link).wait()
    assert bool((target == 3).all())
    own = 0 if link.shared is None else link.shared._sending[peer]._number
    Path(sys.argv[1], str(world.rank)).write_text(str(own))
    world.barrier()
"""


def script(folder: Path, rank: int, *words: str, inside: Machine | None = None):
    where = {"MASTER_ADDR": "10.77.0.1" if inside else "127.0.0.1", "MASTER_PORT": str(PORT + 7)}
    if inside:
        where["GLOO_SOCKET_IFNAME"] = inside.interface
    prefix = ["ip", "netns", "exec", inside.name] if inside else []
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", SCRIPT, str(folder), *words],
        cwd=ROOT,
        env=os.environ | where | {"RANK": str(rank), "WORLD_SIZE": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@needs_namespaces
def test_ranks_in_different_network_namespaces_do_not_share_memory(tmp_path):
    with two_machines() as machines:
        processes = [script(tmp_path, r, inside=machine) for r, machine in enumerate(machines)]
        outputs = [output_of(process, 120) for process in processes]
        assert not any(process.returncode for process in processes), outputs
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["0", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("refuse",)], ids=["usual", "refused on one rank"])
def test_a_host_shares_memory_only_if_all_its_ranks_can(tmp_path, words):
    processes = [script(tmp_path, rank, *words) for rank in (0, 1)]
    outputs = [output_of(process, 120) for process in processes]
    assert not any(process.returncode for process in processes), outputs
    expected = "0" if words else "1"
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [expected, expected]


def test_a_message_that_cannot_be_copied_takes_no_memory():
    def fail(memory, offset):
        raise MemoryError

    arena = Arena(torch.zeros(0, dtype=torch.uint8), size=2)
    entries = memoryview(np.zeros(IN_FLIGHT * 4, dtype=np.int64))
    sending = Sending(arena, Ring(0, 0, entries))
    for _ in range(2):
        with pytest.raises(MemoryError):
            sending.send(1000, fail, shared=None)
    assert sum(map(len, arena.free.values())) == 1


def test_too_many_messages_name_a_setting_that_helps():
    arena = Arena(torch.zeros(1 << 25, dtype=torch.uint8), 1)
    sending, shared = Sending(arena, arena.ring(0, 0)), Mock()
    for _ in range(IN_FLIGHT):
        sending.send(1, Mock(), shared)
    with pytest.raises(SbpError, match=r"many groups, set parallel\.shared_memory: false"):
        sending.send(1, Mock(), shared)

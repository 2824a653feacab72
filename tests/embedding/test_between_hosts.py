"""Tests that all-to-alls between hosts use pairwise messages and give bit-identical results."""

import gc
import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sbpflow.boxing import pairs
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.runtime.ranks.topology import Topology
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from tests.embedding.mixes import train
from tests.embedding.test_mixes import EXCHANGES, RULES, mix_of

# Conversions of a [7, 5] tensor on 3 ranks to balanced and to explicit splits, with and without a
# part that stays on its rank.
CONVERSIONS = [
    ("S(0)", "S(1)"),
    ("S(1)", "S(0)"),
    ("S(0)[0, 7, 0]", "S(1)[5, 0, 0]"),
    ("S(0)", "S(0)[5, 1, 1]"),
    ("P", "S(0)[0, 3, 4]"),
]


def _between_hosts(world: World, fn, *args):
    """Run ``fn`` as if every rank had its own host; return its result and the number of batches of
    messages.
    """
    count = mock.Mock(side_effect=dist.batch_isend_irecv)
    usual, world.topology = world.topology, Topology(hosts=tuple((n,) for n in range(world.size)))
    shared, world._shared = world._shared, None
    links, world._links = world._links, vars(world).setdefault("_apart", {})
    try:
        with (
            mock.patch.object(dist, "batch_isend_irecv", count),
            mock.patch.object(
                dist,
                "all_to_all_single",
                side_effect=AssertionError("an all-to-all of the backend"),
            ),
        ):
            return fn(world, *args), count.call_count
    finally:
        world.topology, world._shared, world._links = usual, shared, links


def _converted(world: World, dtype: torch.dtype) -> list[torch.Tensor]:
    boxing, line = Boxing(world), Placement.line("cpu", 3)
    found = []
    for source, target in CONVERSIONS:
        src, dst = Layout(line, source), Layout(line, target)
        shape = src.part_shape((7, 5), world.rank)
        part = (torch.arange(shape[0] * shape[1]).view(shape) + 100 * world.rank).to(dtype)
        steps = plan_boxing(src, dst, (7, 5), dtype, id="to", backend="gloo")
        found.append(boxing.run(steps, part.clone()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_conversions_give_equal_parts(ranks, dtype):
    usual = ranks(3, _converted, dtype)
    for one, (other, sent) in zip(usual, ranks(3, _between_hosts, _converted, dtype), strict=True):
        assert sent >= 2
        for part, same in zip(one, other, strict=True):
            assert torch.equal(part, same)


@pytest.mark.few(2)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_tables_train_to_equal_bits(ranks, exchange):
    """Transfer ids, lists of unequal lengths, single rows, and gradients of rows."""
    mix = mix_of(exchange, 8, RULES[2], dtype=torch.float32)
    usual = ranks(2, train, mix)
    for one, (other, sent) in zip(usual, ranks(2, _between_hosts, train, mix), strict=True):
        assert sent > 0
        for (name, place, weights, _), (*same, found, _) in zip(
            one["pieces"], other["pieces"], strict=True
        ):
            assert [name, place] == same
            np.testing.assert_array_equal(weights, found, err_msg=name)


def _sized_differently(world: World) -> list[float]:
    """Return what rank 1 receives in the second of three transfers; rank 0 sends nothing in the
    first.
    """
    link = world.link([0, 1], "sized differently")
    into = torch.full((3, 2), -1.0)
    under_way = []
    for number, part in enumerate(into):
        sent = torch.full((2 if number else 0,), float(number))
        sends, receives = ({1: sent}, {}) if world.rank == 0 else ({}, {0: part})
        under_way.append(pairs.pass_messages(sends, receives, link))
    for messages in under_way if world.rank == 0 else under_way[1:2]:
        messages.wait()
    world.barrier()  # wait until all sent data has arrived
    return into[1].tolist()


def test_transfer_does_not_receive_messages_of_the_next(ranks):
    """If ranks disagree on a size, a transfer must not deliver rows of another transfer."""
    assert ranks(2, _sized_differently)[1] == [1.0, 1.0]


def _abandoned(world: World) -> list[float]:
    """Return what rank 1 receives in the second of two transfers; both ranks abandon the first, and
    rank 0 sends its message only after rank 1 has done so.
    """
    link, into = world.link([0, 1], "abandoned"), torch.zeros(3)
    for number in (1.0, 2.0):
        if world.rank == 1:
            messages = pairs.pass_messages({}, {0: into if number > 1 else torch.zeros(3)}, link)
        gc.collect()
        world.barrier()
        if world.rank == 0:
            messages = pairs.pass_messages({1: torch.full((3,), number)}, {}, link)
        if number > 1:
            messages.wait()
        del messages
    world.barrier()
    return into.tolist()


def test_abandoned_transfers_do_not_block_later_ones(ranks):
    """A trainer whose announced batches are never used, for example, abandons their transfers."""
    assert ranks(2, _between_hosts, _abandoned)[1] == ([2.0, 2.0, 2.0], 2)
    assert ranks(2, _abandoned)[1] == [2.0, 2.0, 2.0]


def _closed(world: World) -> tuple[bool, bool]:
    """Return whether the buffer of an abandoned receive exists before and after its link ends."""
    link, into = replace(world.link([0, 1], "closed"), shared=None), torch.zeros(3)
    buffer = weakref.ref(into)
    pairs.pass_messages({}, {1 - world.rank: into}, link)
    del into
    gc.collect()
    before = buffer() is not None
    world._links = {key: kept for key, kept in world._links.items() if key[1] != "closed"}
    del link
    gc.collect()
    return before, buffer() is not None


def test_buffers_of_abandoned_transfers_are_freed_with_their_link(ranks):
    """Otherwise, their sockets would stay open, and peers would wait for this rank after it has
    closed its world.
    """
    assert ranks(2, _closed) == [(True, False)] * 2

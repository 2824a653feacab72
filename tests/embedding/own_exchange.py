"""Implements a user-defined exchange in which requests take two hops.

Ranks 2h and 2h + 1 belong to host h. A rank sends each request to the rank on its own host that has
the same position there as the owner has on the owner's host. That rank merges its host's requests
and forwards them to the owners. Each id is sent with its number of lookups. ``own_exchange_group``
runs the exchange.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sbpflow.embedding.plan.group_plan import EXCHANGES, Exchange, ExchangeStep, Stage, register
from sbpflow.sbp.sbp import Split

HOST = 2  # ranks


class TwoHops(Exchange):
    """Supports S(0) over all ranks, in order, if each host has all of its ranks."""

    name = "two_hops"
    runs = "tests.embedding.own_exchange_group:TwoHopGroup"
    calls = ("num_row_transfers", "num_row_transfers")

    def accepts(self, layout, world_size):
        in_order = layout.placement.ranks == tuple(range(world_size))
        return layout.nd_sbp == (Split(0),) and in_order and world_size % HOST == 0

    def cuts(self, num_rows, dim, world_size, num_hosts):
        return [("S(0)", (world_size, 1))] if world_size % HOST == 0 else []

    def group_key(self, member):
        return member.stack_key

    def stages(self, group, batch_size):
        hosts, dim = group.world.size // HOST, group.stacks[0].dim
        near = tuple(tuple(range(HOST * h, HOST * (h + 1))) for h in range(hosts))
        far = tuple(tuple(range(place, group.world.size, HOST)) for place in range(HOST))
        lookups = batch_size * group.stacks[0].lookups()

        def stage(purpose, number, dtype, width, says):
            ranks = (near, far)[number]
            direction = "fwd" if purpose != "gradients" else "bwd"
            step = ExchangeStep(
                id=f"{group.name}/{direction}/{purpose}.{number}",
                collective="all_to_all",
                groups=ranks,
                dtype=dtype,
                per_rank=lookups * width,
                total=lookups * width,
                what=says,
            )
            return Stage(purpose=purpose, steps=(step,), round=number)

        ids = [
            stage(purpose, number, torch.int64, width, says)
            for number in (0, 1)
            for purpose, width, says in (
                ("counts", group.world.size, "row counts"),
                ("ids", 2, "rows and their lookups"),
            )
        ]
        vectors = [stage("vectors", n, group.comm_dtype, dim, "rows") for n in (1, 0)]
        dtype = group.grad_comm_dtype
        gradients = [stage("gradients", n, dtype, dim, "gradients of rows") for n in (0, 1)]
        return (*ids, *vectors, *gradients)

    def home(self, facts, cut):
        # a host's requests, divided among its ranks
        merged = min(HOST * facts.wanted, facts.touched)
        far = merged / HOST * (facts.world_size - HOST) / facts.world_size
        rows = facts.wanted * (HOST - 1) / HOST + far
        return {
            "home_sort": facts.local_lookups + facts.wanted,
            "home_unique": facts.wanted + merged / HOST,
            "expand_rows": facts.local_lookups + facts.wanted,
            "expand_elements": (facts.local_lookups + facts.wanted) * facts.dim,
            "counted_bytes": 16.0 * rows,
            "gradient_bytes": rows * facts.dim * facts.sent_item,
            "copied_bytes": 4 * rows * facts.dim * facts.sent_item,
            "buffer_bytes": 2 * rows * facts.dim * facts.item,
        }

    def part(self, facts, cut, rows, width):
        asked = facts.world_size / HOST * min(HOST * facts.wanted, facts.touched) / cut[0]
        return {
            "memory_bytes": facts.stored(rows, width),
            "read_rows": asked,
            "read_elements": asked * width,
            "vector_bytes": asked * width * facts.sent_item,
            "update_ids": asked,
            "update_elements": asked * width,
            **facts.steps(facts.touched / cut[0], width),
        }


@contextmanager
def two_hops() -> Iterator[Exchange]:
    """Register the exchange for the duration of the ``with`` block."""
    made = TwoHops()
    register(made)
    try:
        yield made
    finally:
        EXCHANGES.remove(made)

"""Decides who writes what: each rectangle is written once, and ranks with copies share the work.

The decision is a pure function of the places of all ranks, so every rank computes the same result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from sbpflow.embedding.plan.tables import Place

Places = Mapping[str, Sequence[Place]]

# A rectangle that several ranks store is split among these ranks if it has at least this many
# elements. A smaller rectangle is written by a single rank.
MIN_SHARED = 2**16


def share_out(held: Sequence[Places]) -> list[dict[str, list[Place]]]:
    """Return the places that each rank writes, by name, given the places that each rank has.

    Large copies are split by rows. A small copy is written by whichever of its ranks has the least
    to write so far. The result contains no empty places.
    """
    load = [0] * len(held)
    shares: list[dict[str, list[Place]]] = [{} for _ in held]

    def give(rank: int, name: str, place: Place) -> None:
        shares[rank].setdefault(name, []).append(place)
        load[rank] += place.num_elements

    for name in held[0]:
        holders: dict[Place, list[int]] = {}
        for rank, places in enumerate(held):
            for place in places[name]:
                if place.num_elements:
                    holders.setdefault(place, []).append(rank)
        for place, ranks in sorted(holders.items()):
            if place.num_elements < MIN_SHARED or len(ranks) == 1:
                give(min(ranks, key=lambda rank: (load[rank], rank)), name, place)
                continue
            for rank, rows in zip(ranks, _rows_of(place, len(ranks)), strict=True):
                if rows.num_elements:
                    give(rank, name, rows)
    return shares


def _rows_of(place: Place, count: int) -> list[Place]:
    """Split ``place`` by rows into ``count`` parts."""
    ends = [place.row_start + place.num_rows * part // count for part in range(count + 1)]
    return [replace(place, row_start=start, row_stop=stop) for start, stop in pairwise(ends)]

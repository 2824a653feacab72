"""Who writes what: each rectangle of the state once, copies shared out among those that hold them.

Pure: from the places that every rank holds, the same answer on every rank.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from sbpflow.checkpoint.format import Place

Places = Mapping[str, Sequence[Place]]

# Elements from which on the holders of copies write some rows each; below, one writes all.
LEAST_SHARED = 2**16


def share_out(held: Sequence[Places]) -> list[dict[str, list[Place]]]:
    """What each rank writes of each name, from what each rank holds; empty places are left out.

    Large copies are split by rows, a small one goes to who has least to write so far.
    """
    load = [0] * len(held)
    found: list[dict[str, list[Place]]] = [{} for _ in held]

    def give(rank: int, name: str, place: Place) -> None:
        found[rank].setdefault(name, []).append(place)
        load[rank] += place.num_elements

    for name in held[0]:
        holders: dict[Place, list[int]] = {}
        for rank, places in enumerate(held):
            for place in places[name]:
                if place.num_elements:
                    holders.setdefault(place, []).append(rank)
        for place, ranks in sorted(holders.items()):
            if place.num_elements < LEAST_SHARED or len(ranks) == 1:
                give(min(ranks, key=lambda rank: (load[rank], rank)), name, place)
                continue
            for rank, rows in zip(ranks, _rows_of(place, len(ranks)), strict=True):
                if rows.num_elements:
                    give(rank, name, rows)
    return found


def _rows_of(place: Place, count: int) -> list[Place]:
    """``count`` parts of ``place``, by rows."""
    ends = [place.row_start + place.num_rows * part // count for part in range(count + 1)]
    return [
        Place(row_start=start, row_stop=stop, col_start=place.col_start, col_stop=place.col_stop)
        for start, stop in pairwise(ends)
    ]

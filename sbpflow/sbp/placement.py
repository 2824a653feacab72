"""Defines placements: n-D grids of the global ranks that store a tensor.

A placement has no process groups; ``sbpflow.runtime.ranks.world.World`` creates them. ``explain``
and the planner can therefore use placements without running any ranks.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Protocol, cast

from sbpflow.errors import SbpError
from sbpflow.sbp.sbp import whole

DEVICE_TYPES = ("cpu", "cuda")


class RankArray(Protocol):
    """The interface of a numpy or torch array of ranks."""

    def tolist(self) -> object:
        """Return the ranks as nested lists."""
        ...


NestedRanks = int | Sequence["NestedRanks"] | RankArray


@dataclass(frozen=True)
class Placement:
    """Arranges global ``ranks`` in row-major order in a grid of ``shape``. Any subset of the
    world's ranks is allowed.
    """

    device_type: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.device_type not in DEVICE_TYPES:
            raise SbpError(
                f"device type {self.device_type!r} is unknown; use {' or '.join(DEVICE_TYPES)}"
            )
        if not self.ranks:
            raise SbpError("a placement needs at least one rank, such as [0], got []")
        if math.prod(self.shape) != len(self.ranks):
            raise SbpError(
                f"a grid of shape {self.shape} needs {math.prod(self.shape)} ranks, got "
                f"{len(self.ranks)}"
            )
        if len(set(self.ranks)) != len(self.ranks):
            raise SbpError(f"ranks {self.ranks} contain duplicates; list each rank once")
        if min(self.ranks) < 0:
            raise SbpError(f"ranks must be 0 or more, got {self.ranks}")

    @staticmethod
    def of(device_type: str, ranks: NestedRanks) -> "Placement":
        """Build a placement from ``[0, 1]`` (a line) or ``[[0, 1], [2, 3]]`` (a grid).

        Numpy arrays, torch tensors and single ranks are also accepted.
        """
        single = whole(_plain(ranks))
        if single is not None:
            return Placement(device_type, (single,), (1,))
        flat: list[int] = []
        shape: list[int] = []
        _flatten(ranks, 0, flat, shape)
        return Placement(device_type, tuple(flat), tuple(shape))

    @staticmethod
    def line(device_type: str, num_ranks: int) -> "Placement":
        """Return a placement of ranks 0 .. num_ranks-1 along one axis."""
        return Placement(device_type, tuple(range(num_ranks)), (num_ranks,))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    @cached_property
    def _coords(self) -> dict[int, tuple[int, ...]]:
        grid = product(*(range(size) for size in self.shape))  # row-major order, as in ``ranks``
        return dict(zip(self.ranks, grid, strict=True))

    def __contains__(self, rank: int) -> bool:
        return rank in self._index

    def index(self, rank: int) -> int:
        """Return a global rank's row-major position, or -1 outside the placement."""
        return self._index.get(rank, -1)

    def coord(self, rank: int) -> tuple[int, ...] | None:
        """Return a global rank's grid coordinates, or ``None`` outside the placement."""
        return self._coords.get(rank)

    def __str__(self) -> str:
        """Format the ranks as nested lists, such as ``[0, 1]`` or ``[[0, 1], [2, 3]]``."""
        return str(self.nested())

    def nested(self) -> list[Any]:
        """Return the ranks as nested lists, which ``of`` accepts."""
        return _nest(list(self.ranks), self.shape)

    def __hash__(self) -> int:
        return self._hash  # cached, because every plan lookup hashes placements

    @cached_property
    def _hash(self) -> int:
        return hash((self.device_type, self.ranks, self.shape))

    def axis_groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ only in their coordinate along ``axis``, each
        group in coordinate order.
        """
        return self.plane_groups({axis})

    def plane_groups(self, axes: Collection[int]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ only in their coordinates along ``axes``, each
        group in coordinate order.
        """
        planes: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            coord = self.coord(rank) or ()
            fixed = tuple(at for axis, at in enumerate(coord) if axis not in axes)
            planes.setdefault(fixed, []).append(rank)
        return tuple(tuple(plane) for plane in planes.values())


def _nest(ranks: list[int], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) <= 1:
        return list(ranks)
    row = len(ranks) // shape[0]
    return [_nest(ranks[n * row : (n + 1) * row], shape[1:]) for n in range(shape[0])]


def _plain(ranks: object) -> object:
    """Convert an array to nested lists, and return other values unchanged."""
    to_list = getattr(ranks, "tolist", None)
    return ranks if to_list is None else to_list()


def _flatten(nested: object, depth: int, flat: list[int], shape: list[int]) -> None:
    """Append all ranks to ``flat`` in order, and the length of each nesting level to ``shape``."""
    ranks = _plain(nested)
    if not isinstance(ranks, Sequence) or isinstance(ranks, str):
        raise SbpError(
            f"ranks must be whole numbers, as in [0, 1] or [[0, 1], [2, 3]], got {ranks!r}"
        )
    if depth == len(shape):
        if flat:
            raise SbpError(
                f"ranks {ranks} are nested to different depths; nest all rows to the same depth"
            )
        shape.append(len(ranks))
    if len(ranks) != shape[depth]:
        raise SbpError(
            f"ranks {ranks} have rows of different lengths; every row of the grid needs "
            f"{shape[depth]} entries"
        )
    for entry in map(_plain, cast("Sequence[object]", ranks)):
        rank = whole(entry)
        if rank is not None:
            if depth + 1 < len(shape):
                raise SbpError(
                    f"ranks {ranks} are nested to different depths; nest all rows to the same depth"
                )
            flat.append(rank)
        else:
            _flatten(entry, depth + 1, flat, shape)

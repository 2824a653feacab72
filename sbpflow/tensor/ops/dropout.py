"""Dropout on global tensors: masks that depend on a seed, a name and the place of an element alone.

On CPU they are drawn block by block from torch's generator, the fastest way there. On CUDA they are
counted: 53 bits of SplitMix64 at the element's number, so that one kernel makes and applies them,
the backward makes them again, and a CUDA graph needs no generator, only the key in memory.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.runtime.random.streams import GAMMA, mix, stream_key
from sbpflow.tensor.dispatch import apply, check_floating
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.ops.elementwise import elementwise_rule
from sbpflow.tensor.signature import Choice

# Of a drawn mask, see _kept: more blocks mean more small draws, fewer of them more rows in vain.
_BLOCKS, _LEAST_ROWS = 16, 32
_BITS = 53
Held = tuple[slice, ...]  # where a part lies in its tensor


def dropout(
    x: GlobalTensor, p: float, seed: int, *, training: bool = True, id: str | None = None
) -> GlobalTensor:
    """Zero elements with probability ``p`` and scale the rest by 1 / (1 - p).

    ``S(i) -> S(i), B -> B``

    The mask of an element is a function of ``seed``, ``id`` and its place in the whole tensor,
    whatever the layout and the number of ranks. Pass another seed at every step, and another ``id``
    at every call of a step.
    """
    if not 0.0 <= p < 1.0:
        raise SbpError(f"dropout: p is {p}; it must be at least 0 and less than 1")
    check_floating("dropout", x)
    name = id or "dropout"
    if not training or p == 0.0:
        return x

    def kernel(choice: Choice, parts: list[Tensor]) -> Tensor:
        part, world = parts[0], x.boxing.world
        if part.is_meta:  # a dry run has no values to drop
            return part * 1.0
        held = choice.output.part_slices(x.shape, world.rank) or ()
        if part.is_cuda:
            return _Counted.apply(part, world.draws.key(part.device, seed, name), x.shape, held, p)  # pyright: ignore[reportReturnType]
        keep = _kept(part, x.shape, held, 1.0 - p, lambda n: stream_key(seed, f"{name}/{n}"))
        return part * keep.div_(1.0 - p)

    return apply(elementwise_rule("dropout", x.ndim), [x], x.shape, kernel, id=id)


def _kept(
    part: Tensor,
    shape: tuple[int, ...],
    held: Held,
    share: float,
    key: Callable[[int], int],
) -> Tensor:
    """1 with probability ``share`` and 0 else, for the part ``held`` of a tensor of ``shape``.

    The whole tensor has blocks of rows, some 16 of them, whose numbers are drawn one block after
    the other, block n from ``key(n)``. Those that the part touches are drawn whole, and cut: a part
    does not know how many numbers come before it in one stream over all.
    """
    if not held or not part.numel():
        return torch.empty_like(part)
    rows = max(_LEAST_ROWS, -(-shape[0] // _BLOCKS))
    first, last = held[0].start // rows, -(-held[0].stop // rows)
    drawn = part.new_empty((last - first) * rows, *shape[1:])
    generator = torch.Generator(part.device)
    for number, block in enumerate(drawn.split(rows), first):
        generator.manual_seed(key(number))
        block.bernoulli_(share, generator=generator)
    offset = first * rows
    return drawn[(slice(held[0].start - offset, held[0].stop - offset), *held[1:])].contiguous()


class _Counted(torch.autograd.Function):
    """Dropout by counted masks, there and back the same."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        part: Tensor,
        key: Tensor,
        shape: tuple[int, ...],
        held: Held,
        p: float,
    ) -> Tensor:
        ctx.save_for_backward(key)
        ctx.place = shape, held, p
        return _dropped(part, key, shape, held, p)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        gradient: Tensor,
    ) -> tuple[Tensor, None, None, None, None]:
        (key,) = ctx.saved_tensors
        return _dropped(gradient, key, *ctx.place), None, None, None, None


def _dropped(part: Tensor, key: Tensor, shape: tuple[int, ...], held: Held, p: float) -> Tensor:
    """``part`` with elements zeroed and the others scaled, by one kernel where there is one."""
    if not part.numel():
        return torch.empty_like(part)
    kernels = find_kernels()
    place = _rows_in(shape, held)
    if kernels is None or place is None or part.dtype == torch.float64:
        kept = counted(key, shape, held) < threshold_of(p)
        return torch.where(kept, part * (1.0 / (1.0 - p)), 0.0)
    part = part.contiguous()
    out = torch.empty_like(part)
    count, block = part.numel(), kernels.BLOCK
    columns, whole_columns, first = place
    kernels.drop[(-(-count // block),)](
        part,
        out,
        key,
        count,
        columns,
        whole_columns,
        first,
        threshold_of(p),
        1.0 / (1.0 - p),
        BLOCK=block,
    )
    return out


def threshold_of(p: float) -> int:
    """What a counted number is below where an element stays."""
    return round((1.0 - p) * (1 << _BITS))


def counted(key: Tensor, shape: tuple[int, ...], held: Held) -> Tensor:
    """[the part ``held`` of a tensor of ``shape``] int64: 53 random bits of each element."""
    number = torch.zeros((1,) * len(shape), dtype=torch.int64, device=key.device)
    for dim, extent in enumerate(held):
        stride = torch.Size(shape[dim + 1 :]).numel()
        along = torch.arange(extent.start, extent.stop, device=key.device) * stride
        number = number + along.view(-1, *(1,) * (len(shape) - dim - 1))
    return mix(number * GAMMA + key) & ((1 << _BITS) - 1)


def _rows_in(shape: tuple[int, ...], held: Held) -> tuple[int, int, int] | None:
    """(columns of the part, columns of the tensor, the part's first element) where both are rows of
    columns; else ``None``.
    """
    inner = [(extent.start, extent.stop) for extent in held[1:]]
    whole = torch.Size(shape[1:]).numel()
    if inner == [(0, length) for length in shape[1:]]:
        return whole, whole, held[0].start * whole
    if len(shape) == 2:
        start, stop = inner[0]
        return stop - start, whole, held[0].start * whole + start
    return None


@lru_cache(maxsize=1)
def find_kernels() -> ModuleType | None:
    """The module of Triton's kernel; ``None`` where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    return import_module("sbpflow.tensor.ops.triton_dropout")

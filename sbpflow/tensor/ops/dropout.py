"""Applies dropout to global tensors, with masks that do not depend on the layout or the number of
ranks.

On CPU, torch's generator samples the mask block by block, which is the fastest method on a CPU. On
CUDA, the mask of an element is computed from its position (53 bits of SplitMix64), so that one
kernel can compute and apply the mask, the backward pass can recompute the mask, and a CUDA graph
needs only a key in memory instead of a generator's state.
"""
# pyright: reportIncompatibleMethodOverride=false
# (torch declares forward and backward with arbitrary arguments; here, the arguments have names)

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sbpflow.errors import SbpError
from sbpflow.runtime.random.streams import GAMMA, mix, stream_key
from sbpflow.tensor.autograd import Context
from sbpflow.tensor.dispatch import apply, check_floating
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.ops.elementwise import elementwise_rule
from sbpflow.tensor.ops.elementwise import relu as apply_relu
from sbpflow.tensor.signature import Choice

# Maximum number of blocks of a sampled mask (see ``_draw``), and minimum rows per block. More
# blocks need more sampling calls; with fewer blocks, more rows are sampled and discarded.
_BLOCKS, _MIN_ROWS = 16, 32
_BITS = 53
Held = tuple[slice, ...]  # the position of a part in the full tensor, as one slice per dim


def dropout(
    x: GlobalTensor,
    p: float,
    seed: int,
    *,
    relu: bool = False,
    training: bool = True,
    id: str | None = None,
) -> GlobalTensor:
    """Set elements to zero with probability ``p``, and scale the others by 1 / (1 - p). With
    ``relu``, first apply ReLU; on CUDA, one kernel does both.

    ``S(i) -> S(i), B -> B``

    For tensors of the same shape, dtype, and device type, the mask of an element depends only on
    ``seed``, ``id``, and the element's position in the full tensor, not on the layout or the number
    of ranks. Pass a different seed in every step, and a different ``id`` in every call within a
    step. ``p`` must be at least 0 and less than 1.
    """
    if not 0.0 <= p < 1.0:
        raise SbpError(f"dropout: p must be at least 0 and less than 1 (for example, 0.1), got {p}")
    check_floating("dropout", x)
    name = id or "dropout"
    if not training or p == 0.0:
        return apply_relu(x, id=id) if relu else x

    def kernel(choice: Choice, parts: list[Tensor]) -> Tensor:
        part, world = parts[0], x.boxing.world
        if part.is_meta:  # a dry run has no values
            return part * 1.0
        shape, held = x.shape, choice.output.part_slices(x.shape, world.rank) or ()
        if not shape:  # Draw for a 0-d tensor as for a tensor with one element.
            shape, held = (1,), (slice(0, 1),)
        if part.is_cuda:
            key = world.draws.key(part.device, seed, name)
            return _Counted.apply(part, key, shape, held, p, relu)  # pyright: ignore[reportReturnType]
        part = torch.relu(part) if relu else part
        mask = _draw(part, shape, held, 1.0 - p, lambda n: stream_key(seed, f"{name}/{n}"))
        return part * mask.div_(1.0 - p).view(part.shape)

    return apply(elementwise_rule("dropout", x.ndim), [x], x.shape, kernel, id=id)


def _draw(
    part: Tensor, shape: tuple[int, ...], held: Held, share: float, key: Callable[[int], int]
) -> Tensor:
    """Return the part ``held`` of a random tensor of ``shape``, whose elements are 1 with
    probability ``share`` and otherwise 0.

    The tensor is divided into at most 16 blocks of rows, and block n uses the seed ``key(n)``. A
    single random stream is not possible, because torch's generator cannot skip ahead to a part.
    Each block that overlaps the part is sampled completely, and then the part is cut out.
    """
    if not held or not part.numel():
        return torch.empty_like(part)
    rows = max(_MIN_ROWS, -(-shape[0] // _BLOCKS))
    first, last = held[0].start // rows, -(-held[0].stop // rows)
    drawn = part.new_empty((last - first) * rows, *shape[1:])
    generator = torch.Generator(part.device)
    for number, block in enumerate(drawn.split(rows), first):
        generator.manual_seed(key(number))
        block.bernoulli_(share, generator=generator)
    offset = first * rows
    return drawn[(slice(held[0].start - offset, held[0].stop - offset), *held[1:])].contiguous()


class _Counted(torch.autograd.Function):
    """Applies dropout with a computed mask, after ReLU if ``relu`` is set.

    The backward pass computes the mask again. With ``relu``, it reads the mask from the output,
    which the next layer also keeps: elements that are 0 have no gradient.
    """

    @staticmethod
    def forward(
        ctx: Context,
        part: Tensor,
        key: Tensor,
        shape: tuple[int, ...],
        held: Held,
        p: float,
        relu: bool,
    ) -> Tensor:
        out = _drop(part, key, shape, held, p, relu=relu)
        ctx.save_for_backward(out if relu else key)
        ctx.position = shape, held, p
        ctx.relu = relu
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (saved,) = ctx.saved_tensors
        if ctx.relu:
            grad = _drop_gradient(gradient, saved, ctx.position[2])
        else:
            grad = _drop(gradient, saved, *ctx.position)
        return grad, None, None, None, None, None


def _drop(
    part: Tensor, key: Tensor, shape: tuple[int, ...], held: Held, p: float, *, relu: bool = False
) -> Tensor:
    """Set some elements of ``part`` to zero and scale the others, in one Triton kernel if
    possible; with ``relu``, also set negative elements to zero.
    """
    if not part.numel():
        return torch.empty_like(part)
    kernels = find_kernels()
    position = _rows_in(shape, held)
    threshold, factor = threshold_of(p), 1.0 / (1.0 - p)
    if kernels is None or position is None or part.dtype == torch.float64:
        kept = (counted(key, shape, held) < threshold).view(part.shape)
        return torch.where(kept, (torch.relu(part) if relu else part) * factor, 0.0)
    part = part.contiguous()
    out = torch.empty_like(part)
    columns, whole_columns, first = position
    rows = part.numel() // columns
    # A program's elements form a rectangle, as wide as the part if possible.
    across = min(kernels.BLOCK, 1 << (columns - 1).bit_length())
    down = kernels.BLOCK // across
    launch = kernels.drop[(-(-rows // down), -(-columns // across))]
    sizes = {"RELU": relu, "ROWS": down, "COLUMNS": across}
    launch(part, out, key, rows, columns, whole_columns, first, threshold, factor, **sizes)
    return out


def _drop_gradient(gradient: Tensor, out: Tensor, p: float) -> Tensor:
    """Scale the elements of ``gradient`` where ``out``, the output of ``_drop`` with ``relu``, is
    not 0, and set the others to zero.
    """
    factor = 1.0 / (1.0 - p)
    kernels = find_kernels()
    if kernels is None or not out.numel() or out.dtype == torch.float64:
        return torch.where(out != 0, gradient * factor, 0.0)
    gradient = gradient.contiguous()
    made = torch.empty_like(gradient)
    count, block = out.numel(), kernels.BLOCK
    launch = kernels.drop_gradient[(-(-count // block),)]
    launch(gradient, out, made, count, factor, BLOCK=block)
    return made


def threshold_of(p: float) -> int:
    """Return the threshold for ``counted``: elements whose random bits are below the threshold are
    kept.
    """
    return round((1.0 - p) * (1 << _BITS))


def counted(key: Tensor, shape: tuple[int, ...], held: Held) -> Tensor:
    """Return 53 random bits, as int64, for each element in the part ``held`` of a tensor with
    ``shape``.
    """
    number = torch.zeros((1,) * len(shape), dtype=torch.int64, device=key.device)
    for dim, extent in enumerate(held):
        stride = torch.Size(shape[dim + 1 :]).numel()
        along = torch.arange(extent.start, extent.stop, device=key.device) * stride
        number = number + along.view(-1, *(1,) * (len(shape) - dim - 1))
    return mix(number * GAMMA + key) & ((1 << _BITS) - 1)


def _rows_in(shape: tuple[int, ...], held: Held) -> tuple[int, int, int] | None:
    """Return the number of columns in the part, the number of columns in the tensor, and the flat
    index in the tensor of the part's first element.

    Return ``None`` if the part is not a rectangle of rows and columns.
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
    """Return the module with the Triton kernel, or ``None`` if Triton is not installed."""
    if find_spec("triton") is None:
        return None
    return import_module("sbpflow.tensor.ops.triton_dropout")

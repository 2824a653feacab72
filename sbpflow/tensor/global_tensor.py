"""Defines GlobalTensor, a logical tensor with one part on each rank.

The class is the user's interface to ``boxing``. The gradient of a tensor with layout x has layout
dual(x), so the backward pass of src -> dst converts dual(dst) -> dual(src).
"""

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import last_linear_layout
from sbpflow.boxing.step import check_dtype, check_ranks
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, NdSbp, Sbp, Split, format_nd_sbp
from sbpflow.tensor.autograd import Way, convert, run_part
from sbpflow.tensor.extremum import ExtremumWay, convert_extremum

Where = Layout | NdSbp | Sbp | str


class GlobalTensor:
    """A logical tensor of ``shape`` with ``layout``; ``part`` is this rank's part.

    On ranks outside the placement, the part is empty rather than None, so that these ranks stay in
    the autograd graph and join the collectives of the backward pass. All ranks must call the same
    methods in the same order.
    """

    __slots__ = ("boxing", "layout", "part", "shape")

    def __init__(
        self, part: Tensor, layout: Layout, shape: tuple[int, ...], boxing: Boxing
    ) -> None:
        rank, size = boxing.world.rank, boxing.world.size
        expected = _checked_shape(layout, shape, part.dtype, part.device, rank, size)
        if part.shape != expected:
            raise SbpError(
                f"the part on rank {rank} has shape {list(part.shape)}, but a tensor "
                f"{list(shape)} with {layout} needs a part of shape {list(expected)} there"
            )
        self.part = part
        self.layout = layout
        self.shape = shape
        self.boxing = boxing

    @staticmethod
    def from_local(
        part: Tensor | None,
        layout: Layout,
        shape: tuple[int, ...],
        boxing: Boxing,
        *,
        dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        replicas: Literal["equal", "first"] = "equal",
    ) -> "GlobalTensor":
        """Make a global tensor of ``shape`` from local parts.

        Outside the placement, ``part`` may be None; ``dtype`` and ``requires_grad`` must then match
        the parts of the other ranks. With another ``requires_grad``, this rank would not join the
        backward pass.
        Along B axes, ``replicas="equal"`` trusts that the copies are equal and sends nothing, and
        ``replicas="first"`` overwrites the other copies with the copy of the first coordinate. The
        gradient of ``part`` has the dual layout: for P, each rank gets the full gradient; for B,
        each rank gets one term of the sum. If no rank knows the full shape, use ``infer_shape``.
        """
        if part is None:
            device = boxing.device_of(layout)
            part = torch.empty(0, dtype=dtype, device=device, requires_grad=requires_grad)
        elif requires_grad and not part.requires_grad:
            raise SbpError(
                "from_local: requires_grad=True applies only where part is None, but rank "
                f"{boxing.world.rank} passed a part that does not require grad; omit "
                "requires_grad and call requires_grad_() on the result"
            )
        x = GlobalTensor(part, layout, tuple(shape), boxing)
        if replicas == "equal":
            return x
        if replicas == "first":
            return _spread_first(x)
        raise SbpError(f"from_local: replicas must be equal or first, got {replicas!r}")

    @staticmethod
    def from_full(full: Tensor, layout: Layout, boxing: Boxing) -> "GlobalTensor":
        """Make a global tensor from a value that every rank has; each rank keeps only its part.
        Along P axes, the first coordinate keeps the value, and the other coordinates store the
        neutral element.
        """
        shape = tuple(full.shape)
        check_user(layout, shape)
        whole = replicated(layout.placement)
        steps = boxing.steps_of("from_full", whole, layout, shape, full.dtype)
        inside = boxing.world.rank in layout.placement
        part = boxing.run(steps, full.detach() if inside else None)
        part = full.new_empty(0) if part is None else part.clone()
        return GlobalTensor(part, layout, shape, boxing)

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def requires_grad(self) -> bool:
        return self.part.requires_grad

    def requires_grad_(self, flag: bool = True) -> "GlobalTensor":
        """Make this tensor a leaf whose gradient accumulates in ``part.grad``, in the dual
        layout.
        """
        self.part.requires_grad_(flag)
        return self

    def detach(self) -> "GlobalTensor":
        """Return a tensor with the same value, detached from the autograd graph."""
        return GlobalTensor(self.part.detach(), self.layout, self.shape, self.boxing)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"GlobalTensor({dtype}{list(self.shape)} {self.layout})"

    def to(
        self,
        where: Where,
        grad_sbp: NdSbp | Sbp | str | None = None,
        *,
        id: str = "to",
        channel: str = "main",
    ) -> "GlobalTensor":
        """Convert the tensor to another layout without changing its value.

        ``where`` is a layout, or an nd-sbp or string such as ``"(S(0), B)"`` on the same placement.
        The backward pass converts the gradient of the result from dual(dst) to dual(src). Pass
        ``grad_sbp`` if you know that this gradient has another layout (for example, B for a B
        tensor that all ranks use in the same way). The steps are named "<id>/fwd" and "<id>/bwd".
        If a gradient is needed, a conversion to P(max) or P(min) that communicates goes through S
        or B, in steps named "<id>/linear/fwd" and "<id>/linear/bwd".
        """
        dst = where if isinstance(where, Layout) else Layout(self.layout.placement, where)
        if dst == self.layout and grad_sbp is None:
            return self
        check_user(dst, self.shape)
        promised = None if grad_sbp is None else _grad_layout(dst, grad_sbp)
        if dst.has_extremum and self.part.requires_grad and torch.is_grad_enabled():
            last = last_linear_layout(self.layout, dst, self.shape, self.dtype)
            if last != self.layout:
                linear = self._convert(last, None, f"{id}/linear", channel)
                return linear._convert(dst, None, id, channel)
        return self._convert(dst, promised, id, channel)

    def _convert(
        self, dst: Layout, promised: Layout | None, id: str, channel: str
    ) -> "GlobalTensor":
        boxing, src, shape, dtype = self.boxing, self.layout, self.shape, self.dtype
        forward = boxing.steps_of(f"{id}/fwd", src, dst, shape, dtype)
        if not (self.part.requires_grad and torch.is_grad_enabled()):
            plain = self.part.detach() if forward and self.part.requires_grad else self.part
            part = run_part(boxing, forward, plain, channel)
        elif src.has_extremum or dst.has_extremum:
            incoming = None if dst.has_extremum else promised or dst.dual()
            way = ExtremumWay(src, forward, dst, incoming, shape, channel)
            part = convert_extremum(self.part, boxing, way)
        else:
            incoming = promised or dst.dual()
            backward = boxing.steps_of(f"{id}/bwd", incoming, src.dual(), shape, dtype)
            part = convert(self.part, boxing, Way(src, forward, dst, backward, channel))
        return GlobalTensor(part, dst, shape, boxing)

    def full(self) -> Tensor:
        """Return the full value as a plain, detached tensor on every rank of the world.

        The result is never a view of the part, so the caller may modify the result.
        """
        world = self.boxing.world
        everyone = Placement.line(self.layout.placement.device_type, world.size)
        whole = self.detach().to(replicated(everyone), id="full").part
        return whole.clone() if whole.data_ptr() == self.part.data_ptr() else whole

    def item(self) -> int | float:
        """Return the value of a one-element tensor as a Python number, on every rank."""
        if math.prod(self.shape) != 1:
            raise SbpError(
                f"item() needs a tensor with one element, got {self!r}; reduce it with "
                "ops.reduce_mean or ops.reduce_sum, or use full()"
            )
        return self.full().item()

    def backward(self, gradient: "GlobalTensor | None" = None, retain_graph: bool = False) -> None:
        """Run the backward pass from a one-element tensor or, given ``gradient``, from any tensor.

        The initial gradient has the dual layout: for a B loss, it is 1 on the first coordinate and
        0 elsewhere, so that the loss counts only once. The gradients of leaves also have dual
        layouts; ``sync_gradients`` converts these gradients to the layouts of the leaves.
        """
        if gradient is None:
            if any(length != 1 for length in self.shape):
                raise SbpError(
                    f"backward() needs a tensor with one element, got {self!r}; reduce it with "
                    "ops.reduce_mean or ops.reduce_sum, or pass gradient="
                )
            gradient = ones_like(self)
        elif gradient.shape != self.shape:
            raise SbpError(
                f"backward(): the gradient must have the same shape as {self!r}, got {gradient!r}"
            )
        if not self.part.requires_grad:
            raise SbpError(
                f"backward(): on rank {self.boxing.world.rank}, no input of {self!r} requires "
                "grad; call requires_grad_() on the GlobalTensor on every rank, or pass "
                "requires_grad=True to from_local where the part is None"
            )
        seed = gradient.to(self.layout.dual(), id="seed").part.to(self.dtype)
        if seed.numel() == 1:
            # The gradient is then implicit. With an explicit one, torch imports sympy (0.3 s).
            torch.autograd.backward([self.part * seed], retain_graph=retain_graph)
        else:
            torch.autograd.backward([self.part], [seed], retain_graph=retain_graph)


@lru_cache(maxsize=65536)
def _checked_shape(
    layout: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    size: int,
) -> tuple[int, ...]:
    """Return the shape that a rank's part must have.

    Raise SbpError if ``layout`` does not fit ``shape`` or ``dtype``, if it contains ranks outside
    this world of ``size`` ranks, or if a rank of the placement has its part on another device type;
    in a dry run, parts are on meta.
    """
    expected = part_shape(layout, shape, rank)
    check_ranks(layout, size)
    check_dtype(layout, dtype)
    actual, wanted = device.type, layout.placement.device_type
    if actual not in (wanted, "meta") and rank in layout.placement:
        raise SbpError(
            f"rank {rank} has a part on {device}, but {layout} is on {wanted}; pass "
            f'part.to("{wanted}"), or use a placement on {actual}'
        )
    return expected


def parameter(part: Tensor, layout: Layout, shape: tuple[int, ...], boxing: Boxing) -> GlobalTensor:
    """Make a trainable leaf from this rank's part, which has shape [0] outside the placement."""
    part = part.detach().clone()
    return GlobalTensor(part, layout, tuple(shape), boxing).requires_grad_()


def ones_like(x: GlobalTensor) -> GlobalTensor:
    """Return a tensor of ones with the shape of ``x`` and the layout of its gradient, from which a
    backward pass can start.
    """
    layout = x.layout.dual()
    whole = replicated(layout.placement)
    inside = x.boxing.world.rank in layout.placement
    ones = torch.ones(x.shape if inside else 0, dtype=x.dtype, device=x.part.device)
    return GlobalTensor(ones, whole, x.shape, x.boxing).to(layout, id="seed")


@lru_cache(maxsize=1024)
def replicated(placement: Placement) -> Layout:
    """Return the layout with B on every axis of the placement."""
    return Layout(placement, (Broadcast(),) * placement.ndim)


@lru_cache(maxsize=65536)
def part_shape(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's part, or (0,) outside the placement.

    Raise SbpError if the layout does not fit ``shape``.
    """
    layout.check_user(shape)
    inside = layout.part_shape(shape, rank)
    return (0,) if inside is None else inside


@lru_cache(maxsize=65536)
def check_user(layout: Layout, shape: tuple[int, ...]) -> None:
    """Like ``layout.check_user``, but cached."""
    layout.check_user(shape)


def _grad_layout(dst: Layout, grad_sbp: NdSbp | Sbp | str) -> Layout:
    """Return the gradient layout that ``grad_sbp`` promises. Raise SbpError if it or ``dst`` has
    P(max) or P(min), or if its parts would differ in shape from the parts of ``dst``.
    """
    layout = Layout(dst.placement, grad_sbp)
    text, result = format_nd_sbp(layout.nd_sbp), format_nd_sbp(dst.nd_sbp)
    if dst.has_extremum:
        raise SbpError(
            f"grad_sbp {text} does not apply to a {result} result, because each rank stores the "
            "gradient of its own term; omit grad_sbp"
        )
    if layout.has_extremum:
        raise SbpError(
            f"grad_sbp {text}: a gradient is a sum, not a max or min; along B and P axes, use B "
            "(equal on all ranks) or P (terms that add up)"
        )
    for sbp, grad in zip(dst.nd_sbp, layout.nd_sbp, strict=True):
        if sbp != grad and (isinstance(sbp, Split) or isinstance(grad, Split)):
            raise SbpError(
                f"grad_sbp {text} does not fit a {result} result: a gradient has the shape of its "
                "tensor, so repeat each S of the result, and use B or P where the result has B "
                "or P"
            )
    return layout


def _spread_first(x: GlobalTensor) -> GlobalTensor:
    """Overwrite the copies along B axes with the first copy; the backward pass sums the gradients
    of all copies.
    """
    placement, world = x.layout.placement, x.boxing.world
    copies = [isinstance(sbp, Broadcast) for sbp in x.layout.nd_sbp]
    ranks = tuple(
        rank
        for rank in placement.ranks
        if not any(at and b for at, b in zip(placement.coord(rank) or (), copies, strict=True))
    )
    sizes = tuple(1 if b else size for size, b in zip(placement.shape, copies, strict=True))
    source = Layout(Placement(placement.device_type, ranks, sizes), x.layout.nd_sbp)
    # The data of other ranks is not used, but an empty slice of the data keeps these ranks in the
    # autograd graph.
    part = x.part if world.rank in ranks else x.part.reshape(-1)[:0]
    return GlobalTensor(part, source, x.shape, x.boxing).to(x.layout, id="from_local")

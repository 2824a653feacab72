"""GlobalTensor: a logical tensor of which this rank holds a part.

The face of ``boxing`` for models and people. The gradient of a tensor laid out x travels in
dual(x), so the backward of src -> dst is dual(dst) -> dual(src).
"""

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import last_linear_layout
from sbpflow.boxing.step import check_dtype
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, NdSbp, Sbp, Split, format_nd_sbp
from sbpflow.tensor.autograd import Steps, Way, convert, run_part
from sbpflow.tensor.extremum import ExtremumWay, convert_extremum

Where = Layout | NdSbp | Sbp | str


class GlobalTensor:
    """``part`` is what this rank holds of a tensor of ``shape`` laid out as ``layout``.

    A rank outside the placement holds an empty part, so that its autograd graph still reaches the
    conversions it must take part in. Every rank makes the same calls in the same order.
    """

    __slots__ = ("boxing", "layout", "part", "shape")

    def __init__(
        self, part: Tensor, layout: Layout, shape: tuple[int, ...], boxing: Boxing
    ) -> None:
        expected = part_shape(layout, shape, boxing.world.rank)
        if part.shape != expected:
            raise SbpError(
                f"rank {boxing.world.rank} holds a part of shape {list(part.shape)}, but its part "
                f"of {list(shape)} under {layout} is {list(expected)}"
            )
        boxing.world.check_ranks(layout)
        check_dtype(layout, part.dtype)
        _check_device(part, layout, boxing.world.rank)
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
        """Declare local parts to be a global tensor of ``shape``.

        ``part`` may be None outside the placement, where ``dtype`` and ``requires_grad`` then say
        what the others hold: a rank whose empty part requires no grad would not join a backward.
        Along B axes ``replicas="equal"`` trusts the caller and sends nothing; "first" spreads the
        data of the first coordinate over the others. The gradient of ``part`` arrives in the dual
        layout: whole for P, as terms that add up over the ranks for B. ``infer_shape`` finds the
        shape where no rank knows it.
        """
        if part is None:
            device = boxing.world.device_of(layout)
            part = torch.empty(0, dtype=dtype, device=device, requires_grad=requires_grad)
        elif requires_grad and not part.requires_grad:
            raise SbpError(
                f"from_local: requires_grad=True, but the part of rank {boxing.world.rank} does "
                "not; it speaks for ranks without a part. Use requires_grad_() on the result"
            )
        x = GlobalTensor(part, layout, tuple(shape), boxing)
        if replicas == "equal":
            return x
        if replicas == "first":
            return _spread_first(x)
        raise SbpError(f"from_local: replicas={replicas!r}; use equal or first")

    @staticmethod
    def from_full(full: Tensor, layout: Layout, boxing: Boxing) -> "GlobalTensor":
        """Lay out a value that every rank has: each keeps its part, along P axes the first one."""
        shape = tuple(full.shape)
        check_user(layout, shape)
        whole = Layout(layout.placement, (Broadcast(),) * layout.placement.ndim)
        steps = _plan(whole, layout, shape, full.dtype, "from_full", boxing)
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
        """Make this a leaf that gradients accumulate in, in ``part.grad``, laid out as the dual."""
        self.part.requires_grad_(flag)
        return self

    def detach(self) -> "GlobalTensor":
        """The same value without history."""
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
        """Convert; the value is kept.

        ``where`` is a layout, or an nd-sbp on the same placement, also as text: ``"(S(0), B)"``.
        The gradient of the result is expected in dual(dst), or in ``grad_sbp`` if the consumer
        guarantees that (a B tensor that all ranks use alike has gradient B); it leaves in
        dual(src). Steps are named "<id>/fwd" and "<id>/bwd"; a conversion into P(max) or P(min)
        that sends and has a gradient passes through S or B, by steps of "<id>/linear".
        """
        dst = self._layout_of(where)
        if dst == self.layout and grad_sbp is None:
            return self
        check_user(dst, self.shape)
        promised = None if grad_sbp is None else _grad_layout(dst, grad_sbp)
        if dst.has_extremum and self.part.requires_grad and torch.is_grad_enabled():
            backend = self.boxing.world.backend_of(dst)
            last = last_linear_layout(self.layout, dst, self.shape, self.dtype, backend)
            if last != self.layout:
                linear = self._convert(last, None, f"{id}/linear", channel)
                return linear._convert(dst, None, id, channel)
        return self._convert(dst, promised, id, channel)

    def _convert(
        self, dst: Layout, promised: Layout | None, id: str, channel: str
    ) -> "GlobalTensor":
        boxing, shape, dtype = self.boxing, self.shape, self.dtype
        forward = _plan(self.layout, dst, shape, dtype, f"{id}/fwd", boxing)
        if not (self.part.requires_grad and torch.is_grad_enabled()):
            plain = self.part.detach() if forward and self.part.requires_grad else self.part
            part = run_part(boxing, forward, plain, channel)
        elif self.layout.has_extremum or dst.has_extremum:
            incoming = None if dst.has_extremum else promised or dst.dual()
            way = ExtremumWay(self.layout, forward, dst, incoming, shape, channel)
            part = convert_extremum(self.part, boxing, way)
        else:
            incoming = promised or dst.dual()
            backward = _plan(incoming, self.layout.dual(), shape, dtype, f"{id}/bwd", boxing)
            part = convert(self.part, boxing, Way(self.layout, forward, dst, backward, channel))
        return GlobalTensor(part, dst, shape, boxing)

    def full(self) -> Tensor:
        """The whole value, as a plain tensor without history, on every rank of the world.

        Never a view of the part: it may be written to.
        """
        world = self.boxing.world
        everyone = Placement.line(self.layout.placement.device_type, world.size)
        whole = self.detach().to(Layout(everyone, (Broadcast(),)), id="full").part
        return whole.clone() if whole.data_ptr() == self.part.data_ptr() else whole

    def item(self) -> int | float:
        """The value of a tensor with one element, on every rank; an int if it is a whole number."""
        if math.prod(self.shape) != 1:
            raise SbpError(
                f"item() reads one element, not {self!r}; reduce it with ops.reduce_mean or "
                "ops.reduce_sum, or take all with full()"
            )
        return self.full().item()

    def backward(self, gradient: "GlobalTensor | None" = None, retain_graph: bool = False) -> None:
        """Propagate from a tensor with one element, or from any with its ``gradient`` given.

        The gradient starts in the dual layout: for a B loss, 1 on the first coordinate and 0
        elsewhere, so that nothing counts twice. Leaves receive theirs in the dual of their own
        layout; ``sync_gradients`` brings those to the leaf's layout.
        """
        if gradient is None:
            if any(length != 1 for length in self.shape):
                raise SbpError(
                    f"backward() starts from one element, not from {self!r}; reduce it with "
                    "ops.reduce_mean or ops.reduce_sum, or pass gradient="
                )
            gradient = ones_like(self)
        elif gradient.shape != self.shape:
            raise SbpError(
                f"backward(): gradient is {gradient!r}, of another shape than {self!r}; it has one "
                "number per element"
            )
        if not self.part.requires_grad:
            raise SbpError(
                f"backward(): on rank {self.boxing.world.rank} nothing that {self!r} came from "
                "requires grad; call requires_grad_() on the GlobalTensor, on every rank, or give "
                "from_local requires_grad=True where the part is None"
            )
        seed = gradient.to(self.layout.dual(), id="seed").part.to(self.dtype)
        torch.autograd.backward([self.part], [seed], retain_graph=retain_graph)

    def _layout_of(self, where: Where) -> Layout:
        if isinstance(where, Layout):
            return where
        return Layout(self.layout.placement, where)


def _check_device(part: Tensor, layout: Layout, rank: int) -> None:
    """A part lies where its layout says, but for the meta tensors of a dry run."""
    given, wanted = part.device.type, layout.placement.device_type
    if given not in (wanted, "meta") and rank in layout.placement:
        raise SbpError(
            f"rank {rank} holds a part on {part.device}, but {layout} is on {wanted}; pass "
            f'part.to("{wanted}"), or use a placement on {given}'
        )


def parameter(part: Tensor, layout: Layout, shape: tuple[int, ...], boxing: Boxing) -> GlobalTensor:
    """A trainable leaf from this rank's part (empty, of shape [0], outside the placement)."""
    part = part.detach().clone()
    return GlobalTensor(part, layout, tuple(shape), boxing).requires_grad_()


def ones_like(x: GlobalTensor) -> GlobalTensor:
    """Ones of the shape of ``x``, laid out as its gradient travels: the seed of a backward."""
    layout = x.layout.dual()
    whole = Layout(layout.placement, (Broadcast(),) * layout.placement.ndim)
    inside = x.boxing.world.rank in layout.placement
    ones = torch.ones(x.shape if inside else 0, dtype=x.dtype, device=x.part.device)
    return GlobalTensor(ones, whole, x.shape, x.boxing).to(layout, id="seed")


@lru_cache(maxsize=65536)
def part_shape(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Shape of the part a rank holds, (0,) outside; raises SbpError if the layout does not fit."""
    layout.check_user(shape)
    here = layout.part_shape(shape, rank)
    return (0,) if here is None else here


@lru_cache(maxsize=65536)
def check_user(layout: Layout, shape: tuple[int, ...]) -> None:
    """``layout.check_user``, remembered."""
    layout.check_user(shape)


def _plan(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, id: str, boxing: Boxing
) -> Steps:
    return boxing.steps_of(id, src, dst, shape, dtype)


def _grad_layout(dst: Layout, grad_sbp: NdSbp | Sbp | str) -> Layout:
    """The layout a consumer promises for the gradient; its parts must have the shape of dst's."""
    layout = Layout(dst.placement, grad_sbp)
    given = layout.nd_sbp
    if dst.has_extremum:
        raise SbpError(
            f"grad_sbp {format_nd_sbp(given)}: a result laid out {format_nd_sbp(dst.nd_sbp)} has "
            "its gradient where its terms are, and no choice of it; leave grad_sbp out"
        )
    if layout.has_extremum:
        raise SbpError(
            f"grad_sbp {format_nd_sbp(given)}: a gradient is a sum of terms, not a max or min; "
            "along B and P axes it is B, equal on all ranks, or P, terms that add up"
        )
    for mine, theirs in zip(dst.nd_sbp, given, strict=True):
        splits = isinstance(mine, Split) or isinstance(theirs, Split)
        if splits and mine != theirs:
            raise SbpError(
                f"grad_sbp {format_nd_sbp(given)} does not fit a result laid out "
                f"{format_nd_sbp(dst.nd_sbp)}: a gradient has the shape of its tensor, so S stays "
                "the same S, and B or P may each be B or P"
            )
    return layout


def _spread_first(x: GlobalTensor) -> GlobalTensor:
    """Along B axes, the first coordinate's data everywhere; its gradient is the sum of all."""
    placement, world = x.layout.placement, x.boxing.world
    copies = [isinstance(sbp, Broadcast) for sbp in x.layout.nd_sbp]
    ranks = tuple(
        rank
        for rank in placement.ranks
        if not any(at and b for at, b in zip(placement.coord(rank) or (), copies, strict=True))
    )
    sizes = tuple(1 if b else size for size, b in zip(placement.shape, copies, strict=True))
    source = Layout(Placement(placement.device_type, ranks, sizes), x.layout.nd_sbp)
    # The other ranks' data is not used; an empty slice keeps them in the graph.
    part = x.part if world.rank in ranks else x.part.reshape(-1)[:0]
    return GlobalTensor(part, source, x.shape, x.boxing).to(x.layout, id="from_local")

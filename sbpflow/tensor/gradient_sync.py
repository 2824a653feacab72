"""Brings gradients of leaves from the dual layout to the leaf's own, many in one collective.

A B parameter's gradient arrives as P, so this is the all-reduce of data parallelism; an S parameter
needs nothing. Parameters whose gradients travel alike share a flat bucket.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from sbpflow.boxing.executor import Pending
from sbpflow.boxing.plan import BoxingStep, plan_boxing
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Broadcast, Partial, Split
from sbpflow.tensor.global_tensor import GlobalTensor, part_shape

DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024


class Laid(Protocol):
    """What planning needs to know of a parameter; a GlobalTensor will do."""

    @property
    def layout(self) -> Layout:
        """Where and how it lies."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameter and its gradient."""
        ...


LaidT = TypeVar("LaidT", bound=Laid)


def plan_gradients(
    parameters: Sequence[Laid],
    *,
    backend: str,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    id: str = "dense",
) -> tuple[BoxingStep, ...]:
    """The steps a ``GradientSync`` over these parameters will run; pure, for ``explain``."""
    buckets = _fill_buckets(parameters, bucket_bytes)
    return tuple(
        step
        for n, members in enumerate(buckets)
        for step in _bucket_steps(members, f"{id}/bwd/{n}", backend)
    )


@dataclass(slots=True)
class _Bucket:
    parameters: list[GlobalTensor]
    steps: tuple[BoxingStep, ...]


class GradientSync:
    """Built once for a list of parameters; ``run`` after each backward, before the optimizer.

    ``steps`` is what runs, for ``explain``. After ``run``, ``part.grad`` of each parameter is laid
    out as the parameter; clear it before the next backward. Raises SbpError for what has no
    gradient of its own: results of ops, frozen or integer tensors, one tensor given twice.
    """

    def __init__(
        self,
        parameters: Sequence[GlobalTensor],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        id: str = "dense",
        channel: str = "dense",
    ) -> None:
        _check_leaves(parameters)
        self.channel = channel
        self._buckets = [
            _Bucket(
                members,
                _bucket_steps(members, f"{id}/bwd/{n}", _backend_of(members[0])),
            )
            for n, members in enumerate(_fill_buckets(parameters, bucket_bytes))
        ]

    @property
    def steps(self) -> tuple[BoxingStep, ...]:
        """All buckets' steps, in the order they run."""
        return tuple(step for bucket in self._buckets for step in bucket.steps)

    def run(self) -> None:
        """Exchange, and leave each gradient in its parameter's layout."""
        self.start().wait()

    def start(self) -> "PendingSync":
        """Begin all buckets; gradients must not be touched before ``wait``."""
        return PendingSync(
            [
                (bucket.parameters, _start(bucket.parameters, bucket.steps, self.channel))
                for bucket in self._buckets
            ]
        )


class PendingSync:
    """Buckets under way."""

    def __init__(self, buckets: list[tuple[list[GlobalTensor], Pending]]) -> None:
        self._buckets = buckets

    def wait(self) -> None:
        """Set ``part.grad`` of every parameter to its exchanged gradient."""
        for parameters, pending in self._buckets:
            flat = pending.wait()
            if flat is None:
                continue
            pieces = flat.reshape(-1).split([parameter.part.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.part.grad = piece.view(parameter.part.shape)


def sync_gradients(parameters: Sequence[GlobalTensor], *, id: str = "dense") -> None:
    """``GradientSync(parameters).run()``, for scripts that call it once."""
    GradientSync(parameters, id=id).run()


def _check_leaves(parameters: Sequence[GlobalTensor]) -> None:
    seen: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        part = parameter.part
        why = ""
        if not part.requires_grad:
            why = "requires no grad; leave it out, or call requires_grad_() on it, on every rank"
        elif not part.is_leaf:
            why = (
                "is not a leaf: its gradient went on to what it was computed from; pass the "
                "tensors that requires_grad_() was called on"
            )
        elif id(part) in seen:
            why = f"is parameter {seen[id(part)]} again, and would count twice; pass each once"
        if why:
            raise SbpError(f"gradients: parameter {index}, {parameter!r}, {why}")
        seen[id(part)] = index


def _fill_buckets(parameters: Sequence[LaidT], bucket_bytes: int) -> list[list[LaidT]]:
    """Parameters of one travel pattern, last first as backward makes them, up to a size each."""
    done: list[list[LaidT]] = []
    open_: dict[object, list[LaidT]] = {}
    filled: dict[object, int] = {}
    for parameter in reversed(parameters):
        if not any(isinstance(sbp, Broadcast | Partial) for sbp in parameter.layout.nd_sbp):
            continue
        key = _pattern(parameter)
        size = parameter.dtype.itemsize * math.prod(parameter.shape)
        if key in open_ and filled[key] + size > bucket_bytes:
            done.append(open_.pop(key))
        if key not in open_:
            open_[key], filled[key] = [], 0
        open_[key].append(parameter)
        filled[key] += size
    return done + list(open_.values())


def _pattern(parameter: Laid) -> object:
    """Parameters of equal patterns may share a bucket; others have one of their own."""
    layout = parameter.layout
    num_splits = sum(isinstance(sbp, Split) for sbp in layout.nd_sbp)
    if num_splits > 1 or any(isinstance(sbp, Partial) for sbp in layout.nd_sbp):
        return id(parameter)
    kinds = tuple(type(sbp) for sbp in layout.nd_sbp)
    return layout.placement, kinds, parameter.dtype


def _backend_of(parameter: GlobalTensor) -> str:
    return parameter.boxing.world.backend_of(parameter.layout)


def _bucket_steps(parameters: Sequence[Laid], id: str, backend: str) -> tuple[BoxingStep, ...]:
    first = parameters[0]
    if len(parameters) == 1:
        shape, layout = first.shape, first.layout
    else:
        layout = _flat_layout(parameters)
        shape = (_flat_length(parameters, layout),)
    return plan_boxing(layout.dual(), layout, shape, first.dtype, id=id, backend=backend)


def _flat_layout(parameters: Sequence[Laid]) -> Layout:
    """The layout of the parts laid end to end: a split has the sizes that come together."""
    layout = parameters[0].layout
    nd_sbp = tuple(
        Split(0, _sizes_along(parameters, axis)) if isinstance(sbp, Split) else sbp
        for axis, sbp in enumerate(layout.nd_sbp)
    )
    return Layout(layout.placement, nd_sbp)


def _sizes_along(parameters: Sequence[Laid], axis: int) -> tuple[int, ...]:
    placement = parameters[0].layout.placement
    return tuple(
        sum(_part_numel(parameter, rank) for parameter in parameters)
        for rank in placement.axis_groups(axis)[0]
    )


def _flat_length(parameters: Sequence[Laid], layout: Layout) -> int:
    for sbp in layout.nd_sbp:
        if isinstance(sbp, Split):
            return sum(sbp.sizes or ())
    return sum(_part_numel(parameter, layout.placement.ranks[0]) for parameter in parameters)


def _part_numel(parameter: Laid, rank: int) -> int:
    return math.prod(part_shape(parameter.layout, parameter.shape, rank))


def _start(parameters: list[GlobalTensor], steps: tuple[BoxingStep, ...], channel: str) -> Pending:
    boxing = parameters[0].boxing
    if boxing.world.rank not in parameters[0].layout.placement:
        return boxing.start(steps, None, channel)
    if len(parameters) == 1:
        return boxing.start(steps, _gradient(parameters[0]), channel, donate=True)
    flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in parameters])
    return boxing.start(steps, flat, channel, donate=True)


def _gradient(parameter: GlobalTensor) -> Tensor:
    """The gradient so far; zeros if this rank's part took no part in the loss."""
    gradient = parameter.part.grad
    return torch.zeros_like(parameter.part) if gradient is None else gradient

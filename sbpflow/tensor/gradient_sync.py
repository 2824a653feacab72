"""Brings gradients of leaves from the dual layout to the leaf's own, many in one collective.

A B parameter's gradient arrives as P, so this is the all-reduce of data parallelism; an S parameter
needs nothing. Parameters whose gradients travel alike share a flat bucket.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing, Pending
from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split
from sbpflow.tensor.global_tensor import GlobalTensor, part_shape

DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024


class LaidOut(Protocol):
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


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients that travel as one flat tensor: ``members`` are positions in the list of leaves.

    The position behind the last leaf is the number that is added up beside them.
    """

    members: tuple[int, ...]
    placement: Placement
    steps: tuple[BoxingStep, ...]


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """What a ``GradientSync`` runs for ``num_leaves`` leaves; pure, for ``explain``."""

    num_leaves: int
    buckets: tuple[GradientBucket, ...]

    @property
    def steps(self) -> tuple[BoxingStep, ...]:
        """All buckets' steps, in the order they run."""
        return tuple(step for bucket in self.buckets for step in bucket.steps)


@dataclass(frozen=True, slots=True)
class Total:
    """One number to which every rank adds its term, on its way with the gradients: a loss, say."""

    layout: Layout
    dtype: torch.dtype
    shape: tuple[int, ...] = (1,)

    @staticmethod
    def over(world: Placement, dtype: torch.dtype) -> "Total":
        """Of all ranks of ``world``, and for all of them."""
        return Total(Layout(world, (Broadcast(),)), dtype)


def plan_gradients(
    leaves: Sequence[LaidOut],
    *,
    backend: str,
    total: Total | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    id: str = "dense",
) -> GradientPlan:
    """How the gradients of these leaves travel, and one ``total`` with them if given."""
    travellers = [*leaves, *(() if total is None else (total,))]
    buckets = _fill_buckets(travellers, bucket_bytes)
    return GradientPlan(
        len(leaves),
        tuple(
            GradientBucket(
                tuple(members),
                travellers[members[0]].layout.placement,
                _bucket_steps([travellers[n] for n in members], f"{id}/bwd/{number}", backend),
            )
            for number, members in enumerate(buckets)
        ),
    )


class GradientSync:
    """Built once for a list of parameters; ``run`` after each backward, before the optimizer.

    ``plan`` is what runs, made by ``plan_gradients`` for these parameters; without one it is made
    here. After ``run``, ``part.grad`` of each parameter is laid out as the parameter; clear it
    before the next backward. Raises SbpError for what has no gradient of its own: results of ops,
    frozen or integer tensors, one tensor given twice; and for a plan of other parameters.
    """

    def __init__(
        self,
        parameters: Sequence[GlobalTensor],
        *,
        plan: GradientPlan | None = None,
        boxing: Boxing | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        id: str = "dense",
        channel: str = "dense",
    ) -> None:
        _check_leaves(parameters)
        self.channel = channel
        self._parameters = list(parameters)
        if plan is None:
            backend = _backend_of(parameters[0]) if parameters else "gloo"
            plan = plan_gradients(parameters, backend=backend, bucket_bytes=bucket_bytes, id=id)
        elif plan.num_leaves != len(parameters):
            raise SbpError(
                f"gradients: the plan is of {plan.num_leaves} leaves, {len(parameters)} were "
                "given; plan_gradients makes one for them"
            )
        if boxing is None and not parameters:
            raise SbpError("gradients: no parameter to take the boxing of; pass boxing=")
        self._boxing = boxing or parameters[0].boxing
        self.plan = plan

    @property
    def steps(self) -> tuple[BoxingStep, ...]:
        """All buckets' steps, in the order they run."""
        return self.plan.steps

    def run(self) -> None:
        """Exchange, and leave each gradient in its parameter's layout."""
        self.start().wait()

    def start(self, term: Tensor | None = None) -> "PendingSync":
        """Begin all buckets; gradients must not be touched before ``wait``.

        ``term`` [1] is this rank's term of the plan's ``total``.
        """
        return PendingSync(
            [
                (bucket, self._start(bucket, term), self._members(bucket))
                for bucket in self.plan.buckets
            ],
            len(self._parameters),
        )

    def _members(self, bucket: GradientBucket) -> list[GlobalTensor]:
        return [self._parameters[n] for n in bucket.members if n < len(self._parameters)]

    def _start(self, bucket: GradientBucket, term: Tensor | None) -> Pending:
        steps = bucket.steps
        if self._boxing.world.rank not in bucket.placement:
            return self._boxing.start(steps, None, self.channel)
        gradients: list[Tensor] = []
        for number in bucket.members:
            if number < len(self._parameters):
                gradients.append(_gradient(self._parameters[number]))
            elif term is not None:
                gradients.append(term)
            else:
                raise SbpError(
                    "gradients: the plan adds up a total; start() takes this rank's term"
                )
        if len(gradients) == 1:
            return self._boxing.start(steps, gradients[0], self.channel, donate=True)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        return self._boxing.start(steps, flat, self.channel, donate=True)


class PendingSync:
    """Buckets under way."""

    def __init__(
        self,
        buckets: list[tuple[GradientBucket, Pending, list[GlobalTensor]]],
        num_leaves: int,
    ) -> None:
        self._buckets = buckets
        self._num_leaves = num_leaves

    def wait(self) -> Tensor | None:
        """Set ``part.grad`` of every parameter to its exchanged gradient; the total [1], if any."""
        total: Tensor | None = None
        for bucket, pending, parameters in self._buckets:
            flat = pending.wait()
            if flat is None:
                continue
            sizes = [parameter.part.numel() for parameter in parameters]
            has_total = self._num_leaves in bucket.members
            pieces = flat.reshape(-1).split([1] * has_total + sizes)
            if has_total:
                total, *pieces = pieces
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.part.grad = piece.view(parameter.part.shape)
        return total


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


def _fill_buckets(parameters: Sequence[LaidOut], bucket_bytes: int) -> list[list[int]]:
    """Positions of one travel pattern, last first as backward makes them, up to a size each."""
    done: list[list[int]] = []
    open_: dict[object, list[int]] = {}
    filled: dict[object, int] = {}
    for number, parameter in reversed(list(enumerate(parameters))):
        if not any(isinstance(sbp, Broadcast | Partial) for sbp in parameter.layout.nd_sbp):
            continue
        key = _pattern(parameter)
        size = parameter.dtype.itemsize * math.prod(parameter.shape)
        if key in open_ and filled[key] + size > bucket_bytes:
            done.append(open_.pop(key))
        if key not in open_:
            open_[key], filled[key] = [], 0
        open_[key].append(number)
        filled[key] += size
    return done + list(open_.values())


def _pattern(parameter: LaidOut) -> object:
    """Parameters of equal patterns may share a bucket; others have one of their own."""
    layout = parameter.layout
    num_splits = sum(isinstance(sbp, Split) for sbp in layout.nd_sbp)
    if num_splits > 1 or any(isinstance(sbp, Partial) for sbp in layout.nd_sbp):
        return id(parameter)
    kinds = tuple(type(sbp) for sbp in layout.nd_sbp)
    return layout.placement, kinds, parameter.dtype


def _backend_of(parameter: GlobalTensor) -> str:
    return parameter.boxing.world.backend_of(parameter.layout)


def _bucket_steps(parameters: Sequence[LaidOut], id: str, backend: str) -> tuple[BoxingStep, ...]:
    first = parameters[0]
    if len(parameters) == 1:
        shape, layout = first.shape, first.layout
    else:
        layout = _flat_layout(parameters)
        shape = (_flat_length(parameters, layout),)
    return plan_boxing(layout.dual(), layout, shape, first.dtype, id=id, backend=backend)


def _flat_layout(parameters: Sequence[LaidOut]) -> Layout:
    """The layout of the parts laid end to end: a split has the sizes that come together."""
    layout = parameters[0].layout
    nd_sbp = tuple(
        Split(0, _sizes_along(parameters, axis)) if isinstance(sbp, Split) else sbp
        for axis, sbp in enumerate(layout.nd_sbp)
    )
    return Layout(layout.placement, nd_sbp)


def _sizes_along(parameters: Sequence[LaidOut], axis: int) -> tuple[int, ...]:
    placement = parameters[0].layout.placement
    return tuple(
        sum(_part_numel(parameter, rank) for parameter in parameters)
        for rank in placement.axis_groups(axis)[0]
    )


def _flat_length(parameters: Sequence[LaidOut], layout: Layout) -> int:
    for sbp in layout.nd_sbp:
        if isinstance(sbp, Split):
            return sum(sbp.sizes or ())
    return sum(_part_numel(parameter, layout.placement.ranks[0]) for parameter in parameters)


def _part_numel(parameter: LaidOut, rank: int) -> int:
    return math.prod(part_shape(parameter.layout, parameter.shape, rank))


def _gradient(parameter: GlobalTensor) -> Tensor:
    """The gradient so far; zeros if this rank's part took no part in the loss."""
    gradient = parameter.part.grad
    return torch.zeros_like(parameter.part) if gradient is None else gradient

"""Converts the gradients of leaves from the dual layouts to the leaves' layouts, in buckets.

The gradient of a B parameter is P, so converting it is the all-reduce of data parallelism. The
gradient of an S parameter needs no conversion. Parameters that need the same conversion share flat
buckets of limited size, and thus collectives.
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

CHANNEL = "dense"
DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024


class LaidOut(Protocol):
    """The properties of a parameter that planning needs; GlobalTensor implements this interface."""

    @property
    def layout(self) -> Layout: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """A group of gradients that are converted as one flat tensor.

    ``members`` contains the index of each gradient's leaf in the list of parameters. The index
    after the last leaf denotes the ``Total``.
    """

    members: tuple[int, ...]
    placement: Placement
    steps: tuple[BoxingStep, ...]


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """The buckets for the gradients of ``num_leaves`` leaves; a plan contains no tensors."""

    num_leaves: int
    buckets: tuple[GradientBucket, ...]

    @property
    def steps(self) -> tuple[BoxingStep, ...]:
        """Return the steps of all buckets in order."""
        return tuple(step for bucket in self.buckets for step in bucket.steps)


@dataclass(frozen=True, slots=True)
class Total:
    """A number, such as the loss, that is summed over the ranks together with the gradients."""

    layout: Layout
    dtype: torch.dtype
    shape: tuple[int, ...] = (1,)

    @staticmethod
    def over(world: Placement, dtype: torch.dtype) -> "Total":
        """Return a ``Total`` over the ranks of ``world``, each of which receives the sum."""
        return Total(Layout(world, (Broadcast(),)), dtype)


def plan_gradients(
    leaves: Sequence[LaidOut],
    *,
    total: Total | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    id: str = "dense",
) -> GradientPlan:
    """Plan the buckets for the gradients of ``leaves`` and for ``total``, if given."""
    items = [*leaves, *(() if total is None else (total,))]
    buckets = _fill_buckets(items, bucket_bytes)
    return GradientPlan(
        len(leaves),
        tuple(
            GradientBucket(
                tuple(members),
                items[members[0]].layout.placement,
                _bucket_steps([items[n] for n in members], f"{id}/bwd/{number}"),
            )
            for number, members in enumerate(buckets)
        ),
    )


class GradientSync:
    """Converts the gradients of a fixed list of parameters after each backward pass.

    ``plan`` is the result of ``plan_gradients`` for these parameters. Call ``run`` after each
    backward pass and before the optimizer step, to convert each ``part.grad`` to the layout of its
    parameter. Call ``clear`` before the next backward pass. Raise SbpError if a tensor cannot
    have a gradient of its own (the result of an op, or a frozen or integer tensor), if a tensor is
    listed twice, if the plan is for a different number of parameters, or if ``parameters`` is empty
    and ``boxing`` is None.
    """

    def __init__(
        self,
        parameters: Sequence[GlobalTensor],
        *,
        plan: GradientPlan | None = None,
        boxing: Boxing | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        id: str = "dense",
    ) -> None:
        _check_leaves(parameters)
        self._parameters = list(parameters)
        if boxing is None and not parameters:
            raise SbpError(
                "gradients: boxing is required if the list of parameters is empty; pass "
                "boxing=boxing"
            )
        self._boxing = boxing or parameters[0].boxing
        if plan is None:
            plan = plan_gradients(parameters, bucket_bytes=bucket_bytes, id=id)
        elif plan.num_leaves != len(parameters):
            raise SbpError(
                f"gradients: the plan is for {plan.num_leaves} leaves, but there are "
                f"{len(parameters)} parameters; call plan_gradients with these parameters"
            )
        self.plan = plan
        self._started: list[Pending] | None = None  # a conversion for each bucket

    def run(self) -> None:
        """Convert every gradient to the layout of its parameter."""
        self.start()
        self.wait()

    def start(self, term: Tensor | None = None) -> None:
        """Start converting all buckets. Do not use the gradients before ``wait`` returns.

        If the plan contains a ``Total``, pass this rank's term [1] as ``term``.
        """
        # Set all gradients, also those that need no conversion: optimizers would skip parameters
        # without a gradient, so unused parameters would depend on the layout.
        for parameter in self._parameters:
            _gradient(parameter)
        self._started = [self._start(bucket, term) for bucket in self.plan.buckets]

    def wait(self) -> Tensor | None:
        """Wait for all buckets, and set ``part.grad`` of the parameters in them. Return the sum [1]
        if the plan contains a ``Total``.
        """
        started, self._started = self._started, None
        if started is None:
            raise RuntimeError("gradients: wait() was called before start()")
        total: Tensor | None = None
        for bucket, pending in zip(self.plan.buckets, started, strict=True):
            flat = pending.wait()
            if flat is None:
                continue
            parts = [self._parameters[n].part for n in bucket.members if n < self.plan.num_leaves]
            has_total = self.plan.num_leaves in bucket.members
            pieces = flat.reshape(-1).split([1] * has_total + [part.numel() for part in parts])
            if has_total:
                total, *pieces = pieces
            for part, piece in zip(parts, pieces, strict=True):
                part.grad = piece.view(part.shape)
        return total

    def clear(self) -> None:
        """Delete all gradients, so that the next backward pass computes new ones."""
        for parameter in self._parameters:
            parameter.part.grad = None

    def _start(self, bucket: GradientBucket, term: Tensor | None) -> Pending:
        steps = bucket.steps
        if self._boxing.world.rank not in bucket.placement:
            return self._boxing.start(steps, None, CHANNEL)
        gradients: list[Tensor] = []
        for number in bucket.members:
            if number < len(self._parameters):
                gradients.append(_gradient(self._parameters[number]))
            elif term is not None:
                gradients.append(term)
            else:
                raise SbpError(
                    "gradients: the plan computes a total; pass this rank's term of the total to "
                    "start()"
                )
        if len(gradients) == 1:
            return self._boxing.start(steps, gradients[0], CHANNEL, donate=True)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        return self._boxing.start(steps, flat, CHANNEL, donate=True)


def sync_gradients(parameters: Sequence[GlobalTensor], *, id: str = "dense") -> None:
    """Convert the gradients once, as ``GradientSync(parameters).run()`` does."""
    GradientSync(parameters, id=id).run()


def _check_leaves(parameters: Sequence[GlobalTensor]) -> None:
    seen: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        part = parameter.part
        fault = ""
        if not part.requires_grad:
            fault = (
                "does not require grad; remove it from the list, or call requires_grad_() on "
                "every rank"
            )
        elif not part.is_leaf:
            fault = (
                "is not a leaf, so it does not keep its gradient; pass the tensors on which "
                "requires_grad_() was called"
            )
        elif id(part) in seen:
            fault = f"is the same as parameter {seen[id(part)]}; list each parameter once"
        if fault:
            raise SbpError(f"gradients: parameter {index}, {parameter!r}, {fault}")
        seen[id(part)] = index


def _fill_buckets(parameters: Sequence[LaidOut], bucket_bytes: int) -> list[list[int]]:
    """Group the parameters that have a B or P axis and equal ``_pattern`` into buckets.

    A bucket has at most ``bucket_bytes`` (of full tensors), or contains one larger parameter.
    Return lists of positions. In these lists, the last parameters come first, because the backward
    pass computes their gradients first.
    """
    full: list[list[int]] = []
    open_: dict[object, list[int]] = {}
    filled: dict[object, int] = {}
    for number, parameter in reversed(list(enumerate(parameters))):
        if not any(isinstance(sbp, Broadcast | Partial) for sbp in parameter.layout.nd_sbp):
            continue
        key = _pattern(parameter)
        size = parameter.dtype.itemsize * math.prod(parameter.shape)
        if key in open_ and filled[key] + size > bucket_bytes:
            full.append(open_.pop(key))
        if key not in open_:
            open_[key], filled[key] = [], 0
        open_[key].append(number)
        filled[key] += size
    return full + list(open_.values())


def _pattern(parameter: LaidOut) -> object:
    """Return a value that is equal for parameters that may share a bucket.

    A parameter with P or several splits gets a unique value and thus its own bucket: with several
    splits, no layout describes a flat part concatenated with others.
    """
    layout = parameter.layout
    num_splits = sum(isinstance(sbp, Split) for sbp in layout.nd_sbp)
    if num_splits > 1 or any(isinstance(sbp, Partial) for sbp in layout.nd_sbp):
        return id(parameter)
    kinds = tuple(type(sbp) for sbp in layout.nd_sbp)
    return layout.placement, kinds, parameter.dtype


def _bucket_steps(parameters: Sequence[LaidOut], id: str) -> tuple[BoxingStep, ...]:
    """Return the steps that convert the gradients of one parameter, or of several parameters
    concatenated.
    """
    first = parameters[0]
    shape, layout = first.shape, first.layout
    if len(parameters) > 1:
        placement = layout.placement

        def numel(rank: int) -> int:
            parts = [part_shape(p.layout, p.shape, rank) for p in parameters]
            return sum(map(math.prod, parts))

        # Along the split axis, each coordinate stores the concatenation of its parts, so the
        # coordinate's split size is the sum of the parts' sizes.
        length, nd_sbp = numel(placement.ranks[0]), list(layout.nd_sbp)
        for axis, sbp in enumerate(layout.nd_sbp):
            if isinstance(sbp, Split):
                sizes = tuple(map(numel, placement.axis_groups(axis)[0]))
                length, nd_sbp[axis] = sum(sizes), Split(0, sizes)
        layout, shape = Layout(placement, tuple(nd_sbp)), (length,)
    return plan_boxing(layout.dual(), layout, shape, first.dtype, id=id)


def _gradient(parameter: GlobalTensor) -> Tensor:
    """Return the accumulated gradient of this rank's part, which is set to zeros if the part did
    not affect the loss.
    """
    if parameter.part.grad is None:
        parameter.part.grad = torch.zeros_like(parameter.part)
    return parameter.part.grad

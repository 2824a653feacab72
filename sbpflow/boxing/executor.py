"""Runs planned conversions on plain local tensors.

This module executes the steps of ``plan`` and decides nothing itself. Apart from the checks and
barriers of ``World``, only ``collectives`` and the embedding exchange call c10d collectives;
``pairs`` sends point-to-point messages. Results have no autograd history:
``sbpflow.tensor.autograd`` pairs each conversion with its adjoint.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from sbpflow.boxing import collectives
from sbpflow.boxing.buffers import Loan, Staging
from sbpflow.boxing.copies import Unpack
from sbpflow.boxing.plan import Conversion, ConversionKey, plan_boxing
from sbpflow.boxing.program import Program, compile_step
from sbpflow.boxing.step import BoxingStep
from sbpflow.errors import SbpError
from sbpflow.runtime.ranks.comm_log import CommRecord, WaitTime
from sbpflow.runtime.ranks.world import Link, World, broken, refused
from sbpflow.sbp.layout import Layout

# Maximum number of cached programs; when it is reached, the cache is emptied.
MAX_READY_STEPS = 8192

Finish = Callable[[], Tensor | None]


class Pending:
    """A conversion in progress.

    Call ``wait`` exactly once, and do not change the input part until ``wait`` returns. ``wait``
    may send messages, so all ranks must call it at the same place in their order of conversions. If
    the world's ``wait_at_once`` is set, the transfer is already complete.
    """

    def __init__(self, finish: Finish, world: World) -> None:
        self._finish: Finish | None = finish
        if world.wait_at_once:
            result = finish()
            self._finish = lambda: result

    def wait(self) -> Tensor | None:
        """Wait for the result and return it; return ``None`` outside the destination."""
        if self._finish is None:
            raise SbpError("wait() was already called on this conversion; keep its first result")
        finish, self._finish = self._finish, None
        return finish()


class Boxing:
    """Executes steps for one rank. All ranks must make the same calls in the same order."""

    is_dry = False
    """Whether the steps are only recorded, so that values are meaningless."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._staging = Staging()
        # The key is id(step), because hashing a step takes longer than all the other Python code
        # that runs a step. A program keeps a reference to its step, so the id cannot be reused
        # while it is a key.
        self._ready: dict[tuple[int, str], tuple[Program, Link | None]] = {}
        self._planned: dict[ConversionKey, tuple[BoxingStep, ...]] = {}
        self._requested: list[ConversionKey] | None = None

    def device_of(self, layout: Layout) -> torch.device:
        """Return the device of this rank's part of a layout; raise SbpError for another device
        type."""
        wanted, device = layout.placement.device_type, self.world.device
        if device.type in (wanted, "meta"):
            return device
        if wanted == "cpu":
            return torch.device("cpu")
        raise SbpError(
            f"{layout} is on {wanted}, but this world runs on {device.type}; place it on "
            f'{device.type}, or start the world with device="{wanted}"'
        )

    def follow(self, conversions: Iterable[Conversion]) -> None:
        """From now on, use the planned steps of ``conversions`` instead of planning them again."""
        self._planned |= {conversion.key: conversion.steps for conversion in conversions}

    @contextmanager
    def expecting(self, conversions: Sequence[Conversion] | None) -> Generator[None]:
        """Within the block, allow exactly these conversions, in this order.

        Raise SbpError at the end of the block if other conversions were requested. ``None`` allows
        any conversions.
        """
        if conversions is None:
            yield
            return
        self._requested = requested = []
        try:
            yield
        finally:
            self._requested = None
        planned = [conversion.key for conversion in conversions]
        if requested != planned:
            pairs_of = zip_longest(requested, planned)
            request, plan = next((a, b) for a, b in pairs_of if a != b)
            raise SbpError(
                f"the dense part requests {_describe(request)}, but the plan of this run expects "
                f"{_describe(plan)} at this point; make the same conversions in every forward "
                "pass, regardless of tensor values"
            )

    def steps_of(
        self, id: str, src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[BoxingStep, ...]:
        """Return the steps of a conversion. If ``follow`` did not provide the steps, plan them
        now.
        """
        key = (id, src, dst, shape, dtype)
        if self._requested is not None:
            self._requested.append(key)
        steps = self._planned.get(key)
        if steps is not None:
            return steps
        return plan_boxing(src, dst, shape, dtype, id=id)

    def prepare(self, steps: Sequence[BoxingStep], channel: str = "main") -> None:
        """Compile ``steps`` and create their process groups now rather than on first use."""
        for step in steps:
            self.world.check(step.id, f"prepare, channel {channel}")
            self._get_ready(step, channel)

    def run(
        self,
        steps: Sequence[BoxingStep],
        part: Tensor | None,
        channel: str = "main",
        *,
        donate: bool = False,
    ) -> Tensor | None:
        """Convert this rank's part, a plain tensor (``None`` outside the source placement).

        Return the new part, detached, or ``None`` outside the destination placement. The result may
        share memory with ``part``. With ``donate``, an all-reduce may overwrite ``part`` instead of
        working on a copy. Raise SbpError if ``part`` does not have the shape and dtype that the
        first step expects.
        """
        part = _without_history(part)
        for index, step in enumerate(steps):
            part = self._issue(step, _between(index, part), channel, donate)()
        return part

    def start(
        self,
        steps: Sequence[BoxingStep],
        part: Tensor | None,
        channel: str = "main",
        *,
        donate: bool = False,
    ) -> Pending:
        """Like ``run``, but return as soon as the first transfer has started."""
        part = _without_history(part)
        for index, step in enumerate(steps):
            finish = self._issue(step, _between(index, part), channel, donate)
            if step.groups:
                rest = partial(self._go_on, steps[index + 1 :], finish, channel)
                return Pending(rest, self.world)
            part = finish()
        return Pending(lambda: part, self.world)

    def _go_on(self, rest: Sequence[BoxingStep], finish: Finish, channel: str) -> Tensor | None:
        return self.run(rest, finish(), channel)

    def _get_ready(self, step: BoxingStep, channel: str) -> tuple[Program, Link | None]:
        """Return the compiled step for this rank, and the link of this rank's group."""
        if len(self._ready) >= MAX_READY_STEPS:
            self._ready.clear()
        world, own_link = self.world, None
        # c10d requires that every rank creates every group, in the same order.
        for ranks in step.groups:
            link = world.link(ranks, channel, step.id)
            own_link = link if world.rank in ranks else own_link
        in_pairs = world.passes_messages(step.dst.placement.device_type)
        program = compile_step(step, world.rank, in_pairs=in_pairs, device=world.device)
        ready = self._ready[id(step), channel] = (program, own_link)
        return ready

    def _issue(self, step: BoxingStep, part: Tensor | None, channel: str, donate: bool) -> Finish:
        """Start one step; return a function that waits for it and returns the new part."""
        world = self.world
        if world.checked and step.groups:  # check first, because creating groups needs all ranks
            self._check(step, part, channel)
        ready = self._ready.get((id(step), channel))
        program, link = ready or self._get_ready(step, channel)
        if (
            part is None
            or part.shape != program.part_shape
            or part.dtype != step.dtype
            or program.changes_device
        ):
            part = self._accept(step, program.part_shape, part)
        if link is None:
            return lambda: collectives.run_alone(program, part)
        if world.log.enabled:
            record = CommRecord(step.id, step.collective, channel, link.ranks, program.bytes_sent)
            world.log.records.append(record)
        loan = Loan(self._staging)
        try:
            received, work, unpack = collectives.start(program, part, link, loan, donate=donate)
        except RuntimeError as error:
            raise refused(error, step.id, step.collective) from error
        return partial(_finish, work, program, unpack, received, loan, world.waits)

    def _check(self, step: BoxingStep, part: Tensor | None, channel: str) -> None:
        """Check that all ranks execute this step, and tell the other ranks if this rank rejects its
        part.
        """
        fault: SbpError | None = None
        try:
            self._accept(step, step.src.part_shape(step.shape, self.world.rank), part)
        except SbpError as error:
            fault = error
        with_grad = " with gradient" if part is not None and part.requires_grad else ""
        self.world.check(
            step.id,
            f"{step.collective}{with_grad}, {step.total_bytes} bytes, {step.src} -> {step.dst} "
            f"{step.dtype}{list(step.shape)}, channel {channel}",
            "" if fault is None else str(fault),
        )
        if fault is not None:  # in a world of one rank, ``world.check()`` does nothing
            raise fault

    def _accept(
        self, step: BoxingStep, part_shape: tuple[int, ...] | None, part: Tensor | None
    ) -> Tensor:
        """Return the part on the destination's device, or an empty part outside the source.

        Raise SbpError if the part's shape or dtype is wrong.
        """
        if part_shape is None:
            if part is not None and part.numel():
                raise SbpError(
                    f"{step.id}: rank {self.world.rank} is not in {step.src}, so it has no part; "
                    "pass None"
                )
            return torch.empty(0, dtype=step.dtype, device=self.device_of(step.dst))
        if part is None or part.shape != part_shape or part.dtype != step.dtype:
            passed = "None" if part is None else f"{part.dtype}{list(part.shape)}"
            raise SbpError(
                f"{step.id}: rank {self.world.rank} passed {passed}, but its part of "
                f"{list(step.shape)} with {step.src} is {step.dtype}{list(part_shape)}"
            )
        if step.src.placement.device_type != step.dst.placement.device_type:
            return part.to(self.device_of(step.dst))
        return part


def _without_history(part: Tensor | None) -> Tensor | None:
    """Detach the part, except inside an autograd function, where parts have no graph."""
    if part is not None and part.requires_grad and torch.is_grad_enabled():
        return part.detach()
    return part


def _between(index: int, part: Tensor | None) -> Tensor | None:
    """Return the input of the step at ``index``, detached for every step except the first.

    If the first step needs no communication, it may return the part itself, which may require grad.
    Ranks outside that step create a new tensor, which does not require grad. Checked mode compares
    ``requires_grad`` across ranks, so it must be the same on all of them.
    """
    return part.detach() if index and part is not None and part.requires_grad else part


def _describe(key: ConversionKey | None) -> str:
    if key is None:
        return "nothing more"
    id, src, dst, shape, dtype = key
    return f"{id} ({src} -> {dst} of {dtype}{list(shape)})"


def _finish(
    work: collectives.Work,
    program: Program,
    unpack: Unpack,
    received: Tensor,
    loan: Loan,
    waits: WaitTime,
) -> Tensor | None:
    wait_for(work, program.step.id, program.step.collective, waits)
    part = unpack(received)
    loan.give_back()
    return part


def wait_for(work: collectives.Work, id: str, collective: str, waits: WaitTime) -> None:
    """Wait until a transfer is complete; raise an error that names the transfer if it fails."""
    if work is None:
        return
    try:
        waits.during(work.wait)
    except RuntimeError as error:
        raise broken(error, id, collective) from error

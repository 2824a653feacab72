"""Runs planned conversions on plain local tensors.

Follows the steps of ``plan`` and decides nothing. Collectives of c10d are called here and in
the embedding exchange, messages in ``pairs``, none elsewhere. No autograd: results have no
history, and ``global_tensor`` pairs each conversion with its adjoint.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sbpflow.boxing import pairs
from sbpflow.boxing.buffers import Loan, Staging
from sbpflow.boxing.plan import Asked, Conversion, plan_boxing
from sbpflow.boxing.program import Program, Stays, compile_step
from sbpflow.boxing.step import BoxingStep
from sbpflow.errors import SbpError
from sbpflow.runtime.ranks.comm_log import CommRecord
from sbpflow.runtime.ranks.world import (
    World,
    all_gather_single,
    broken,
    reduce_scatter_single,
    refused,
)
from sbpflow.sbp.layout import Layout

MAX_READY_STEPS = 8192  # compiled programs kept; past it all are compiled again on next use

Finish = Callable[[], Tensor | None]
Underway = dist.Work | pairs.Messages | None
Issued = tuple[Tensor, Underway]

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending:
    """A conversion under way. ``wait`` once; until then leave the input part as it is.

    Where the world's ``wait_at_once`` is set, the transfer has finished here.
    """

    def __init__(self, finish: Finish, world: World) -> None:
        if world.on_wait is not None:
            finish = partial(world.on_wait, finish)
        self._finish: Finish | None = finish
        if world.wait_at_once:
            out = finish()
            self._finish = lambda: out

    def wait(self) -> Tensor | None:
        """The result, when it is there; ``None`` outside the destination."""
        if self._finish is None:
            raise SbpError("this conversion was waited for already; keep its first result")
        finish, self._finish = self._finish, None
        return finish()


def _said(asked: Asked) -> str:
    id, src, dst, shape, _ = asked
    return f"{id} ({src} -> {dst} of {list(shape)})"


class Boxing:
    """Executes steps for one rank. All ranks of the world make the same calls in the same order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._staging = Staging()
        # Keyed by identity: hashing a step costs more than running its Python part. The program
        # holds the step, so an identity stays taken.
        self._ready: dict[tuple[int, str], tuple[Program, dist.ProcessGroup | None]] = {}
        self._followed: dict[Asked, tuple[BoxingStep, ...]] = {}
        self._asked: list[Asked] | None = None

    def follow(self, conversions: Iterable[Conversion]) -> None:
        """From now on take the steps of these conversions from here: those of a run's plan."""
        self._followed |= {conversion.asked: conversion.steps for conversion in conversions}

    @contextmanager
    def expecting(self, conversions: Sequence[Conversion] | None) -> Generator[None]:
        """Inside, just these conversions are made, in this order; SbpError for any other.

        With ``None`` all are free.
        """
        if conversions is None:
            yield
            return
        self._asked = asked = []
        try:
            yield
        finally:
            self._asked = None
        planned = [conversion.asked for conversion in conversions]
        if asked != planned:
            shorter = min(len(asked), len(planned))
            same = next((n for n in range(shorter) if asked[n] != planned[n]), shorter)
            made = _said(asked[same]) if same < len(asked) else "nothing more"
            wanted = _said(planned[same]) if same < len(planned) else "nothing more"
            raise SbpError(
                f"the dense part asks for {made} where the plan of this run has {wanted}; a "
                "forward makes the same conversions at every step, whatever its values"
            )

    def steps_of(
        self, id: str, src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[BoxingStep, ...]:
        """The steps of a conversion: those of the plan that is followed, or else planned now."""
        asked = (id, src, dst, shape, dtype)
        if self._asked is not None:
            self._asked.append(asked)
        found = self._followed.get(asked)
        if found is not None:
            return found
        return plan_boxing(src, dst, shape, dtype, id=id, backend=self.world.backend_of(dst))

    def prepare(self, steps: Sequence[BoxingStep], channel: str = "main") -> None:
        """Compile ``steps`` and make their process groups now rather than on first use."""
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

        Returns the new part, or ``None`` outside the destination. It may share memory with
        ``part`` where nothing had to be copied. ``donate`` allows ``part`` to be overwritten, which
        saves an all-reduce its copy. Raises SbpError if ``part`` does not have the
        shape or dtype of the first step. The result is detached, also where nothing is sent.
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
        """As ``run``, but returns once the first transfer is under way."""
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

    def _get_ready(
        self, step: BoxingStep, channel: str
    ) -> tuple[Program, dist.ProcessGroup | None]:
        """The step compiled for this rank, and its group; all groups are made on all ranks."""
        if len(self._ready) >= MAX_READY_STEPS:
            self._ready.clear()
        mine = None
        for ranks in step.groups:
            group = self.world.group(ranks, channel, step.id)
            mine = group if self.world.rank in ranks else mine
        world = self.world
        in_pairs = len(world.topology.hosts) > 1 and world.backend_of(step.dst) == "gloo"
        program = compile_step(step, world.rank, in_pairs=in_pairs)
        ready = self._ready[id(step), channel] = (program, mine)
        return ready

    def _issue(self, step: BoxingStep, part: Tensor | None, channel: str, donate: bool) -> Finish:
        """Begin one step; the function returned waits for it and gives the new part."""
        world = self.world
        if world.checked and step.groups:  # before any group is made: all ranks must make it
            self._check(step, part, channel)
        ready = self._ready.get((id(step), channel))
        program, group = ready or self._get_ready(step, channel)
        if (
            part is None
            or part.shape != program.part_shape
            or part.dtype != step.dtype
            or program.changes_device
        ):
            part = self._accept(step, program.part_shape, part)
        if group is None:
            return lambda: program.unpack(part)
        if world.log.enabled:
            world.log.add(_record(program, channel))
        loan = self._staging.loan()
        try:
            if program.stays is not None:
                return _exchange_apart(program, program.stays, part, group, loan)
            if step.collective == "all_reduce":
                received, work = _run_all_reduce(program, part, group, donate)
            else:
                received, work = _COLLECTIVES[step.collective](program, part, group, loan)
        except RuntimeError as error:
            raise refused(error, step.id, step.collective) from error
        if program.add_own is not None:
            return partial(_finish_adding, work, program, program.add_own, received, part, loan)
        return partial(_finish, work, program, received, loan)

    def _check(self, step: BoxingStep, part: Tensor | None, channel: str) -> None:
        """Compare the step with the other ranks', and let them know if this part is refused."""
        fault: SbpError | None = None
        try:
            self._accept(step, step.src.part_shape(step.shape, self.world.rank), part)
        except SbpError as error:
            fault = error
        what = f"{step.src} -> {step.dst} {step.dtype}{list(step.shape)}"
        trains = part is not None and part.requires_grad
        self.world.check(
            step.id,
            f"{step.collective}{' with gradient' * trains}, {step.total_bytes} bytes, {what}, "
            f"channel {channel}",
            "" if fault is None else str(fault),
        )
        if fault is not None:  # a world of one, where nobody else is asked
            raise fault

    def _accept(
        self, step: BoxingStep, part_shape: tuple[int, ...] | None, part: Tensor | None
    ) -> Tensor:
        """The part, on the device of the destination; SbpError if it is not the step's."""
        if part_shape is None:
            if part is not None and part.numel():
                raise SbpError(
                    f"{step.id}: rank {self.world.rank} is outside {step.src}; pass None"
                )
            return torch.empty(0, dtype=step.dtype, device=self.world.device_of(step.dst))
        if part is None or part.shape != part_shape or part.dtype != step.dtype:
            given = "None" if part is None else f"{part.dtype}{list(part.shape)}"
            raise SbpError(
                f"{step.id}: rank {self.world.rank} passed {given}; under {step.src} its part of "
                f"{list(step.shape)} is {step.dtype}{list(part_shape)}"
            )
        if step.src.placement.device_type != step.dst.placement.device_type:
            return part.to(self.world.device_of(step.dst))
        return part


def _without_history(part: Tensor | None) -> Tensor | None:
    """The part as a plain tensor. Inside an autograd function, where no graph grows, it stays."""
    if part is not None and part.requires_grad and torch.is_grad_enabled():
        return part.detach()
    return part


def _between(index: int, part: Tensor | None) -> Tensor | None:
    """What the step at ``index`` takes: after a step that only passed the part on, a plain tensor,
    as ranks outside that step have it. The checked mode compares who requires grad.
    """
    return part.detach() if index and part is not None and part.requires_grad else part


def _record(program: Program, channel: str) -> CommRecord:
    step = program.step
    return CommRecord(step.id, step.collective, channel, program.group or (), program.bytes_sent)


def _as_sent(program: Program, buffer: Tensor) -> Tensor:
    return buffer if program.comm_dtype is None else buffer.view(program.comm_dtype)


def _finish(work: Underway, program: Program, received: Tensor, loan: Loan) -> Tensor | None:
    _wait(work, program)
    part = program.unpack(received)
    loan.give_back()
    return part


def _wait(work: Underway, program: Program) -> None:
    if work is None:
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise broken(error, program.step.id, program.step.collective) from error


def _finish_adding(
    work: Underway,
    program: Program,
    add_own: Callable[[Tensor, Tensor], Tensor],
    received: Tensor,
    part: Tensor,
    loan: Loan,
) -> Tensor:
    _wait(work, program)
    whole = add_own(received, part)
    loan.give_back()
    return whole


def _exchange_apart(
    program: Program, stays: Stays, part: Tensor, group: dist.ProcessGroup, loan: Loan
) -> Finish:
    """An all-to-all beside which this rank copies what stays."""
    packed = program.pack(part, loan)
    out = part.new_empty(stays.shape)
    if stays.run is None:
        received = _receive_buffer(program, part, loan)
    else:
        received = out.view(-1)[stays.run]
    work = _all_to_all(program, received, packed, group)
    stays.put(out).copy_(stays.cut(part))

    def finish() -> Tensor:
        _wait(work, program)
        whole = stays.place(received, out)
        loan.give_back()
        return whole

    return finish


def _run_all_reduce(
    program: Program, part: Tensor, group: dist.ProcessGroup, donate: bool
) -> Issued:
    whole = part.contiguous() if donate else part.clone(memory_format=torch.contiguous_format)
    return whole, dist.all_reduce(whole, _REDUCE_OPS[program.reduction], group, async_op=True)


def _receive_buffer(program: Program, like: Tensor, loan: Loan) -> Tensor:
    shape = program.receive_shape
    return like.new_empty(shape) if program.keeps_received else loan.take(shape, like)


def _run_all_gather(program: Program, part: Tensor, group: dist.ProcessGroup, loan: Loan) -> Issued:
    packed = program.pack(part, loan)
    gathered = _receive_buffer(program, part, loan)
    sent, into = _as_sent(program, packed), _as_sent(program, gathered)
    # gloo gathers along the first dim only; and parts without elements, such as [6, 0] and [7, 0],
    # have no shape in common.
    if sent.ndim == 0 or sent.shape[1:] != into.shape[1:] or not into.numel():
        sent, into = sent.view(-1), into.view(-1)
    return gathered, all_gather_single(into, sent, group=group, async_op=True)


def _run_reduce_scatter(
    program: Program, part: Tensor, group: dist.ProcessGroup, loan: Loan
) -> Issued:
    packed = program.pack(part, loan)
    reduced = part.new_empty(program.receive_shape)
    op = _REDUCE_OPS[program.reduction]
    return reduced, reduce_scatter_single(reduced, packed, op=op, group=group, async_op=True)


def _run_all_to_all(program: Program, part: Tensor, group: dist.ProcessGroup, loan: Loan) -> Issued:
    packed = program.pack(part, loan)
    received = _receive_buffer(program, part, loan)
    return received, _all_to_all(program, received, packed, group)


def _all_to_all(
    program: Program, received: Tensor, packed: Tensor, group: dist.ProcessGroup
) -> Underway:
    received, packed = _as_sent(program, received), _as_sent(program, packed)
    if program.in_pairs is not None:
        rank, ranks = program.in_pairs, program.group or ()
        even = [packed.numel() // len(ranks)] * len(ranks)
        sizes = program.sizes or (even, even)
        return pairs.all_to_all(_flat(received), _flat(packed), sizes, ranks, rank, group)
    if program.sizes is None:
        received, packed = _by_rank(received, group), _by_rank(packed, group)
        return dist.all_to_all_single(received, packed, group=group, async_op=True)
    return dist.all_to_all_single(
        _flat(received), _flat(packed), *program.sizes, group=group, async_op=True
    )


def _flat(buffer: Tensor) -> Tensor:
    return buffer if buffer.ndim == 1 else buffer.view(-1)


def _by_rank(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A buffer whose first dim the ranks divide, as c10d wants it."""
    if buffer.ndim and buffer.shape[0] % group.size() == 0:
        return buffer
    return buffer.view(-1)


_COLLECTIVES = {
    "all_gather": _run_all_gather,
    "reduce_scatter": _run_reduce_scatter,
    "all_to_all": _run_all_to_all,
}

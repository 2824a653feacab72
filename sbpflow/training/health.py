"""Checks that end a run which has gone wrong: a loss that is not a number, replicas that differ."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sbpflow.boxing.agreement import combine_parts, gather_texts
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import Copies, EmbeddingCollection
from sbpflow.embedding.state import Values, read_values
from sbpflow.errors import ReplicaError, SbpError, TrainingError
from sbpflow.runtime.compute.async_scalar_read import AsyncScalarRead
from sbpflow.runtime.compute.devices import device_name
from sbpflow.sbp.sbp import Broadcast, Partial, Split
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.batch import Batch
from sbpflow.training.move_times import peak_memory_of

_ROWS_READ = 1 << 16  # of a store at a time


class LossWatch:
    """Stops the run at a loss that is NaN or infinite, naming the step and the fields at fault.

    On CPU a loss is checked at once. On CUDA it is copied to the host beside the next step and
    checked one step later, so that the check never waits for the device.
    """

    def __init__(
        self,
        boxing: Boxing,
        dense_names: Sequence[str],
        dense_ranges: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """``dense_ranges`` are the least and the greatest value of columns, as the set has them."""
        self._boxing = boxing
        self._names = tuple(dense_names)
        every = [(dense_ranges or {}).get(name, (-math.inf, math.inf)) for name in self._names]
        self._least, self._greatest = torch.tensor(every).reshape(-1, 2).unbind(1)
        self._waiting: tuple[int, AsyncScalarRead, Sequence[Batch]] | None = None
        self.last = float("nan")
        self._norm: float | None = None

    def push(
        self, step: int, loss: Tensor, batches: Sequence[Batch], norm: Tensor | None = None
    ) -> None:
        """Take the loss of ``step``, the batches it came from, and the norm of the gradients where
        there is one.
        """
        values = [loss] if norm is None else [loss, norm]
        if not loss.is_cuda:
            self._check_values(step, batches)
            self._check(step, [float(value) for value in values], batches)
            return
        self.flush()
        both = loss.reshape(1) if norm is None else torch.stack([loss.to(torch.float64), norm])
        self._waiting = (step, AsyncScalarRead(both), batches)

    def _check_values(self, step: int, batches: Sequence[Batch]) -> None:
        """TrainingError where a label or a dense value is none of its set's: a file has changed
        since. On CPU alone; the loss of such a row may look like any other.
        """
        for batch in batches:
            dense = batch.dense
            checks = [("the label", (batch.labels != 0) & (batch.labels != 1), batch.labels)]
            outside = (dense < self._least) | (dense > self._greatest)
            if outside.any():
                column = int(outside.any(0).nonzero()[0])
                checks.append((self._names[column], outside[:, column], dense[:, column]))
            for what, wrong, values in checks:
                if not wrong.any():
                    continue
                row = int(wrong.nonzero()[0])
                raise TrainingError(
                    f"step {step}: {what} in row {row} of rank {self._boxing.world.rank}'s part of "
                    f"the batch is {float(values[row]):g}; {self._rule(what)}, so a file of the "
                    "set has changed since: `sbpflow verify` names it"
                )

    def _rule(self, what: str) -> str:
        if what not in self._names:
            return "labels are 0 or 1"
        column = self._names.index(what)
        least, greatest = float(self._least[column]), float(self._greatest[column])
        return f"the set has {least:g} to {greatest:g}"

    def figures(self) -> dict[str, float]:
        """What is known beside the loss: the norm of the gradients before it was clipped."""
        return {} if self._norm is None else {"grad_norm": self._norm}

    def flush(self) -> None:
        """Check what is still under way."""
        if self._waiting is not None:
            (step, late, batches), self._waiting = self._waiting, None
            self._check(step, late.wait().tolist(), batches)

    def _check(self, step: int, values: Sequence[float], batches: Sequence[Batch]) -> None:
        loss, *norm = values
        self.last, self._norm = loss, norm[0] if norm else None
        if loss - loss == 0.0:  # neither NaN nor infinite
            if norm and not math.isfinite(norm[0]):
                raise TrainingError(
                    f"step {step}: the norm of the gradients is {norm[0]} at a loss of {loss}; try "
                    "a smaller learning rate"
                )
            return
        # The loss is the same on every rank, so every rank comes here and takes part.
        dense = torch.cat([batch.dense for batch in batches])
        bad = (~torch.isfinite(dense)).sum(0).to(torch.int64)
        counts = combine_parts(self._boxing, bad, Partial(), "health/fields").tolist()
        named = ", ".join(
            f"{name} ({count} rows)"
            for name, count in zip(self._names, counts, strict=True)
            if count
        )
        cause = (
            f"the batch holds values that are not numbers in {named}"
            if named
            else "all dense fields of the batch are finite: try a smaller learning rate"
        )
        raise TrainingError(f"step {step}: the loss is {loss}; {cause}")


def out_of_range_note(embeddings: EmbeddingCollection, boxing: Boxing) -> str:
    """Ids that no table had a row for, per field over all ranks; every rank calls it."""
    policy = embeddings.plan.out_of_range
    if policy == "error":
        return "none (each would have ended the run)"
    counts = embeddings.out_of_range
    if boxing.world.size > 1:
        counts = combine_parts(boxing, counts, Partial(), "health/out_of_range")
    named = [
        f"{feature.name}: {count:,}"
        for feature, count in zip(embeddings.plan.features, counts.tolist(), strict=True)
        if count
    ]
    return f"{policy}: " + ("\n".join(named) or "none")


def device_names(boxing: Boxing) -> list[str]:
    """The device of every rank, in rank order; every rank calls it."""
    return gather_texts(boxing, device_name(boxing.world.device))


def peak_memory_bytes(boxing: Boxing) -> list[int]:
    """Most memory that each rank has held, in rank order; every rank calls it."""
    peaks = gather_texts(boxing, str(peak_memory_of(boxing.world.device)))
    return [int(peak) for peak in peaks]


def check_replicas(
    parameters: Mapping[str, GlobalTensor], embeddings: EmbeddingCollection, boxing: Boxing
) -> None:
    """Raise ReplicaError on every rank if copies differ between ranks, bit by bit.

    Copies are tensors laid out B, and the optimizer state of rows whose columns several ranks hold.
    """
    world = boxing.world
    if world.size == 1:
        return
    copies = [*_copies_of(parameters, world.size), *embeddings.copies()]
    if found := _first_difference(copies, boxing):
        name, ranks = found
        raise ReplicaError(
            f"{name}: the copies on ranks {list(ranks)} differ; a gradient or an update was not "
            "the same everywhere"
        )


def check_initial(parameters: Mapping[str, GlobalTensor], boxing: Boxing) -> None:
    """Raise SbpError on every rank if parameters that are B start with different values."""
    if boxing.world.size == 1:
        return
    if found := _first_difference(_copies_of(parameters, boxing.world.size), boxing):
        name, _ = found
        raise SbpError(
            f"parameter {name}: its initial values differ between ranks; a model's make() must "
            "build a new module at each call and draw from torch's generator alone, or load the "
            "same file on every rank"
        )


def _copies_of(parameters: Mapping[str, GlobalTensor], size: int) -> list[Copies]:
    return [
        Copies(name, (tuple(range(size)),), [parameter.part.detach()])
        for name, parameter in parameters.items()
        if parameter.layout.nd_sbp == (Broadcast(),)
    ]


def _first_difference(
    copies: Sequence[Copies], boxing: Boxing
) -> tuple[str, tuple[int, ...]] | None:
    """The first copies that are not equal bit by bit, and their ranks; every rank calls it."""
    if not copies:
        return None
    mine = torch.stack([_checksum(copy.tensors, boxing.world.device) for copy in copies])
    everyone = combine_parts(boxing, mine.unsqueeze(0), Split(0), "health/replicas").tolist()
    for column, copy in enumerate(copies):
        for ranks in copy.ranks:
            if len({everyone[rank][column] for rank in ranks}) > 1:
                return copy.name, ranks
    return None


def _checksum(tensors: Sequence[Values], device: torch.device) -> Tensor:
    """The bits as integers, summed with wrap-around; order and NaN do not matter."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize]
        parts = [tensor] if isinstance(tensor, Tensor) else tensor.split(_ROWS_READ)
        for part in parts:
            total += read_values(part).contiguous().view(bits).sum(dtype=torch.int64).to(device)
    return total

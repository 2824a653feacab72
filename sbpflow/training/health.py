"""Stops broken runs: checks that the loss is finite and that replicas are equal."""

import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from sbpflow.boxing.agreement import combine_parts, gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.copies import Copies
from sbpflow.embedding.state import Values, read_values
from sbpflow.errors import ReplicaError, SbpError, TrainingError
from sbpflow.runtime.compute.async_scalar_read import AsyncScalarRead
from sbpflow.runtime.compute.devices import device_name
from sbpflow.sbp.sbp import Broadcast, Partial, Split
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.batch import Batch
from sbpflow.training.move_times import peak_memory_of

_ROWS_READ = 1 << 16  # number of rows to read from a store at once


class LossWatch:
    """Stops the run if the loss or the gradient norm is NaN or infinite, or (on CPU) if a label or
    a dense value of a batch is invalid.

    On CPU, the loss is checked immediately. On CUDA, the loss is copied to the host during the next
    step and checked after that step or by ``flush``, so only ``flush`` waits for the device.
    """

    def __init__(
        self,
        boxing: Boxing,
        dense_names: Sequence[str],
        dense_ranges: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """``dense_ranges`` contains each column's minimum and maximum from the data set's
        manifest."""
        self._boxing = boxing
        self._names = tuple(dense_names)
        ranges = [(dense_ranges or {}).get(name, (-math.inf, math.inf)) for name in self._names]
        self._minimum, self._maximum = torch.tensor(ranges).reshape(-1, 2).unbind(1)
        self._pending: tuple[int, AsyncScalarRead, Sequence[Batch]] | None = None
        self.last = float("nan")
        self._norm: float | None = None

    def push(
        self, step: int, loss: Tensor, batches: Sequence[Batch], norm: Tensor | None = None
    ) -> None:
        """Check the loss of ``step`` now on CPU, or one step later on CUDA.

        Raises TrainingError for a loss that is NaN or infinite, naming the fields of ``batches``
        with such values, and for such a gradient norm.
        """
        values = [loss] if norm is None else [loss, norm]
        if not loss.is_cuda:
            self._check_values(step, batches)
            self._check(step, [float(value) for value in values], batches)
            return
        self.flush()
        values = loss.reshape(1) if norm is None else torch.stack([loss.to(torch.float64), norm])
        self._pending = (step, AsyncScalarRead(values), batches)

    def _check_values(self, step: int, batches: Sequence[Batch]) -> None:
        """Raise TrainingError if a label is not 0 or 1, or if a dense value is outside its range in
        the manifest.

        Such a value means that a file has changed since the data was prepared, which the loss may
        not reveal. The check runs only on CPU.
        """
        for batch in batches:
            dense = batch.dense
            is_wrong = (batch.labels != 0) & (batch.labels != 1)
            if is_wrong.any():
                self._refuse(step, "the label", batch.labels, is_wrong, "labels are 0 or 1")
            is_outside = (dense < self._minimum) | (dense > self._maximum)
            if is_outside.any():
                column = int(is_outside.any(0).nonzero()[0])
                low, high = float(self._minimum[column]), float(self._maximum[column])
                rule = (
                    "according to the manifest, the values of this field range from "
                    f"{low:g} to {high:g}"
                )
                values, is_wrong = dense[:, column], is_outside[:, column]
                self._refuse(step, self._names[column], values, is_wrong, rule)

    def _refuse(
        self, step: int, name: str, values: Tensor, is_wrong: Tensor, rule: str
    ) -> NoReturn:
        row = int(is_wrong.nonzero()[0])
        raise TrainingError(
            f"step {step}: {name} in row {row} of rank {self._boxing.world.rank}'s part of the "
            f"batch is {float(values[row]):g}; {rule}, so a file has changed since the data was "
            "prepared; run `sbpflow verify` to find the file"
        )

    def figures(self) -> dict[str, float]:
        """Return the gradient norm before clipping, if gradients are clipped."""
        return {} if self._norm is None else {"grad_norm": self._norm}

    def flush(self) -> None:
        """Check the loss that is still being copied, if any."""
        if self._pending is not None:
            (step, read, batches), self._pending = self._pending, None
            self._check(step, read.wait().tolist(), batches)

    def _check(self, step: int, values: Sequence[float], batches: Sequence[Batch]) -> None:
        loss, *norm = values
        self.last, self._norm = loss, norm[0] if norm else None
        if math.isfinite(loss):
            if norm and not math.isfinite(norm[0]):
                raise TrainingError(
                    f"step {step}: the gradient norm is {norm[0]} at a loss of {loss}; try a "
                    "smaller learning rate"
                )
            return
        # Every rank reaches this collective, because the loss is the same on every rank.
        dense = torch.cat([batch.dense for batch in batches])
        bad = (~torch.isfinite(dense)).sum(0).to(torch.int64)
        counts = combine_parts(self._boxing, bad, Partial(), "health/fields").tolist()
        named = ", ".join(
            f"{name} ({count} rows)"
            for name, count in zip(self._names, counts, strict=True)
            if count
        )
        cause = (
            f"the batch has non-finite values in {named}"
            if named
            else "all dense fields of the batch are finite; try a smaller learning rate"
        )
        raise TrainingError(f"step {step}: the loss is {loss}; {cause}")


def out_of_range_note(embeddings: EmbeddingCollection, boxing: Boxing) -> str:
    """Return the number of out-of-range ids per field over all ranks, as text; every rank must call
    this function.
    """
    policy = embeddings.plan.out_of_range
    if policy == "error":
        return "none (an out-of-range id ends the run)"
    counts = combine_parts(boxing, embeddings.out_of_range, Partial(), "health/out_of_range")
    named = [
        f"{feature.name}: {count:,}"
        for feature, count in zip(embeddings.plan.features, counts.tolist(), strict=True)
        if count
    ]
    return f"{policy}: " + ("\n".join(named) or "none")


def device_names(boxing: Boxing) -> list[str]:
    """Return the device of every rank in rank order; every rank must call this function."""
    return gather_values(boxing, device_name(boxing.world.device))


def peak_memory_bytes(boxing: Boxing) -> list[int]:
    """Return every rank's peak memory in bytes; every rank must call this function."""
    return gather_values(boxing, peak_memory_of(boxing.world.device))


def check_replicas(
    parameters: Mapping[str, GlobalTensor], embeddings: EmbeddingCollection, boxing: Boxing
) -> None:
    """Raise ReplicaError on every rank if copies of a tensor on different ranks are not bitwise
    equal.

    Tensors with layout B have copies, and so does the optimizer state of rows whose columns are
    split.
    """
    copies = [*_copies_of(parameters, boxing.world.size), *embeddings.copies()]
    if difference := _first_difference(copies, boxing):
        name, ranks = difference
        raise ReplicaError(
            f"{name}: the copies on ranks {list(ranks)} differ; a gradient or an update was not "
            "the same on all of them"
        )


def check_initial(parameters: Mapping[str, GlobalTensor], boxing: Boxing) -> None:
    """Raise SbpError on every rank if a tensor with layout B differs between ranks."""
    if difference := _first_difference(_copies_of(parameters, boxing.world.size), boxing):
        raise SbpError(
            f"parameter or buffer {difference[0]}: its initial values differ between ranks; a "
            "model's make() must build a new module on each call and use only torch's default "
            "generator, or load the same file on every rank"
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
    """Return the first unequal copies and their ranks; every rank must call this function."""
    if not copies or boxing.world.size == 1:
        return None
    mine = torch.stack([_checksum(copy.tensors, boxing.world.device) for copy in copies])
    sums = combine_parts(boxing, mine.unsqueeze(0), Split(0), "health/replicas").tolist()
    for column, copy in enumerate(copies):
        for ranks in copy.ranks:
            if len({sums[rank][column] for rank in ranks}) > 1:
                return copy.name, ranks
    return None


def _checksum(tensors: Sequence[Values], device: torch.device) -> Tensor:
    """Return the wrapping sum of the values' bits as integers, which depends neither on the order
    nor on how NaNs compare.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.itemsize]
        parts = [tensor] if isinstance(tensor, Tensor) else tensor.split(_ROWS_READ)
        for part in parts:
            total += read_values(part).contiguous().view(bits).sum(dtype=torch.int64).to(device)
    return total

"""Restores a checkpoint into a job with any layout: each rank reads the rectangles that it stores.

Conversion to half precision rounds to nearest; widening is exact. If a table has more rows than
were saved, the additional rows keep their initial values. The rows of growing tables are saved in
the order of their keys' addresses. For any number of ranks, the rows of a rank therefore form one
range, which a binary search finds.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sbpflow.checkpoint.format import BLOCK_BYTES, SavedTensor
from sbpflow.checkpoint.keys import Addresses
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.embedding.plan.growth import TOTALS
from sbpflow.embedding.plan.tables import Place
from sbpflow.embedding.state import LogicalTensor, Rectangle, StoredRows
from sbpflow.embedding.storage.live_rows import Saved, TrainedRows
from sbpflow.embedding.storage.store import Array
from sbpflow.errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # these modules need numba
    from sbpflow.embedding.vocabulary.field_keys import FieldKeys
    from sbpflow.embedding.vocabulary.vocabulary import Vocabulary

TABLES = "tables/"


def check_fits(
    checkpoint: Checkpoint, state: Mapping[str, LogicalTensor], *, grown: bool = False
) -> None:
    """Raise CheckpointError unless the checkpoint has exactly the tensors of ``state``.

    Shapes must be equal, but layouts may differ, except for the column shards of state with one
    value per row and shard. With ``grown``, tables may have more rows than were saved.
    """
    missing = sorted(state.keys() - checkpoint.tensors)
    extra = sorted(checkpoint.tensors.keys() - state)
    if missing or extra:
        faults = [f"it lacks {_some(missing)}"] if missing else []
        faults += [f"it has {_some(extra)}, but this run does not"] if extra else []
        raise CheckpointError(
            f"{checkpoint.path} does not match this run: {'; '.join(faults)}; use the model, "
            "fields, and optimizers of the run that saved it"
        )
    for name, tensor in state.items():
        _check_shape(checkpoint, checkpoint.tensors[name], tensor, grown=grown)


def _check_shape(
    checkpoint: Checkpoint, saved: SavedTensor, tensor: LogicalTensor, *, grown: bool
) -> None:
    name, shape = tensor.name, tensor.shape
    if tensor.by_key:  # the number of saved rows may differ
        shape = (*saved.shape[:1], *shape[1:])
    if saved.column_starts != tensor.column_starts:
        raise CheckpointError(
            f"{checkpoint.path}: {name} was saved as {_shards(saved.column_starts)}, but this run "
            f"has {_shards(tensor.column_starts)}; this state has one value per row and column "
            "shard, so the column shards must be the same; use the layout and row_state of the "
            "saved run, or train with row_state: logical"
        )
    if saved.shape == shape:
        return
    is_table = name.startswith(TABLES)
    has_more = is_table and saved.shape[1:] == shape[1:] and saved.shape[:1] < shape[:1]
    if not (grown and has_more):
        fix = (
            "a table may have more rows only if the vocabulary of the data has grown from that of "
            "the saved run (sbpflow prepare --like OLD --grow)"
            if has_more
            else "use the model of the run that saved it"
        )
        raise CheckpointError(
            f"{checkpoint.path}: {name} was saved with shape {list(saved.shape)}, but has "
            f"{list(shape)} in this run; {fix}"
        )


def restore(checkpoint: Checkpoint, state: Mapping[str, LogicalTensor]) -> None:
    """Fill this rank's rectangles of ``state``. Call ``check_fits`` first. This function does not
    communicate.

    Raise CheckpointError at a damaged block; by then, part of the state may have been overwritten.
    """
    with torch.no_grad():
        growing: dict[str, _Growing] = {}
        for name, tensor in state.items():
            saved = checkpoint.tensors[name].whole
            if tensor.field is None:
                for rectangle in tensor.rectangles:
                    _fill(checkpoint, name, saved, rectangle)
                continue
            plan = tensor.field.plan
            if plan.name not in growing:
                growing[plan.name] = _Growing(checkpoint, tensor.field)
            if name.startswith(TABLES):
                for rectangle in tensor.rectangles:
                    growing[plan.name].fill(name, tensor, rectangle)


class _Growing:
    """Restores the vocabulary of a growing field, then the rows of its tables."""

    def __init__(self, checkpoint: Checkpoint, field: "FieldKeys") -> None:
        self._checkpoint, self._name = checkpoint, f"vocabularies/{field.plan.name}"
        addresses = self._addresses("keys")
        # For each owner: the range of saved keys in its buckets, and the first of the rows assigned
        # to these keys.
        self._parts: list[tuple[slice, int]] = []
        if (live := field.live) is not None:
            self._parts = [
                (addresses.within(first, last), row)
                for first, last, row in field.first_rows()
                if live.start <= row < live.stop
            ]
            live.load([(row, addresses.read(keys)) for keys, row in self._parts])
        if field.part is not None:
            first, last = field.part.buckets
            self._load(field.part, addresses.within(first, last), first, last)

    def _load(self, part: "Vocabulary", keys: slice, first: int, last: int) -> None:
        waiting = self._addresses("pending_keys")
        pending = waiting.within(first, last)
        clock, totals = self._whole("clock"), self._whole("totals")
        saved = Saved(
            addresses=self._addresses("keys").read(keys).numpy(),
            lasts=self._read("last_uses", keys),
            counts=self._read("counts", keys),
            pending_addresses=waiting.read(pending).numpy(),
            pending_lasts=self._read("pending_last_uses", pending),
            pending_counts=self._read("pending_counts", pending),
            now=int(clock[0]),
            clock=clock[1:].numpy(),
            times=self._whole("times").numpy(),
        )
        own = totals.view(-1, len(TOTALS)).sum(0).tolist() if first == 0 else []
        try:
            part.load(saved, own)
        except (CheckpointError, ConfigError) as error:
            name = self._name.removeprefix("vocabularies/")
            raise type(error)(f"model.fields.{name}.{error}") from error

    def fill(self, name: str, tensor: LogicalTensor, rectangle: Rectangle) -> None:
        """Write the shared row and the rows of keys to their places in the store."""
        values = rectangle.values
        shard = tensor.shard
        if not isinstance(values, StoredRows) or not isinstance(values.store, TrainedRows):
            raise TypeError(f"{name}: the rows of keys must be StoredRows, not {type(values)}")
        if shard is None:
            raise TypeError(f"{name} has rows on this rank, but no shard")
        parts = [(slice(0, 1), 0)]  # the shared row
        parts += [(slice(keys.start + 1, keys.stop + 1), row) for keys, row in self._parts]
        for rows, row in parts:
            if not shard.row_start <= row < shard.row_stop:
                continue
            start = row + shard.shift
            target = replace(
                values, store=values.store.store, start=start, stop=start + rows.stop - rows.start
            )
            place = replace(rectangle.place, row_start=rows.start, row_stop=rows.stop)
            _write(self._checkpoint, name, place, target)

    def _addresses(self, name: str) -> Addresses:
        return self._checkpoint.addresses(f"{self._name}/{name}")

    def _read(self, name: str, rows: slice) -> Array:
        return self._checkpoint.tensor(f"{self._name}/{name}", rows).numpy()

    def _whole(self, name: str) -> Tensor:
        return self._checkpoint.tensor(f"{self._name}/{name}")


def _fill(checkpoint: Checkpoint, name: str, saved: Place, rectangle: Rectangle) -> None:
    place = saved.common(rectangle.place)
    if place is None:
        return
    values = rectangle.values if rectangle.values.ndim == 0 else rectangle.values[: place.num_rows]
    if isinstance(values, StoredRows):
        _write(checkpoint, name, place, values)
    elif values.is_contiguous():
        _read(checkpoint, name, place, values)
    else:
        contiguous = torch.empty(values.shape, dtype=values.dtype)
        _read(checkpoint, name, place, contiguous)
        values.copy_(contiguous)


def _read(checkpoint: Checkpoint, name: str, place: Place, values: Tensor) -> None:
    checkpoint.read_into(name, place, values)
    narrows = values.dtype == torch.float16 != checkpoint.saved(name).dtype
    if narrows and not bool(values.isfinite().all()):
        raise CheckpointError(
            f"{checkpoint.path}: {name} has values that float16 cannot represent (its largest is "
            "65,504); use parallel.table_dtype: bfloat16, or the table_dtype of the saved run"
        )


def _write(checkpoint: Checkpoint, name: str, place: Place, values: StoredRows) -> None:
    """Read the rows from the checkpoint and write them to the store, about one block at a time."""
    row_bytes = max(1, values[:1].numel() * values.itemsize)
    start = place.row_start
    for part in values.split(max(1, BLOCK_BYTES * checkpoint.chain_length // row_bytes)):
        rows = torch.empty(part.shape, dtype=part.dtype)
        stop = start + part.shape[0]
        _read(checkpoint, name, replace(place, row_start=start, row_stop=stop), rows)
        part.write(rows)
        start = stop


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shards(starts: tuple[int, ...] | None) -> str:
    return "one number per row" if starts is None else f"shards from columns {list(starts)}"

"""Restores a checkpoint into a job of any layout: each rank reads the rectangles that it stores.

Conversion to half precision rounds to nearest; widening is exact. If a table has more rows than
were saved, the additional rows keep their initial values. ``by_key`` rows are saved in address
order, so a rank's rows form one range for any number of ranks. A binary search finds the range.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import replace

import torch

from sbpflow.checkpoint.format import BLOCK_BYTES, Place, SavedTensor
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.checkpoint.write import rectangle_place
from sbpflow.embedding.plan.numbering import NUMBERINGS
from sbpflow.embedding.state import LogicalTensor, Rectangle, StoredRows
from sbpflow.embedding.storage.keyed import KEYS, KeyedStore
from sbpflow.errors import CheckpointError

TABLES = "tables/"


def check_fits(
    checkpoint: Checkpoint, state: Mapping[str, LogicalTensor], *, grown: bool = False
) -> None:
    """Raise CheckpointError unless the checkpoint has exactly the tensors of ``state``.

    Shapes must be equal, but layouts may differ. If ``grown``, tables may have more rows than were
    saved.
    """
    missing = sorted(state.keys() - checkpoint.tensors)
    extra = sorted(checkpoint.tensors.keys() - state)
    if missing or extra:
        faults = [f"it lacks {_some(missing)}"] if missing else []
        faults += [f"it has {_some(extra)}, but this run does not"] if extra else []
        raise CheckpointError(
            f"{checkpoint.path}: does not fit this run: {'; '.join(faults)}; use the model, "
            "fields, and optimizers that it was trained with"
        )
    for name, tensor in state.items():
        _check_shape(checkpoint, checkpoint.tensors[name], tensor, grown=grown)


def _check_shape(
    checkpoint: Checkpoint, saved: SavedTensor, tensor: LogicalTensor, *, grown: bool
) -> None:
    name, shape = tensor.name, tensor.shape
    if tensor.by_key:  # use the saved number of rows
        shape = (*saved.shape[:1], *shape[1:])
    if saved.column_starts != tensor.column_starts:
        raise CheckpointError(
            f"{checkpoint.path}: {name}: saved as {_shards(saved.column_starts)}, but this run has "
            f"{_shards(tensor.column_starts)}; state per row and column shard is valid only for "
            "the same column shards; use the same layout and row_state, or train with "
            "row_state: logical"
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
            else "use the model that it was trained with"
        )
        raise CheckpointError(
            f"{checkpoint.path}: {name}: saved as {list(saved.shape)}, but this run has "
            f"{list(shape)}; {fix}"
        )


def restore(checkpoint: Checkpoint, state: Mapping[str, LogicalTensor]) -> None:
    """Fill this rank's rectangles of ``state``, after ``check_fits``; not a collective.

    Raise CheckpointError at a damaged block; by then, part of the state is already overwritten.
    """
    with torch.no_grad():
        keyed_rows: dict[KeyedStore, slice] = {}
        for name, tensor in state.items():
            saved = checkpoint.tensors[name].whole
            for rectangle in tensor.rectangles:
                values = rectangle.values
                if tensor.keyed is None:
                    _fill(checkpoint, name, saved, rectangle)
                elif not isinstance(values, StoredRows):
                    raise TypeError(f"{name}: by_key rows must be StoredRows, not {type(values)}")
                elif values.key == KEYS:  # the first tensor of its table
                    rows = keyed_rows[tensor.keyed] = _rows_in(checkpoint, name, tensor.keyed.span)
                    tensor.keyed.load(checkpoint.tensor(name, rows))
                else:
                    rows = keyed_rows[tensor.keyed]
                    place = replace(saved, row_start=rows.start, row_stop=rows.stop)
                    target = replace(values, store=tensor.keyed, start=0, stop=place.num_rows)
                    _write(checkpoint, name, place, target)


def _rows_in(checkpoint: Checkpoint, keys: str, span: tuple[int, int]) -> slice:
    """Return the range of saved rows whose addresses lie within ``span``, both ends included."""

    def address(row: int) -> int:
        return int(NUMBERINGS[True].addresses(checkpoint.tensor(keys, slice(row, row + 1))))

    rows = range(checkpoint.tensors[keys].whole.num_rows)
    start = bisect_left(rows, span[0], key=address)
    return slice(start, bisect_right(rows, span[1], lo=start, key=address))


def _fill(checkpoint: Checkpoint, name: str, saved: Place, rectangle: Rectangle) -> None:
    place = saved.common(rectangle_place(rectangle))
    if place is None:
        return
    values = rectangle.values if rectangle.values.ndim == 0 else rectangle.values[: place.num_rows]
    if isinstance(values, StoredRows):
        _write(checkpoint, name, place, values)
    elif values.is_contiguous():
        checkpoint.read_into(name, place, values)
    else:
        contiguous = torch.empty(values.shape, dtype=values.dtype)
        checkpoint.read_into(name, place, contiguous)
        values.copy_(contiguous)


def _write(checkpoint: Checkpoint, name: str, place: Place, values: StoredRows) -> None:
    """Read and write the rows in portions of about one block per checkpoint that is read."""
    row_bytes = max(1, values[:1].numel() * values.itemsize)
    start = place.row_start
    for part in values.split(max(1, BLOCK_BYTES * checkpoint.chain_length // row_bytes)):
        rows = torch.empty(part.shape, dtype=part.dtype)
        stop = start + part.shape[0]
        checkpoint.read_into(name, replace(place, row_start=start, row_stop=stop), rows)
        part.write(rows)
        start = stop


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shards(starts: tuple[int, ...] | None) -> str:
    return "one number per row" if starts is None else f"shards from columns {list(starts)}"

"""From a checkpoint into a job of any layout: each rank reads the rectangles that it holds.

Rows of half precision are rounded to the nearest; widened ones are exact. Rows that a table has
beyond the saved ones keep the values they were made with. Rows by key are saved in the order of
their addresses, so those of a rank are one range on any number of ranks, which is searched for.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import replace

import torch

from sbpflow.checkpoint.format import BLOCK_BYTES, Place, SavedTensor
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.embedding.plan.numbering import NUMBERINGS
from sbpflow.embedding.state import LogicalTensor, Rectangle, StoredRows
from sbpflow.embedding.storage.keyed import KEYS, KeyedStore
from sbpflow.errors import CheckpointError

TABLES = "tables/"


def check_fits(
    checkpoint: Checkpoint, state: Mapping[str, LogicalTensor], *, grown: bool = False
) -> None:
    """CheckpointError unless the checkpoint has every tensor of ``state``, and no other.

    Equal shapes, whatever the layouts; with ``grown`` tables may have more rows than were saved.
    """
    missing, extra = (
        sorted(state.keys() - checkpoint.tensors),
        sorted(checkpoint.tensors.keys() - state),
    )
    if missing or extra:
        told = [f"it lacks {_some(missing)}"] if missing else []
        told += [f"it has {_some(extra)}, which this run has not"] if extra else []
        raise CheckpointError(
            f"{checkpoint.path}: does not fit this run: {'; '.join(told)}; use the model, the "
            "fields and the optimizers that it was trained with"
        )
    for name, tensor in state.items():
        _check_shape(checkpoint, checkpoint.tensors[name], tensor, grown=grown)


def _check_shape(
    checkpoint: Checkpoint, saved: SavedTensor, tensor: LogicalTensor, *, grown: bool
) -> None:
    name, shape = tensor.name, tensor.shape
    if tensor.by_key:  # has as many rows as were saved
        shape = (*saved.shape[:1], *shape[1:])
    if saved.column_starts != tensor.column_starts:
        raise CheckpointError(
            f"{checkpoint.path}: {name}: was kept per row and column shard "
            f"({_shards(saved.column_starts)}; this run: {_shards(tensor.column_starts)}), which "
            "means something under the same column shards only; use the layout and row_state of "
            "then, or train with row_state: logical"
        )
    if saved.shape == shape:
        return
    more = saved.shape[1:] == shape[1:] and saved.shape[:1] < shape[:1]
    if not (grown and more and name.startswith(TABLES)):
        why = "use the model that it was trained with"
        if name.startswith(TABLES) and more:
            why = (
                "a table may have more rows only where the set's vocabulary has grown from that of "
                "the set it was trained on (sbpflow prepare --like OLD --grow)"
            )
        raise CheckpointError(
            f"{checkpoint.path}: {name}: saved as {list(saved.shape)}, this run has {list(shape)}; "
            f"{why}"
        )


def restore(checkpoint: Checkpoint, state: Mapping[str, LogicalTensor]) -> None:
    """Fill this rank's rectangles of ``state``, which ``check_fits``; no other rank takes part.

    CheckpointError at a damaged block; some of the state is of the checkpoint then.
    """
    with torch.no_grad():
        found: dict[KeyedStore, slice] = {}
        for name, tensor in state.items():
            saved = checkpoint.tensors[name].whole
            for one in tensor.rectangles:
                if tensor.keyed is None:
                    _fill(checkpoint, name, saved, one)
                elif not isinstance(one.values, StoredRows):
                    raise TypeError(f"{name}: rows by key are not in a tensor")
                elif one.values.key == KEYS:  # they come first
                    rows = found[tensor.keyed] = _rows_in(checkpoint, name, tensor.keyed.span)
                    tensor.keyed.load(checkpoint.tensor(name, rows))
                else:
                    rows = found[tensor.keyed]
                    place = replace(saved, row_start=rows.start, row_stop=rows.stop)
                    _write(
                        checkpoint,
                        name,
                        place,
                        replace(one.values, store=tensor.keyed, start=0, stop=place.num_rows),
                    )


def _rows_in(checkpoint: Checkpoint, keys: str, span: tuple[int, int]) -> slice:
    """Which of the saved rows have addresses from the first to the last of ``span``."""

    def address(row: int) -> int:
        return int(NUMBERINGS[True].addresses(checkpoint.tensor(keys, slice(row, row + 1))))

    rows = range(checkpoint.tensors[keys].whole.num_rows)
    start = bisect_left(rows, span[0], key=address)
    return slice(start, bisect_right(rows, span[1], lo=start, key=address))


def _fill(checkpoint: Checkpoint, name: str, saved: Place, one: Rectangle) -> None:
    place = Place(
        row_start=one.row_start,
        row_stop=min(one.row_stop, saved.row_stop),
        col_start=one.col_start,
        col_stop=one.col_stop,
    )
    if place.num_elements <= 0 or place.num_rows <= 0:
        return
    values = one.values if one.values.ndim == 0 else one.values[: place.num_rows]
    if isinstance(values, StoredRows):
        _write(checkpoint, name, place, values)
        return
    if values.is_contiguous():
        checkpoint.read_into(name, place, values)
        return
    read = torch.empty(values.shape, dtype=values.dtype)
    checkpoint.read_into(name, place, read)
    values.copy_(read)


def _write(checkpoint: Checkpoint, name: str, place: Place, values: StoredRows) -> None:
    """Rows of a block at a time."""
    row_bytes = max(1, values[:1].numel() * values.itemsize)
    start = place.row_start
    for part in values.split(max(1, BLOCK_BYTES // row_bytes)):
        read = torch.empty(part.shape, dtype=part.dtype)
        stop = start + part.shape[0]
        checkpoint.read_into(name, replace(place, row_start=start, row_stop=stop), read)
        part.write(read)
        start = stop


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shards(starts: tuple[int, ...] | None) -> str:
    return "one number per row" if starts is None else f"shards from columns {list(starts)}"

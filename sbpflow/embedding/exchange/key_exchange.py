"""Converts the keys of a batch to row numbers, before the groups exchange ids.

Every rank counts its unique keys and sends them to the ranks that own the buckets of the keys. The
owners choose the rows and return their numbers. The host waits for these transfers, but they can
run several batches ahead of the step.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.exchange.all_to_all import RowTransfer, received
from sbpflow.embedding.ids.batch_ids import BatchIds, Lists
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import ExchangeStep
from sbpflow.embedding.plan.growth import TOTALS, Totals, has_idle_time
from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.storage.live_rows import NO_TIME, Changes
from sbpflow.embedding.vocabulary import requests
from sbpflow.embedding.vocabulary.field_keys import FieldKeys
from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.compute.compiled import Array
from sbpflow.runtime.compute.devices import upload
from sbpflow.runtime.ranks.host_threads import host_threads

KEYS = "keys"
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The inputs of the decisions for a batch, other than its keys."""

    batch_size: int
    training: bool
    begins_step: bool
    time: int


class KeyExchange:
    """Converts the keys of the growing fields of a plan to rows. Every rank must make the same
    calls.
    """

    def __init__(self, plan: EmbeddingPlan, boxing: Boxing, shards: Sequence[Shard]) -> None:
        self._plan, self._boxing, self._world = plan, boxing, boxing.world
        rank = self._world.rank
        self.fields = [
            FieldKeys(field, rank, [s for s in shards if s.table.name in field.tables])
            for field in plan.vocabularies
        ]
        if (part := next((field.part for field in self.fields if field.part), None)) is not None:
            part.warm_up()  # compiles the loops for all fields
        self._starts = [
            np.array([first for _, first, _ in field.owners]) for field in plan.vocabularies
        ]
        self._owners = [[owner for owner, _, _ in field.owners] for field in plan.vocabularies]
        self._timed = any(has_idle_time(field.growth) for field in plan.vocabularies)
        self._transfer = RowTransfer(self._world, KEYS)
        # Fields are decided in parallel, because nothing is shared between them.
        num_threads = min(host_threads(self._world), len(self.fields))
        self._threads: ThreadPoolExecutor | None = None
        if num_threads > 1:
            self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="keys")

    def rows_of(
        self,
        ids: BatchIds,
        batch_size: int,
        training: bool,
        begins_step: bool,
        event_time: int | None = None,
    ) -> tuple[BatchIds, list[Changes]]:
        """Return the ids with row numbers in place of keys, and the rows that a training batch
        changes.

        ``event_time`` is the latest time of this rank's samples. Raise DataError if ``event_time``
        is needed but not given.
        """
        time = NO_TIME if event_time is None or not self._timed else event_time
        batch = _Batch(batch_size, training, begins_step, time)
        if self._timed and batch.training and batch.time == NO_TIME and ids.num_samples:
            names = [f.plan.name for f in self.fields if has_idle_time(f.plan.growth)]
            raise DataError(
                f"field {names[0]}: evict.idle_time needs an event time, but the batch has none; "
                "pass event_time, or use evict.idle_samples"
            )
        num_samples, num_columns = ids.matrix.shape
        padded = requests.empty_columns(num_columns, num_samples)
        requests.write_columns(ids.matrix.contiguous().numpy(), padded)
        columns = [column[:num_samples] for column in padded]  # keys, later replaced by rows
        lists = ids.lists
        all_keys = [self._keys(columns, lists, index) for index in range(len(self.fields))]
        changes: list[Changes] = []
        if self._world.size > 1:
            all_rows = self._ask(all_keys, batch, changes)
        else:
            all_rows = self._decide(all_keys, [_NONE] * len(all_keys), batch, changes)
        if batch.training and not all(field.plan.is_local for field in self.fields):
            changes = self._gather_changes(changes, batch.batch_size)
        lists = self._replaced(columns, lists, all_rows)
        matrix = torch.empty(num_samples, num_columns, dtype=torch.int64)
        requests.read_columns(padded, matrix.numpy())
        return BatchIds(self._upload(matrix), lists), changes

    def release(self) -> None:
        """Finish the oldest announced batch, whose update is complete."""
        for field in self.fields:
            if field.part is not None:
                field.part.release()

    def cancel(self) -> None:
        """Undo the newest announced batch."""
        for field in self.fields:
            if field.part is not None:
                field.part.roll_back()

    def totals(self) -> Array:
        """Return the ``Totals`` of each field on each rank ([fields, ranks, totals]); every rank
        must call this method.
        """
        all_totals = [Totals() if f.part is None else f.part.totals for f in self.fields]
        own = [[int(getattr(totals, name)) for name in TOTALS] for totals in all_totals]
        return np.array(gather_values(self._boxing, own), np.int64).swapaxes(0, 1)

    def _keys(self, columns: list[Array], lists: Lists | None, index: int) -> Array:
        plan = self.fields[index].plan
        keys = [columns[c] for c in plan.columns if not plan.places]
        if plan.places and lists is not None:
            keys.append(lists.values.numpy()[_positions(lists, plan.places)])
        return np.concatenate(keys) if len(keys) != 1 else keys[0]

    def _replaced(
        self, columns: list[Array], lists: Lists | None, all_rows: list[Array]
    ) -> Lists | None:
        """Replace the keys in ``columns`` with rows; return the lists with rows instead of keys."""
        values = None if lists is None else lists.values.clone()
        for field, rows in zip(self.fields, all_rows, strict=True):
            if field.plan.places and lists is not None and values is not None:
                values.numpy()[_positions(lists, field.plan.places)] = rows
                continue
            parts = rows.reshape(len(field.plan.columns), -1)
            for column, part in zip(field.plan.columns, parts, strict=True):
                if not np.may_share_memory(columns[column], part):
                    columns[column][:] = part
        if lists is None or values is None:
            return None
        weights = None if lists.weights is None else self._upload(lists.weights)
        return Lists(self._upload(lists.lengths), self._upload(values), weights)

    def _decide(
        self,
        all_keys: list[Array],
        all_counts: list[Array],
        batch: _Batch,
        changes: list[Changes],
    ) -> list[Array]:
        """Return the rows of the keys, by field; in training, add the changes of each field."""
        inputs = list(zip(self.fields, all_keys, all_counts, strict=True))
        if self._threads is None:
            decided = [_decide(batch, *field) for field in inputs]
        else:
            started = [self._threads.submit(_decide, batch, *field) for field in inputs]
            wait(started)  # even if a field fails, so that no thread works on during a cancel
            decided = [future.result() for future in started]
        if batch.training:
            changes.extend(changed for _, changed in decided)
        return [rows for rows, _ in decided]

    def _ask(self, all_keys: list[Array], batch: _Batch, changes: list[Changes]) -> list[Array]:
        """Send the unique keys of all fields to their owners; return the rows of the keys, by
        field.
        """
        size = self._world.size
        steps = {step.id: step for step in self._plan.key_steps(batch.batch_size)}
        sent = np.zeros((size, len(all_keys)), np.int64)
        asked: list[Array] = []
        inverses: list[Array] = []
        for index, keys in enumerate(all_keys):
            unique, counts, inverse, sizes = requests.by_owner(keys, self._starts[index])
            sent[self._owners[index], index] = sizes
            asked.append(np.stack([unique, counts], 1))
            inverses.append(inverse)
        counted = np.column_stack([sent, np.full(size, batch.time)]) if self._timed else sent
        width = counted.shape[1]
        got = self._exchange(steps["keys/counts"], counted.reshape(-1), [width] * size)
        got = got.reshape(size, width)
        if self._timed:
            batch = replace(batch, time=int(got[:, -1].max()))
            got = np.ascontiguousarray(got[:, :-1])
        out, into = sent.sum(1).tolist(), got.sum(1).tolist()
        pairs = self._exchange(steps["keys/fwd"], _by_rank(asked, sent), out, into)
        incoming = _by_field(pairs, got)
        keys, counts = ([pairs[:, n].copy() for pairs in incoming] for n in range(2))
        rows = self._decide(keys, counts, batch, changes)
        answers = self._exchange(steps["keys/rows"], _by_rank(rows, got), into, out)
        answered = _by_field(answers, sent)
        return [rows[inverse] for rows, inverse in zip(answered, inverses, strict=True)]

    def _gather_changes(self, changes: list[Changes], batch_size: int) -> list[Changes]:
        """Gather the changes of all ranks on every rank."""
        size, count = self._world.size, 2 * len(changes)
        steps = {step.id: step for step in self._plan.key_steps(batch_size)}
        blocks: list[Array] = []
        for change in changes:
            blocks.append(np.stack([change.rows, change.addresses], 1))
            blocks.append(np.stack([change.freed, np.zeros_like(change.freed)], 1))
        own = np.array([block.shape[0] for block in blocks], np.int64)
        sizes = self._exchange(steps["keys/changed"], np.tile(own, size), [count] * size)
        sizes = sizes.reshape(size, count)
        send, step = _tensor(np.concatenate(blocks)), steps["keys/new"]
        into = sizes.sum(1).tolist()
        pending = self._transfer.start_for_all(step, self._upload(send), into)
        joined = _by_field(received(step, pending, sum(into)).cpu().numpy(), sizes)
        return [
            Changes(new[:, 0], new[:, 1], freed[:, 0])
            for new, freed in zip(joined[::2], joined[1::2], strict=True)
        ]

    def _exchange(
        self, step: ExchangeStep, send: Array, out: list[int], into: list[int] | None = None
    ) -> Array:
        into = out if into is None else into
        pending = self._transfer.start(step, self._upload(_tensor(send)), out, into)
        return received(step, pending, sum(into)).cpu().numpy()

    def _upload(self, values: Tensor) -> Tensor:
        return upload(values, self._world.device)


def _decide(batch: _Batch, field: FieldKeys, keys: Array, counts: Array) -> tuple[Array, Changes]:
    nothing = Changes(_NONE, _NONE, _NONE)
    if field.part is None:
        return _NONE, nothing
    if not batch.training:
        return field.part.peek(keys), nothing
    try:
        return field.part.announce(
            keys,
            counts,
            batch.batch_size,
            begins_step=batch.begins_step,
            time=batch.time,
            out=keys,
        )
    except ConfigError as error:  # the map is full
        raise ConfigError(f"model.fields.{field.plan.name}.{error}") from error


def _tensor(values: Array) -> Tensor:
    # An empty numpy array can have strides that torch does not consider contiguous.
    return torch.from_numpy(values) if values.size else torch.empty(values.shape, dtype=torch.int64)


def _by_rank(by_field: list[Array], sizes: Array) -> Array:
    """Join rows that are ordered by field and then by rank, in the order of ranks and then fields.

    ``sizes`` [ranks, fields] contains the numbers of rows.
    """
    ends = np.cumsum(sizes, 0)[:-1]
    parts = [np.split(rows, ends[:, field]) for field, rows in enumerate(by_field)]
    return np.concatenate([part for of_rank in zip(*parts, strict=True) for part in of_rank])


def _by_field(rows: Array, sizes: Array) -> list[Array]:
    """Invert ``_by_rank``."""
    parts = np.split(rows, np.cumsum(sizes.reshape(-1))[:-1])
    return [np.concatenate(parts[field :: sizes.shape[1]]) for field in range(sizes.shape[1])]


def _positions(lists: Lists, places: tuple[int, ...]) -> Array:
    """Return the positions of the ids of the lists at ``places``."""
    return np.flatnonzero(np.isin(lists.places().numpy(), places))

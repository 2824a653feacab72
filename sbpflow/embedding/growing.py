"""Assigns rows to the keys of growing tables, and initializes the rows of new keys."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.exchange.key_exchange import KeyExchange
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.growth import TOTALS, GrowthCounts
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.storage.base import notify
from sbpflow.embedding.storage.initial import RowInitializer
from sbpflow.embedding.storage.live_rows import Changes
from sbpflow.embedding.storage.store import RowStore
from sbpflow.runtime.compute.devices import upload


class Growing(KeyExchange):
    """The growing fields of a plan on one rank, with the rows that this rank stores."""

    def __init__(self, plan: EmbeddingPlan, boxing: Boxing) -> None:
        stacks = [stack for group in plan.groups for stack in group.stacks if stack.grows]
        shards = [shard for stack in stacks for shard in stack.shards(boxing.world.rank)]
        super().__init__(plan, boxing, shards)
        self._num_read = 0  # number of batches looked up since the last update
        # The initial values of each stack, by its first table; ``StoreMaker`` adds them.
        self.initial: dict[str, RowInitializer] = {}
        by_table = {name: field.live for field in self.fields for name in field.plan.tables}
        self.live = {name: live for name, live in by_table.items() if live is not None}

    def begin(
        self, changes: Sequence[Changes], stores: Sequence[tuple[TableBatch, RowStore]]
    ) -> None:
        """Apply the row changes of a training batch, right before it is looked up.

        Rows that are assigned to new keys are reset to initial values. No batch with a pending
        update uses the former values of these rows, because a key that a step uses keeps its row
        until the step ends.
        """
        self._num_read += 1
        by_table: dict[str, tuple[Tensor, Tensor]] = {}
        for field, change in zip(self.fields, changes, strict=True):
            if field.live is not None:
                by_table |= dict.fromkeys(field.plan.tables, field.live.apply(change))
        for stack, store in stores:
            if stack.grows:
                self._write(stack, store, by_table)

    def _write(
        self, stack: TableBatch, store: RowStore, new: dict[str, tuple[Tensor, Tensor]]
    ) -> None:
        shards = stack.shards(self._world.rank)
        rows: list[Tensor] = []
        addresses: list[Tensor] = []
        for shard in shards:
            table_rows, keys = new[shard.table.name]
            # Some of these rows may be in another table's shards, but not in this shard.
            mine = (table_rows >= shard.row_start) & (table_rows < shard.row_stop)
            rows.append(table_rows[mine] + shard.shift)
            addresses.append(keys[mine])
        joined = torch.cat([torch.empty(0, dtype=torch.int64), *rows])
        if not joined.numel():
            return
        device = self._world.device
        notify(store.kernel.listeners, upload(joined, device))
        if store.is_in_place:
            # The values are computed on the device, because new rows would be a large copy.
            joined = upload(joined, device)
        keys = upload(torch.cat(addresses), joined.device)
        store.write(joined, self.initial[stack.tables[0].name](joined, keys))

    @property
    def is_in_step(self) -> bool:
        """Return True from the lookup of a training batch until its update, while some rows already
        belong to the new keys of the batch.
        """
        return self._num_read > 0

    def end_step(self) -> None:
        """Release all batches that have been looked up; call this method after their update."""
        for _ in range(self._num_read):
            self.release()
        self._num_read = 0

    def numbers_of(self, shards: Sequence[Shard]) -> Callable[[Tensor], Tensor]:
        """Return a function that maps ascending row numbers of a store to the addresses of the
        rows' keys.
        """
        bases = torch.tensor([shard.base for shard in shards], dtype=torch.int64)
        live = [self.live[shard.table.name] for shard in shards]

        def addresses_of(rows: Tensor) -> Tensor:
            # The keys are in host memory, so with a GPU, the host waits for the rows.
            device, rows = rows.device, rows.cpu()
            ends = [*torch.searchsorted(rows, bases).tolist(), rows.numel()]
            parts = [
                torch.from_numpy(keys.addresses)[
                    # padding is the number after the last row, whose noise is not used
                    (rows[start:stop] - shard.shift - keys.start).clamp(max=keys.addresses.size - 1)
                ]
                for shard, keys, (start, stop) in zip(shards, live, pairwise(ends), strict=True)
            ]
            return upload(torch.cat([torch.empty(0, dtype=torch.int64), *parts]), device)

        return addresses_of

    def counts(self) -> dict[str, GrowthCounts]:
        """Return the counts of all fields over all ranks; every rank must call this method."""
        totals = self.totals()
        return {
            field.plan.name: GrowthCounts(
                max_rows=field.plan.num_rows,
                rows_per_rank=tuple(int(n) for n in totals[index, :, 0]),
                **dict(zip(TOTALS, totals[index].sum(0).tolist(), strict=True)),
            )
            for index, field in enumerate(self.fields)
        }

"""An embedding collection: the tables of a model on one rank, run as an EmbeddingPlan says.

A batch passes in moves (``start_id_exchange``, ``exchange_ids``, ``receive_ids``, ``lookup``,
``gather_outputs``, ``send_grads``, ``receive_grads``, ``update``), so that a schedule can put other
work between them; ``forward`` and ``apply_gradients`` make them one after the other. The first
three depend on ids alone and may run any number of batches ahead of the others. Outputs come laid
out S(0) over the batch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.assembly import Assembly
from sbpflow.embedding.exchange.base import AnyGroup, Given, GroupInFlight, Received, make_group
from sbpflow.embedding.exchange.counts import CountsUnderWay
from sbpflow.embedding.exchange.id_transfer import IdTransfer
from sbpflow.embedding.exchange.overflow import PaddedGroups
from sbpflow.embedding.ids.ahead import IdStream
from sbpflow.embedding.ids.batch_ids import Ids
from sbpflow.embedding.ids.list_loops import warm_up_loops
from sbpflow.embedding.ids.reader import IdCheck, IdReader
from sbpflow.embedding.in_flight import EmbeddingsInFlight
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.plan.tables import KernelRequest, Shard
from sbpflow.embedding.rules.base import SumOverColumns
from sbpflow.embedding.state import LogicalTensor, StoredShard, Values, logical_state
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.choose import (
    KernelChoice,
    choose_kernels,
    make_kernel,
    warm_up_kernels,
)
from sbpflow.embedding.storage.initial import fill_shard, initial_rows
from sbpflow.embedding.storage.keyed import KeyedStore
from sbpflow.embedding.storage.rounding import RowNoise
from sbpflow.embedding.storage.store import (
    DeviceStore,
    RowStore,
    StoreFactory,
    StoreRequest,
    device_store,
)
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.errors import ConfigError, DataError, SbpError
from sbpflow.sbp.sbp import balanced_sizes


@dataclass(frozen=True, slots=True)
class Copies:
    """Tensors that must be equal, bit by bit, within each of several sets of ranks.

    ``tensors`` are this rank's; empty on a rank that is in none of the sets.
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]
    tensors: list[Values]


class EmbeddingCollection:
    """The embedding tables of a model, from this rank's point of view."""

    def __init__(
        self,
        plan: EmbeddingPlan,
        boxing: Boxing,
        *,
        seed: int,
        kernel: KernelRequest | Mapping[str, KernelChoice] = "auto",
        row_buffer_fraction: float | None = None,
        stores: StoreFactory = device_store,
    ) -> None:
        """``kernel`` is a request, or the choice per table that another plan has made. With
        ``row_buffer_fraction``, on CUDA, rows of training batches travel in buffers of a fixed
        size: this share of what the largest can be. ``stores`` makes the row store of each stack.
        """
        world = boxing.world
        self.plan = plan
        self._world = world
        self._seed = seed
        self._make_row_store = stores
        self._num_begun = 0  # training batches
        self.kernels = choose_kernels(plan, kernel) if isinstance(kernel, str) else dict(kernel)
        warm_up_kernels(plan, self.kernels)
        warm_up_loops(plan, world.device)
        received = Received(
            {column: n for n, column in enumerate(plan.needed[world.rank])},
            {place: n for n, place in enumerate(plan.needed_lists[world.rank])},
        )
        self._groups: list[AnyGroup] = [
            make_group(group, boxing, Given(self._make_store, received, row_buffer_fraction))
            for group in plan.groups
        ]
        self._num_rounds = max((group.num_rounds for group in plan.groups), default=1)
        self._padded = PaddedGroups(self._groups)
        self._stream = IdStream(world.device)
        self._reader = IdReader(plan, world.rank, world.device)
        self._transfer = IdTransfer(plan, boxing)
        self._last: EmbeddingsInFlight | None = None
        self._flagged: list[IdCheck] = []  # of batches looked up since the last update
        self._assembly = {out.name: Assembly(plan, out, world.device) for out in plan.outputs}
        for stored in self.stored():
            fill_shard(stored, seed=seed)
        self._lr_factor = 1.0

    def scale_lr(self, factor: float) -> None:
        """Batches looked up from now on have each optimizer's learning rate times ``factor``."""
        self._lr_factor = factor

    def start_id_exchange(self, ids: Ids, batch_size: int, *, training: bool) -> EmbeddingsInFlight:
        """Check a batch's ids and start what moves them; ``batch_size`` counts the whole batch.

        ``ids`` as ``IdReader.read`` takes them, of this rank's samples. Raises DataError; for an id
        out of range of a training batch ``lookup`` does, or on CUDA the next ``update``, before
        it changes anything.
        """
        check = IdCheck() if training else None
        with self._stream.section(ids):
            local = self._reader.read(ids, check)
            wanted = balanced_sizes(batch_size, self._world.size)[self._world.rank]
            if local.num_samples != wanted:
                raise DataError(
                    f"rank {self._world.rank} passed ids of {local.num_samples} samples; its part "
                    f"of a batch of {batch_size} is {wanted}"
                )
            under_way = self._transfer.start_id_exchange(local, batch_size)
            self._num_begun += training
            number = self._num_begun if training else None
            groups = [
                group.start_id_exchange(local, batch_size, number=number) for group in self._groups
            ]
            counts = CountsUnderWay(
                [(under_way, under_way.sizes), *self._told(groups)],
                at_once=self._world.device.type == "cuda",
            )
            batch = EmbeddingsInFlight(under_way, groups, counts, check)
            if counts.are_known:  # on CUDA: ids of fixed sizes, which may be sorted from now on
                self._go_on(batch)
        return batch

    def exchange_ids(self, batch: EmbeddingsInFlight) -> None:
        """Start the transfers that needed the sizes first."""
        if not batch.ids_exchanged:
            with self._stream.section():
                self._go_on(batch)

    def _go_on(self, batch: EmbeddingsInFlight) -> None:
        batch.counts.finish()
        batch.ids.exchange_ids()
        for group, part in zip(self._groups, batch.groups, strict=True):
            group.exchange_ids(part)
        batch.ids_exchanged = True
        if self._stream.exists:
            # It waits for the ids and sorts them; the host and the current stream do not.
            self._take_ids(batch)
            for group, part in zip(self._groups, batch.groups, strict=True):
                if part.training:
                    group.sort_ahead(part)
            batch.most_named = self._padded.ask(batch.groups)

    def _told(
        self, parts: list[GroupInFlight], rounds: int = 1
    ) -> list[tuple[GroupInFlight, Callable[[], Tensor | None]]]:
        """The counts of the groups whose ids travel so often."""
        return [
            (part, partial(group.counts, part))
            for group, part in zip(self._groups, parts, strict=True)
            if group.plan.num_rounds >= rounds
        ]

    def _pass_on(self, batch: EmbeddingsInFlight, number: int) -> None:
        """A round of ids after the first, for which the host waits."""
        later = [
            (group, part)
            for group, part in zip(self._groups, batch.groups, strict=True)
            if group.plan.num_rounds > number
        ]
        for group, part in later:
            part.round = number
            group.next_round(part)
        CountsUnderWay(self._told(batch.groups, number + 1), at_once=False).finish()
        for group, part in later:
            group.exchange_ids(part)

    def _take_ids(self, batch: EmbeddingsInFlight) -> None:
        for number in range(1, self._num_rounds):
            self._pass_on(batch, number)
        everywhere = batch.ids.finish()
        for group, part in zip(self._groups, batch.groups, strict=True):
            part.everywhere = everywhere
            group.receive_ids(part)

    def receive_ids(self, batch: EmbeddingsInFlight) -> None:
        """Wait for the ids. Which rows the batch looks up here is final afterwards."""
        self.exchange_ids(batch)
        if batch.received:
            return
        if late := batch.most_named:
            batch.most_named = None
            if over := self._padded.overflowing(batch.groups, late):
                with self._stream.section():
                    self._padded.send_again(batch.groups, over)
        if not self._stream.exists:
            self._take_ids(batch)
        batch.received = True
        for group, part in zip(self._groups, batch.groups, strict=True):
            group.announce(part)

    def cancel(self, batch: EmbeddingsInFlight) -> None:
        """Forget a batch that was begun and will not be looked up; every rank calls it."""
        self.receive_ids(batch)
        for group, part in zip(self._groups, batch.groups, strict=True):
            group.cancel(part)

    def lookup(self, batch: EmbeddingsInFlight) -> None:
        """Read the rows, and start the vectors on their way. Raises DataError for an id out of
        range.
        """
        self.arrive(batch)
        self.read(batch)

    def arrive(self, batch: EmbeddingsInFlight) -> None:
        """The first half of ``lookup``: the batch's turn has come."""
        self.receive_ids(batch)
        self._stream.join()
        if batch.check is not None:
            self._reader.account(batch.check)
            self._flagged.append(batch.check)

    def read(self, batch: EmbeddingsInFlight) -> None:
        """The second half: read the rows, and send them."""
        for group, part in zip(self._groups, batch.groups, strict=True):
            part.lr_factor = self._lr_factor
            group.lookup(part)

    def gather_outputs(self, batch: EmbeddingsInFlight) -> dict[str, Tensor]:
        """{output: [local batch, width]}; of a training batch they are leaves that require a
        gradient.
        """
        groups = batch.groups
        parts = [g.gather_outputs(part) for g, part in zip(self._groups, groups, strict=True)]
        training = any(part.training for part in groups)
        batch.outputs = {
            name: assembly.join(parts).requires_grad_(training)
            for name, assembly in self._assembly.items()
        }
        return batch.outputs

    def send_grads(self, batch: EmbeddingsInFlight) -> None:
        """Start the gradients of ``gather_outputs`` on their way to the rows."""
        for index, (group, part) in enumerate(zip(self._groups, batch.groups, strict=True)):
            name = group.plan.output.name
            grad = batch.outputs[name].grad
            if grad is None:
                raise RuntimeError(f"output {name} has no gradient; call backward() first")
            group.send_grads(part, self._assembly[name].gradient_of(index, grad))
        batch.outputs = {}

    def receive_grads(self, batch: EmbeddingsInFlight) -> None:
        """Wait for the gradients and keep them."""
        for group, part in zip(self._groups, batch.groups, strict=True):
            group.receive_grads(part)

    def update(self, step: int) -> None:
        """One optimizer step on all that was collected; ``step`` is the job's, counted from 1.

        A row that several collected batches touch takes one step, from the sum. Raises SbpError
        for a step below 1.
        """
        if step < 1:
            raise SbpError(f"update: step {step}; steps count from 1, over the whole job")
        self.check_late()
        self.apply(step)

    def check_late(self) -> None:
        """DataError for ids out of range in batches looked up since the last call, on CUDA."""
        flagged, self._flagged = self._flagged, []
        for check in flagged:
            self._reader.raise_flagged(check)

    def apply(self, step: int) -> None:
        """``update`` without its checks: only ops for the device."""
        for group in self._groups:
            group.update(step)

    def describe_buffers(self) -> list[str]:
        """What is in buffers of a fixed size, a line for each group."""
        return self._padded.describe()

    def why_not_captured(self) -> str:
        """What keeps the moves from ``read`` to ``apply`` out of a CUDA graph; "" if nothing."""
        if self._world.size > 1:
            return "vectors and gradients travel between ranks"
        for stack, store in self._stores():
            table = stack.tables[0].name
            if stack.ragged:
                return f"table {table} has lists of ids, of another number in each batch"
            if not isinstance(store, DeviceStore):
                return f"table {table}: not all of its rows are on the device"
            if not isinstance(store.kernel, TorchStorage):
                name = store.kernel.name
                return f"table {table}: kernel {name} has its learning rate on the host"
        return ""

    def keep_numbers(self) -> None:
        """From now on updates take their learning rate and step from memory of the device."""
        for kernel in self._kept():
            kernel.keep_numbers()

    def write_numbers(self, step: int) -> None:
        """Before a replay of a graph that holds ``apply``: those of this step."""
        for (stack, _), kernel in zip(self._stores(), self._kept(), strict=True):
            kernel.write_numbers(stack.optimizer.lr * self._lr_factor, step)

    @property
    def is_watched(self) -> bool:
        """Whether someone wants to be told of rows before they change: a graph tells nobody."""
        return any(store.listeners for _, store in self._stores())

    def gradient_squares(self) -> Tensor:
        """0-d float64: squares of all that was collected, each row's gradients summed first.

        Added up over all ranks it counts every row once, in any layout.
        """
        return torch.stack([group.gradient_squares() for group in self._groups]).sum()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply what was collected by ``factor``, 0-d, before ``update``."""
        for group in self._groups:
            group.scale_gradients(factor)

    def forward(self, ids: Ids, batch_size: int, *, training: bool) -> dict[str, Tensor]:
        """Look a batch up, all moves at once: ids of this rank's samples -> ``gather_outputs``.

        Raises SbpError if the gradients of the training batch before were not applied.
        """
        if training and self._last is not None:
            raise SbpError(
                "forward: the gradients of the training batch before would be lost; call "
                "apply_gradients(step) before the next one, or training=False for a batch without "
                "update; to accumulate, make each batch's moves start_id_exchange, lookup, "
                "gather_outputs, send_grads and receive_grads, then update(step) once"
            )
        batch = self.start_id_exchange(ids, batch_size, training=training)
        self.lookup(batch)
        outputs = self.gather_outputs(batch)
        self._last = batch if training else self._last
        return outputs

    def apply_gradients(self, step: int) -> None:
        """Update the rows the last training ``forward`` touched, from its outputs' ``.grad``.

        ``step`` as ``update`` takes it.
        """
        batch, self._last = self._last, None
        if batch is None:
            raise RuntimeError("apply_gradients without a training forward")
        self.send_grads(batch)
        self.receive_grads(batch)
        self.update(step)

    @property
    def out_of_range(self) -> Tensor:
        """[features] int64: ids that the policy clamp or hash replaced on this rank, in the batches
        looked up so far.
        """
        self._stream.join()
        return self._reader.out_of_range

    def stored(self) -> Iterator[StoredShard]:
        """Every shard this rank holds."""
        for store, shards in self.stores():
            yield from (StoredShard(shard, store) for shard in shards)

    def stores(self) -> list[tuple[RowStore, tuple[Shard, ...]]]:
        """Every store of this rank, and the shards that are its rows, from their ``base`` on."""
        return [(store, stack.shards(self._world.rank)) for stack, store in self._stores()]

    def state(self) -> dict[str, LogicalTensor]:
        """Rows and optimizer state by logical name; the same names on all ranks.

        ``tables/T`` and ``tables/T/STATE``.
        """
        return logical_state(self.plan, list(self.stored()))

    def copies(self) -> list[Copies]:
        """What several ranks hold alike, in one order on all ranks.

        B tables with their state, and the state of rows whose columns are spread over ranks.
        """
        mine = {stored.shard.table.name: stored for stored in self.stored()}
        found: list[Copies] = []
        for group in self.plan.groups:
            for index, stack in enumerate(group.stacks):
                ranks = group.copy_ranks(index)
                for table in stack.tables if ranks else ():
                    stored = mine.get(table.name)
                    name = f"{table.name} (optimizer state)"
                    tensors = stored.values() if stored else {}
                    kept = {k for k, size in stack.optimizer.state.items() if size == "row"}
                    if group.kind.copies:
                        name, kept = table.name, tensors.keys()
                    alike = [tensor for key, tensor in tensors.items() if key in kept]
                    found.append(Copies(name, ranks, alike))
        return found

    def memory_bytes(self) -> int:
        """Bytes of rows and optimizer state on this rank."""
        return sum(store.memory_bytes for _, store in self._stores())

    def _kept(self) -> list[TorchStorage]:
        """The kernels, where all are such that can keep numbers."""
        kernels = [store.kernel for _, store in self._stores()]
        return [one for one in kernels if isinstance(one, TorchStorage)]

    def _stores(self) -> Iterator[tuple[TableBatch, RowStore]]:
        for group in self._groups:
            yield from group.stores()

    def _make_store(
        self, group: GroupPlan, index: int, sum_over_columns: SumOverColumns | None
    ) -> RowStore:
        stack, rank = group.stacks[index], self._world.rank
        noise: RowNoise | None = None
        if self.plan.row_dtype != self.plan.dtype:
            noise = RowNoise(stack.shards(rank), self._seed, self._world.device)
        rows, width = stack.num_rows(rank), stack.width(rank) if stack.uses_on(rank) else stack.dim

        def kernel_of(slots: int) -> RowKernel:
            return make_kernel(
                self.kernels[stack.tables[0].name],
                rows,
                width,
                dim=stack.dim,
                optimizer=stack.optimizer,
                dtype=self.plan.dtype,
                row_dtype=self.plan.row_dtype,
                device=self._world.device,
                sum_over_columns=sum_over_columns,
                noise=noise,
                slots=slots,
            )

        store = self._make_row_store(
            StoreRequest(
                shards=stack.shards(rank),
                num_rows=rows,
                width=width,
                optimizer=stack.optimizer,
                make_kernel=kernel_of,
                initial=partial(
                    initial_rows,
                    shards=stack.shards(rank),
                    seed=self._seed,
                    optimizer=stack.optimizer,
                    width=width,
                    dtype=self.plan.dtype,
                    row_dtype=self.plan.row_dtype,
                ),
            )
        )
        if any(shard.table.by_key != isinstance(store, KeyedStore) for shard in stack.shards(rank)):
            raise ConfigError(
                f"table {stack.tables[0].name}: {type(store).__name__} is not a store for a table "
                f"with by_key={stack.tables[0].by_key}; make a KeyedStore for by_key=True alone, "
                "in the function given as stores"
            )
        is_copied = group.kind.copies and self._world.size > 1
        if is_copied and not isinstance(store, DeviceStore):
            raise ConfigError(
                f"table {stack.tables[0].name}: {type(store).__name__} cannot hold a table laid "
                "out B on several ranks, which update rows that they did not look up; use the "
                "device store, or another layout, for example S(0)"
            )
        return store

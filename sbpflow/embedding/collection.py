"""Defines an embedding collection: the embedding tables of a model on one rank.

A batch is processed in moves (``start_id_exchange``, ``exchange_ids``, ``receive_ids``, ``lookup``,
``gather_outputs``, ``send_grads``, ``receive_grads``, ``update``), so that a schedule can run other
work between them. ``forward`` and ``apply_gradients`` run all moves in sequence. The first three
moves depend only on ids, so they can run any number of batches ahead. The outputs have layout S(0):
they are split over the batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.assembly import Assembly
from sbpflow.embedding.cache.mover import CacheCounts
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.captured import why_not_captured
from sbpflow.embedding.copies import Copies, copies_of
from sbpflow.embedding.exchange.base import (
    AnyGroup,
    ExchangeOptions,
    GroupContext,
    GroupInFlight,
    make_group,
)
from sbpflow.embedding.exchange.counts import CountsUnderWay
from sbpflow.embedding.exchange.id_transfer import IdsUnderWay, IdTransfer
from sbpflow.embedding.exchange.overflow import PaddedGroups
from sbpflow.embedding.ids.ahead import IdStream
from sbpflow.embedding.ids.batch_ids import Ids
from sbpflow.embedding.ids.list_loops import warm_up_loops
from sbpflow.embedding.ids.reader import IdCheck, IdReader
from sbpflow.embedding.in_flight import EmbeddingsInFlight
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.growth import GrowthCounts
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.rules.kernels import KernelRequest
from sbpflow.embedding.state import LogicalTensor, StoredShard, logical_state
from sbpflow.embedding.storage.choose import KernelChoice, choose_kernels, warm_up_kernels
from sbpflow.embedding.storage.initial import fill_shard
from sbpflow.embedding.storage.live_rows import Changes, check_numba
from sbpflow.embedding.storage.store import RowStore, StoreFactory, device_store
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.embedding.store_maker import StoreMaker
from sbpflow.errors import DataError, SbpError
from sbpflow.sbp.sbp import balanced_sizes

if TYPE_CHECKING:
    from sbpflow.embedding.growing import Growing


class EmbeddingCollection:
    """This rank's part of a model's embedding tables."""

    def __init__(
        self,
        plan: EmbeddingPlan,
        boxing: Boxing,
        *,
        seed: int,
        kernel: KernelRequest | Mapping[str, KernelChoice] = "auto",
        stores: StoreFactory = device_store,
        initialize: bool = True,
        compiled: bool = True,
        options: ExchangeOptions | None = None,
    ) -> None:
        """Allocate the stores and, with ``initialize``, fill them with initial values.

        ``kernel`` is the requested kernel or, if the kernels have already been chosen, a mapping
        from table to kernel. ``stores`` creates the row store of each stack. If ``compiled`` is
        false, ids are read without numba, which takes 0.5 s to load.
        """
        self.plan, self._world = plan, (world := boxing.world)
        self._num_begun = 0  # number of training batches so far
        self.kernels = choose_kernels(plan, kernel) if isinstance(kernel, str) else dict(kernel)
        warm_up_kernels(plan, self.kernels)
        ids_device = torch.device("cpu") if plan.ids_on_host else world.device
        warm_up_loops(plan, ids_device, compiled=compiled)
        self.growing: Growing | None = None
        if plan.vocabularies:
            check_numba(plan.vocabularies[0].name)
            growing = import_module("sbpflow.embedding.growing")  # needs numba
            self.growing = growing.Growing(plan, boxing)
        context = GroupContext(
            StoreMaker(plan, self.kernels, seed, world, self.growing, stores),
            {column: n for n, column in enumerate(plan.needed[world.rank])},
            {place: n for n, place in enumerate(plan.needed_lists[world.rank])},
            compiled,
            options or ExchangeOptions(),
        )
        self._groups: list[AnyGroup] = [make_group(group, boxing, context) for group in plan.groups]
        self._num_rounds = max((group.num_rounds for group in plan.groups), default=1)
        self._padded = PaddedGroups(self._groups)
        self._stream = IdStream(world.device)
        self._reader = IdReader(plan, world.rank, ids_device, compiled=compiled)
        self._transfer = IdTransfer(plan, boxing)
        self._last: EmbeddingsInFlight | None = None
        self._flagged: list[IdCheck] = []  # checks of batches looked up since the last update
        self._assembly = {out.name: Assembly(plan, out, world.device) for out in plan.outputs}
        for stored in self.stored() if initialize else ():
            fill_shard(stored, seed=seed)
        self._lr_factor = 1.0

    def scale_lr(self, factor: float) -> None:
        """Set the factor of the learning rates for batches that are looked up from now on."""
        self._lr_factor = factor

    def start_id_exchange(
        self, ids: Ids, batch_size: int, *, training: bool, begins_step: bool = True,
        event_time: int | None = None,
    ) -> EmbeddingsInFlight:  # fmt: skip
        """Check the ids of this rank's samples and start their exchange.

        ``ids`` may have any form that ``IdReader.read`` accepts; ``batch_size`` is global. With
        growing tables, ids must be in host memory, otherwise on the device of the tables. Raise
        DataError for malformed ids. With the policy ``error``, out-of-range ids of a training batch
        raise DataError later, before an update: in ``lookup`` or, for a matrix on CUDA, in the next
        ``update``. For growing tables, ``begins_step`` is False for a batch accumulated with the
        previous one (keys in either batch keep their rows), and ``event_time`` is the latest time
        of this rank's samples.
        """
        check = IdCheck() if training else None
        with self._stream.section(ids):
            local = self._reader.read(ids, check)
            share = balanced_sizes(batch_size, self._world.size)[self._world.rank]
            if local.num_samples != share:
                raise DataError(
                    f"rank {self._world.rank}: got the ids of {local.num_samples} samples; pass "
                    f"{share} samples, this rank's share of a batch of {batch_size}"
                )
            changes: Sequence[Changes] = ()
            if (grows := self.growing) is not None:
                local, changes = grows.rows_of(local, batch_size, training, begins_step, event_time)
            transfer = IdsUnderWay(self._transfer, local, batch_size)
            self._num_begun += training
            number = self._num_begun if training else None
            parts = [
                group.start_id_exchange(local, batch_size, number=number) for group in self._groups
            ]
            counts = CountsUnderWay(
                [(transfer, transfer.sizes), *self._counts(parts)],
                at_once=self._world.device.type == "cuda",
            )
            batch = EmbeddingsInFlight(transfer, parts, counts, check, changes)
            if counts.are_known:  # all sizes are fixed, so there is nothing to wait for
                self._exchange_ids(batch)
        return batch

    def exchange_ids(self, batch: EmbeddingsInFlight) -> None:
        """Start the transfers whose sizes had to be exchanged first."""
        if not batch.ids_exchanged:
            with self._stream.section():
                self._exchange_ids(batch)

    def _exchange_ids(self, batch: EmbeddingsInFlight) -> None:
        # In every move, all groups start their transfers before any group waits, so that the
        # transfers overlap. All ranks must start collectives in the same order.
        batch.counts.finish()
        batch.ids.exchange_ids()
        for group, part in self._parts(batch):
            group.exchange_ids(part)
        batch.ids_exchanged = True
        if self._stream.exists:
            # Only the id stream waits for the ids and sorts them; the host continues.
            self._receive_ids(batch)
            for group, part in self._parts(batch):
                if part.training:
                    group.sort_ahead(part)
            batch.most_requested = self._padded.ask(batch.groups)

    def _parts(self, batch: EmbeddingsInFlight) -> list[tuple[AnyGroup, GroupInFlight]]:
        return list(zip(self._groups, batch.groups, strict=True))

    def _counts(
        self, parts: list[GroupInFlight], rounds: int = 1
    ) -> list[tuple[GroupInFlight, Callable[[], Tensor | None]]]:
        """For each group that has at least ``rounds`` rounds of ids, return the group's part of the
        batch and a function that returns the counts of that part.
        """
        return [
            (part, partial(group.counts, part))
            for group, part in zip(self._groups, parts, strict=True)
            if group.plan.num_rounds >= rounds
        ]

    def _next_round(self, batch: EmbeddingsInFlight, number: int) -> None:
        """Run round ``number`` of the id exchange (not the first round). The host waits for the
        counts of this round.
        """
        parts = [pair for pair in self._parts(batch) if pair[0].plan.num_rounds > number]
        for group, part in parts:
            part.round = number
            group.next_round(part)
        CountsUnderWay(self._counts(batch.groups, number + 1), at_once=False).finish()
        for group, part in parts:
            group.exchange_ids(part)

    def _receive_ids(self, batch: EmbeddingsInFlight) -> None:
        for number in range(1, self._num_rounds):
            self._next_round(batch, number)
        everywhere = batch.ids.finish()
        for group, part in self._parts(batch):
            part.everywhere = everywhere
            group.receive_ids(part)

    def receive_ids(self, batch: EmbeddingsInFlight) -> None:
        """Wait for the ids. After this move, the row numbers looked up on this rank are final."""
        self.exchange_ids(batch)
        if batch.received:
            return
        if read := batch.most_requested:
            batch.most_requested = None
            if overflowing := self._padded.overflowing(batch.groups, read):
                with self._stream.section():
                    self._padded.send_again(batch.groups, overflowing)
        if not self._stream.exists:
            self._receive_ids(batch)
        batch.received = True
        with self._stream.section():
            for group, part in self._parts(batch):
                group.announce(part)

    def cancel(self, batch: EmbeddingsInFlight) -> None:
        """Discard a batch that has not been looked up. Every rank must cancel the same batch, and
        all later batches. With cached tables, call this method only between steps: it raises
        RuntimeError while a batch that was looked up waits for its update.
        """
        self.receive_ids(batch)
        for group, part in self._parts(batch):
            group.cancel(part)
        if self.growing is not None and any(part.training for part in batch.groups):
            self.growing.cancel()

    def mark_early(self, batch: EmbeddingsInFlight) -> None:
        """Find the rows whose values are already final. All earlier batches must have received
        their ids.
        """
        for group, part in self._parts(batch):
            group.mark_early(part)

    def send_early(self, batch: EmbeddingsInFlight) -> None:
        """Start sending the rows that ``mark_early`` found. Between this move and ``lookup``, only
        updates may change rows.
        """
        for group, part in self._parts(batch):
            group.send_early(part)

    def send_late(self, batch: EmbeddingsInFlight) -> None:
        """Start sending the late gradients of the batch before ``batch``."""
        for group in self._groups:
            group.send_late()

    def settle(self) -> None:
        """Apply the late gradients of the last step; every rank must call this method.

        Before ``settle``, the rows still lack the late gradients, so ``stored``, ``stores``, and
        ``state`` raise RuntimeError.
        """
        for group in self._groups:
            group.send_late()
        for group in self._groups:
            group.settle()

    def _check_settled(self) -> None:
        if not all(group.is_settled for group in self._groups):
            raise RuntimeError(
                "rows were read before their late gradients were applied; call settle first"
            )
        if self.growing is not None and self.growing.is_in_step:
            raise RuntimeError(
                "rows of growing tables were read between the lookup of a training batch and its "
                "update; call update or apply_gradients first"
            )

    def lookup(self, batch: EmbeddingsInFlight) -> None:
        """Read the rows and start sending vectors. Raise DataError for an out-of-range id (for a
        matrix on CUDA, ``update`` raises it).
        """
        self.arrive(batch)
        self.read(batch)

    def arrive(self, batch: EmbeddingsInFlight) -> None:
        """Run the first half of ``lookup``: finish the work on ids, and report bad ids."""
        self.receive_ids(batch)
        self._stream.join()
        if batch.check is None:
            self._check_settled()
        else:
            self._reader.account(batch.check)
            self._flagged.append(batch.check)

    def read_ahead(self, batch: EmbeddingsInFlight) -> None:
        """Start reading cached rows for a prediction. No update may run before the ``lookup`` of
        this batch.
        """
        self.arrive(batch)
        for group, part in self._parts(batch):
            for lookup, (_, store) in zip(part.lookups, group.stores(), strict=False):
                if isinstance(store, CachedStore):
                    store.read_ahead(lookup)

    def read(self, batch: EmbeddingsInFlight) -> None:
        """Run the second half of ``lookup``: read the rows and start sending vectors."""
        if self.growing is not None and any(part.training for part in batch.groups):
            self.growing.begin(batch.changes, list(self._stores()))
        for group, part in self._parts(batch):
            part.lr_factor = self._lr_factor
            group.lookup(part)

    def gather_outputs(self, batch: EmbeddingsInFlight) -> dict[str, Tensor]:
        """Return the outputs [local batch, width] by name; in training, these tensors require
        gradients.
        """
        parts = [group.gather_outputs(part) for group, part in self._parts(batch)]
        training = any(part.training for part in batch.groups)
        batch.outputs = {
            name: assembly.join(parts).requires_grad_(training)
            for name, assembly in self._assembly.items()
        }
        return batch.outputs

    def send_grads(self, batch: EmbeddingsInFlight) -> None:
        """Start sending the gradients of the outputs to the ranks that store the rows."""
        for index, (group, part) in enumerate(self._parts(batch)):
            name = group.plan.output.name
            grad = batch.outputs[name].grad
            if grad is None:
                raise RuntimeError(f"output {name} has no gradient; call backward() first")
            group.send_grads(part, self._assembly[name].gradient_of(index, grad))
        batch.outputs = {}

    def receive_grads(self, batch: EmbeddingsInFlight) -> None:
        """Wait for the gradients and collect them for ``update``."""
        for group, part in self._parts(batch):
            group.receive_grads(part)

    def update(self, step: int) -> None:
        """Take one optimizer step with all collected gradients.

        ``step`` is the training step, counted from 1 over the whole job; values below 1 raise
        SbpError. A row touched by several collected batches takes one step with its summed
        gradient.
        """
        if step < 1:
            raise SbpError(
                f"update: step must be 1 or more, because steps are counted from 1, got {step}"
            )
        self.check_late()
        self.apply(step)

    def check_late(self) -> None:
        """Raise DataError for out-of-range ids looked up on CUDA since the last call."""
        flagged, self._flagged = self._flagged, []
        for check in flagged:
            self._reader.raise_flagged(check)

    def apply(self, step: int) -> None:
        """Run ``update`` without its checks, which wait for the device."""
        for group in self._groups:
            group.send_late()
        for group in self._groups:
            group.update(step)
        if self.growing is not None:
            self.growing.end_step()

    def describe_buffers(self) -> list[str]:
        """Describe the groups that use fixed-size buffers, with one line per group."""
        return self._padded.describe()

    def why_not_captured(self) -> str:
        """Return why a CUDA graph cannot contain the moves from ``read`` to ``apply``, or ""."""
        return why_not_captured(self._stores(), self._world.size)

    def keep_numbers(self) -> None:
        """Make updates read the learning rate and step from device memory from now on."""
        for kernel in self._graph_kernels():
            kernel.keep_numbers()

    def write_numbers(self, step: int) -> None:
        """Set the learning rate and step for the next replay of a graph that includes ``apply``."""
        for (stack, _), kernel in zip(self._stores(), self._graph_kernels(), strict=True):
            kernel.write_numbers(stack.optimizer.lr * self._lr_factor, step)

    @property
    def is_watched(self) -> bool:
        """Return True if a before-update hook is installed (CUDA graphs cannot run hooks)."""
        return any(store.kernel.listeners for _, store in self._stores())

    def gradient_squares(self) -> Tensor:
        """Return the squared norm (0-d float64) of the collected gradients, which are first summed
        per row.

        The results of all ranks can be summed: in any layout, every row is counted exactly once.
        """
        return torch.stack([group.gradient_squares() for group in self._groups]).sum()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the collected gradients by ``factor`` (0-d); call this before ``update``."""
        for group in self._groups:
            group.scale_gradients(factor)

    def forward(self, ids: Ids, batch_size: int, *, training: bool) -> dict[str, Tensor]:
        """Run all moves up to ``gather_outputs`` on the ids of this rank's samples; return the
        outputs.

        Raise SbpError if ``apply_gradients`` has not been called since the previous training batch.
        With growing tables, ``training=False`` then raises RuntimeError.
        """
        if training and self._last is not None:
            raise SbpError(
                "forward: the gradients of the previous training batch would be lost; call "
                "apply_gradients(step) first, or pass training=False. To accumulate gradients, "
                "call start_id_exchange, lookup, gather_outputs, send_grads, and receive_grads for "
                "each batch, then update(step) once"
            )
        batch = self.start_id_exchange(ids, batch_size, training=training)
        self.lookup(batch)
        outputs = self.gather_outputs(batch)
        self._last = batch if training else self._last
        return outputs

    def apply_gradients(self, step: int) -> None:
        """Update the rows of the last training ``forward``, using the ``.grad`` of its outputs.

        See ``update`` for ``step``.
        """
        batch, self._last = self._last, None
        if batch is None:
            raise RuntimeError(
                "apply_gradients needs a training batch; call forward(training=True) first"
            )
        self.send_grads(batch)
        self.receive_grads(batch)
        self.update(step)

    @property
    def out_of_range(self) -> Tensor:
        """Return how many ids the policy ``clamp`` or ``hash`` has replaced on this rank, as int64
        [features].
        """
        self._stream.join()
        return self._reader.out_of_range.to(self._world.device)

    def stored(self) -> Iterator[StoredShard]:
        """Iterate over the shards on this rank."""
        for store, shards in self.stores():
            yield from (StoredShard(shard, store) for shard in shards)

    def stores(self) -> list[tuple[RowStore, tuple[Shard, ...]]]:
        """Return every store of this rank with its shards; the rows of a shard start at its
        ``base``.
        """
        self._check_settled()
        return [(store, stack.shards(self._world.rank)) for stack, store in self._stores()]

    def state(self) -> dict[str, LogicalTensor]:
        """Return rows and optimizer state by logical name, with the same names on all ranks.

        Names are ``tables/T``, ``tables/T/STATE``, and, for growing fields, ``vocabularies/F/..``.
        """
        fields = () if self.growing is None else self.growing.fields
        return logical_state(self.plan, list(self.stored()), fields)

    def growth_counts(self) -> dict[str, GrowthCounts]:
        """Return the counts of growing fields by name; every rank must call this method."""
        return {} if self.growing is None else self.growing.counts()

    def copies(self) -> list[Copies]:
        """Return the state that is replicated on several ranks, in the same order on all ranks.

        B tables and their optimizer state are replicated, and so is the row state of column-split
        tables.
        """
        return copies_of(self.plan, list(self.stored()))

    def cache_counts(self) -> CacheCounts | None:
        """Return the counts of this rank's caches, or ``None`` if it has no caches."""
        stores = [store for _, store in self._stores() if isinstance(store, CachedStore)]
        return CacheCounts.total([store.counts for store in stores]) if stores else None

    def memory_bytes(self) -> int:
        """Return the size in bytes of rows and optimizer state on this rank."""
        return sum(store.memory_bytes for _, store in self._stores())

    def _graph_kernels(self) -> list[TorchStorage]:
        """Return the kernels that can read their step-dependent numbers from device memory."""
        kernels = [store.kernel for _, store in self._stores()]
        return [kernel for kernel in kernels if isinstance(kernel, TorchStorage)]

    def _stores(self) -> Iterator[tuple[TableBatch, RowStore]]:
        for group in self._groups:
            yield from group.stores()

"""An embedding collection: the tables of a model on one rank, run as an EmbeddingPlan says.

A batch passes in moves (``begin``, ``advance``, ``look_up``, ``outputs``, ``push``, ``update``), so
that a schedule can put other work between them; ``forward`` and ``apply_gradients`` make them one
after the other. Outputs come laid out S(0) over the batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.assembly import Assembly
from sbpflow.embedding.exchange.base import AnyGroup
from sbpflow.embedding.exchange.boxed import Received, make_group
from sbpflow.embedding.exchange.counts import CountReader
from sbpflow.embedding.exchange.id_transfer import IdTransfer
from sbpflow.embedding.exchange.overflow import PaddedGroups
from sbpflow.embedding.ids.ahead import IdStream
from sbpflow.embedding.ids.batch_ids import Ids
from sbpflow.embedding.ids.list_loops import warm_up_loops
from sbpflow.embedding.ids.reader import IdReader
from sbpflow.embedding.in_flight import EmbeddingsInFlight
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.stack import Stack
from sbpflow.embedding.plan.tables import KernelRequest, Shard
from sbpflow.embedding.rules.base import SumOverColumns
from sbpflow.embedding.state import LogicalTensor, StoredShard, logical_state
from sbpflow.embedding.storage.base import Storage
from sbpflow.embedding.storage.choose import (
    KernelChoice,
    choose_kernels,
    make_storage,
    warm_up_kernels,
)
from sbpflow.embedding.storage.initial import fill_shard
from sbpflow.embedding.storage.rounding import RowNoise
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.errors import DataError, SbpError
from sbpflow.sbp.sbp import balanced_sizes


@dataclass(frozen=True, slots=True)
class Copies:
    """Tensors that must be equal, bit by bit, within each of several sets of ranks.

    ``tensors`` are this rank's; empty on a rank that is in none of the sets.
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]
    tensors: list[Tensor]


class EmbeddingCollection:
    """The embedding tables of a model, from this rank's point of view."""

    def __init__(
        self,
        plan: EmbeddingPlan,
        boxing: Boxing,
        *,
        seed: int,
        kernel: KernelRequest | Mapping[str, KernelChoice] = "auto",
        row_capacity: float | None = None,
    ) -> None:
        """``kernel`` is a request, or the choice per table that another plan has made. With
        ``row_capacity``, on CUDA, rows of training batches travel in buffers of a fixed size: this
        share of what the largest can be.
        """
        world = boxing.world
        self.plan = plan
        self._world = world
        self._seed = seed
        self.kernels = choose_kernels(plan, kernel) if isinstance(kernel, str) else dict(kernel)
        warm_up_kernels(plan, self.kernels)
        warm_up_loops(plan, world.device)
        received = Received(
            {column: n for n, column in enumerate(plan.needed[world.rank])},
            {place: n for n, place in enumerate(plan.needed_lists[world.rank])},
        )
        self._groups: list[AnyGroup] = [
            make_group(group, boxing, self._make_storage, received, row_capacity)
            for group in plan.groups
        ]
        self._padded = PaddedGroups(self._groups)
        self._counts = CountReader(self._groups, world.device)
        self._stream = IdStream(world.device)
        self._reader = IdReader(plan, world.rank, world.device)
        self._transfer = IdTransfer(plan, boxing)
        self._last: EmbeddingsInFlight | None = None
        self._assembly = {out.name: Assembly(plan, out, world.device) for out in plan.outputs}
        for stored in self.stored():
            fill_shard(stored, seed=seed)
        self._lr_factor = 1.0

    def scale_lr(self, factor: float) -> None:
        """Batches looked up from now on have each optimizer's learning rate times ``factor``."""
        self._lr_factor = factor

    def begin(self, ids: Ids, num_rows: int, *, training: bool) -> EmbeddingsInFlight:
        """Check a batch's ids and start what moves them; ``num_rows`` counts the whole batch.

        ``ids`` as ``IdReader.read`` takes them, of this rank's samples. Raises DataError; of a
        training batch on CUDA ids out of range are told by the next ``update``, before it changes
        anything.
        """
        with self._stream.section(ids):
            local = self._reader.read(ids)
            if not training:
                self._reader.check_late()
            wanted = balanced_sizes(num_rows, self._world.size)[self._world.rank]
            if local.num_samples != wanted:
                raise DataError(
                    f"rank {self._world.rank} passed ids of {local.num_samples} samples; its part "
                    f"of a batch of {num_rows} is {wanted}"
                )
            under_way = self._transfer.begin(local, num_rows)
            groups = [group.begin(local, num_rows, training=training) for group in self._groups]
            counts = self._counts.start(under_way, groups)
            batch = EmbeddingsInFlight(under_way, groups, counts)
            if counts.are_known:  # on CUDA: ids of fixed sizes, which may be sorted from now on
                self._go_on(batch)
        return batch

    def advance(self, batch: EmbeddingsInFlight) -> None:
        """Start the transfers that needed the sizes first."""
        if not batch.advanced:
            with self._stream.section():
                self._go_on(batch)

    def _go_on(self, batch: EmbeddingsInFlight) -> None:
        batch.counts.finish()
        batch.ids.advance()
        for group, part in zip(self._groups, batch.groups, strict=True):
            group.advance(part)
        batch.advanced = True
        if not self._stream.exists:
            return
        # It waits for the ids and sorts them; the host and the current stream do not.
        everywhere = batch.ids.finish()
        for group, part in zip(self._groups, batch.groups, strict=True):
            part.everywhere = everywhere
            group.receive(part)
            if part.training:
                group.sort_ahead(part)
        batch.most_named = self._padded.ask(batch.groups)

    def look_up(self, batch: EmbeddingsInFlight) -> None:
        """Wait for the ids, read the rows, and start the vectors on their way."""
        self.arrive(batch)
        self.read(batch)

    def arrive(self, batch: EmbeddingsInFlight) -> None:
        """The first half of ``look_up``: wait for the ids."""
        self.advance(batch)
        if late := batch.most_named:
            batch.most_named = None
            if over := self._padded.overflowing(batch.groups, late):
                with self._stream.section():
                    self._padded.send_again(batch.groups, over)
        self._stream.join()
        if self._stream.exists:
            return
        everywhere = batch.ids.finish()
        for group, part in zip(self._groups, batch.groups, strict=True):
            part.everywhere = everywhere
            group.receive(part)

    def read(self, batch: EmbeddingsInFlight) -> None:
        """The second half: read the rows, and send them."""
        for group, part in zip(self._groups, batch.groups, strict=True):
            part.lr_factor = self._lr_factor
            group.look_up(part)

    def outputs(self, batch: EmbeddingsInFlight) -> dict[str, Tensor]:
        """{output: [local batch, width]}; of a training batch they are leaves that require a
        gradient.
        """
        groups = batch.groups
        parts = [g.vectors(part) for g, part in zip(self._groups, groups, strict=True)]
        training = any(part.training for part in groups)
        batch.outputs = {
            name: assembly.join(parts).requires_grad_(training)
            for name, assembly in self._assembly.items()
        }
        return batch.outputs

    def push(self, batch: EmbeddingsInFlight) -> None:
        """Start the gradients of ``outputs`` on their way to the rows."""
        for index, (group, part) in enumerate(zip(self._groups, batch.groups, strict=True)):
            name = group.plan.output.name
            grad = batch.outputs[name].grad
            if grad is None:
                raise RuntimeError(f"output {name} has no gradient; call backward() first")
            group.push(part, self._assembly[name].gradient_of(index, grad))
        batch.outputs = {}

    def collect(self, batch: EmbeddingsInFlight) -> None:
        """Wait for the gradients and keep them."""
        for group, part in zip(self._groups, batch.groups, strict=True):
            group.collect(part)

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
        """DataError for ids out of range that were read since the last call, on CUDA."""
        self._reader.check_late()

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
        for stack, storage in self._storages():
            table = stack.tables[0].name
            if stack.ragged:
                return f"table {table} has lists of ids, of another number in each batch"
            if not isinstance(storage, TorchStorage):
                return f"table {table}: kernel {storage.kernel} has its learning rate on the host"
        return ""

    def keep_numbers(self) -> None:
        """From now on updates take their learning rate and step from memory of the device."""
        for storage in self._kept():
            storage.keep_numbers()

    def write_numbers(self, step: int) -> None:
        """Before a replay of a graph that holds ``apply``: those of this step."""
        for (stack, _), storage in zip(self._storages(), self._kept(), strict=True):
            storage.write_numbers(stack.optimizer.lr * self._lr_factor, step)

    @property
    def is_watched(self) -> bool:
        """Whether someone wants to be told of rows before they change: a graph tells nobody."""
        return any(storage.before_update is not None for _, storage in self._storages())

    def gradient_squares(self) -> Tensor:
        """0-d float64: squares of all that was collected, each row's gradients summed first.

        Added up over all ranks it counts every row once, in any layout.
        """
        return torch.stack([group.gradient_squares() for group in self._groups]).sum()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply what was collected by ``factor``, 0-d, before ``update``."""
        for group in self._groups:
            group.scale_gradients(factor)

    def forward(self, ids: Ids, num_rows: int, *, training: bool) -> dict[str, Tensor]:
        """Look a batch up, all moves at once: ids of this rank's samples -> ``outputs``.

        Raises SbpError if the gradients of the training batch before were not applied.
        """
        if training and self._last is not None:
            raise SbpError(
                "forward: the gradients of the training batch before would be lost; call "
                "apply_gradients(step) before the next one, or training=False for a batch without "
                "update; to accumulate, make each batch's moves begin, look_up, outputs, push and "
                "collect, then update(step) once"
            )
        batch = self.begin(ids, num_rows, training=training)
        self.look_up(batch)
        outputs = self.outputs(batch)
        self._last = batch if training else self._last
        return outputs

    def apply_gradients(self, step: int) -> None:
        """Update the rows the last training ``forward`` touched, from its outputs' ``.grad``.

        ``step`` as ``update`` takes it.
        """
        batch, self._last = self._last, None
        if batch is None:
            raise RuntimeError("apply_gradients without a training forward")
        self.push(batch)
        self.collect(batch)
        self.update(step)

    @property
    def out_of_range(self) -> Tensor:
        """[features] int64: ids that the policy clamp or hash replaced on this rank so far."""
        self._stream.join()
        return self._reader.out_of_range

    def stored(self) -> Iterator[StoredShard]:
        """Every shard this rank holds, as writable views."""
        for stack, storage in self._storages():
            weights, state = storage.weights, storage.state
            for shard in stack.shards(self._world.rank):
                rows = slice(shard.base, shard.base + shard.num_rows)
                yield StoredShard(shard, weights[rows], {k: v[rows] for k, v in state.items()})

    def storages(self) -> list[tuple[Storage, tuple[Shard, ...]]]:
        """Every storage of this rank, and the shards that are its rows, from their ``base`` on."""
        return [(storage, stack.shards(self._world.rank)) for stack, storage in self._storages()]

    def state(self) -> dict[str, LogicalTensor]:
        """Rows and optimizer state by logical name, as writable views; the same names on all ranks.

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
                    state = stored.state if stored else {}
                    tensors = [state[key] for key in state if stack.optimizer.state[key] == "row"]
                    if group.exchange == "local":
                        name = table.name
                        tensors = [*state.values(), stored.weights] if stored else []
                    found.append(Copies(name, ranks, tensors))
        return found

    def memory_bytes(self) -> int:
        """Bytes of rows and optimizer state on this rank."""
        return sum(
            tensor.numel() * tensor.itemsize
            for _, storage in self._storages()
            for tensor in (storage.weights, *storage.state.values())
        )

    def _kept(self) -> list[TorchStorage]:
        """The storages, where all are such that can keep numbers."""
        return [one for _, one in self._storages() if isinstance(one, TorchStorage)]

    def _storages(self) -> Iterator[tuple[Stack, Storage]]:
        for group in self._groups:
            yield from group.storages()

    def _make_storage(
        self, group: GroupPlan, index: int, sum_over_columns: SumOverColumns | None
    ) -> Storage:
        stack, rank = group.stacks[index], self._world.rank
        noise: RowNoise | None = None
        if self.plan.row_dtype != self.plan.dtype:
            noise = RowNoise(stack.shards(rank), self._seed, self._world.device)
        return make_storage(
            self.kernels[stack.tables[0].name],
            stack.num_rows(rank),
            stack.width(rank) if stack.uses_on(rank) else stack.dim,
            dim=stack.dim,
            optimizer=stack.optimizer,
            dtype=self.plan.dtype,
            row_dtype=self.plan.row_dtype,
            device=self._world.device,
            sum_over_columns=sum_over_columns,
            noise=noise,
        )

"""The moves of a group with a batch, in order, and the base of the classes that make them.

    start_id_exchange  ids are at hand: addresses, deduplication, first transfer of its own
    exchange_ids       sizes are known: the transfer that needed them
    next_round         ids came that are passed on: deduplication, counts, and again
                       ``exchange_ids``
    receive_ids        ids are where they are looked up: addresses there, final
    announce           the stores learn which rows a training batch needs
    lookup             rows out of the stores, vectors on their way
    gather_outputs     they are home
    send_grads         gradients on their way
    receive_grads      they are where the rows are
    update             one optimizer step

Between two moves the caller computes, or makes another group's move: that is all there is to
overlap. The moves up to ``receive_ids`` depend on ids alone, so they may run batches ahead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing, Pending
from sbpflow.boxing.step import BoxingStep
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.rules.base import SumOverColumns
from sbpflow.embedding.storage.base import sum_of_squares
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.store import RowStore
from sbpflow.errors import SbpError

# (the batches kept, rows of all, one merged (lookup, gradients) per store)
Collected = tuple[list["GroupInFlight"], int, list[tuple[Lookup, Tensor]]]
VECTORS = "vectors"
GRADIENTS = "gradients"
# (group, stack index, how squares are added up over the ranks of a row) -> this rank's rows
MakeStore = Callable[[GroupPlan, int, SumOverColumns | None], RowStore]


@dataclass(slots=True, kw_only=True)
class GroupInFlight:
    """One batch's way through one group; what a move leaves for a later one.

    ``number`` counts the training batches of the collection; ``None`` for others.
    """

    batch_size: int  # of the whole batch
    local: BatchIds
    number: int | None
    lr_factor: float = 1.0  # of the optimizers' rates, which the rows are looked up for
    everywhere: BatchIds | None = None
    lookups: list[Lookup] = field(default_factory=list[Lookup])
    pending: Pending | None = None
    counts: list[int] = field(default_factory=list[int])  # ``Group.counts``, as the host reads them
    round: int = 0  # how often ids were passed on

    @property
    def training(self) -> bool:
        return self.number is not None

    def lookup(self, store: RowStore, lookup: Lookup, lr: float) -> Tensor:
        """Rows of a store, which keeps them in their slots until ``release`` if this is training;
        ``lr`` is the rate of its optimizer.
        """
        if self.number is None:
            return store.peek(lookup)
        lookup.place(store.admit(self.number))
        return store.kernel.lookup(lookup, lr * self.lr_factor)

    def update(self, store: RowStore, lookup: Lookup, grads: Tensor, lr: float, step: int) -> None:
        """A step on rows that were looked up, by this batch or by ones before it."""
        store.kernel.update(lookup, grads, lr * self.lr_factor, step)

    def take_pending(self) -> Pending:
        """What an earlier move sent on its way; each can be taken once."""
        pending, self.pending = self.pending, None
        if pending is None:
            raise RuntimeError("nothing is on its way: a move was left out, or made twice")
        return pending


@dataclass(frozen=True, slots=True)
class Received:
    """Where the ids that a rank looks up for the whole batch lie, as it receives them."""

    columns: Mapping[int, int]
    places: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Given:
    """What a group is made with: its stores, where the ids of the whole batch lie, and for single
    rows the share of ``padded.Capacity``.
    """

    make_store: MakeStore
    received: Received
    row_buffer_fraction: float | None = None


BatchT = TypeVar("BatchT", bound=GroupInFlight)


class Group(ABC, Generic[BatchT]):
    """One group on one rank. Every rank makes the same moves in the same order."""

    def __init__(self, plan: GroupPlan, boxing: Boxing, given: Given) -> None:
        del given
        self.plan, self.world, self.boxing = plan, boxing.world, boxing
        self._collected: list[tuple[GroupInFlight, list[Lookup], list[Tensor]]] = []
        self._merged: Collected | None = None

    @abstractmethod
    def stores(self) -> list[tuple[TableBatch, RowStore]]:
        """What this rank stores."""

    @abstractmethod
    def start_id_exchange(self, local: BatchIds, batch_size: int, *, number: int | None) -> BatchT:
        """Sort and count the ids of this rank's samples, and send what others need of that.

        ``batch_size`` counts the whole batch; ``number`` as ``GroupInFlight`` has it.
        """

    def counts(self, batch: BatchT) -> Tensor | None:
        """What the host must know of the batch before ``exchange_ids``, int64; ``None``: nothing.

        Takes what ``start_id_exchange`` sent on its way.
        """
        del batch
        return None

    @abstractmethod
    def exchange_ids(self, batch: BatchT) -> None:
        """Take what the ranks counted, and send the ids themselves where they travel."""

    def next_round(self, batch: BatchT) -> None:
        """Take the ids of the round before ``batch.round``, and count those to be passed on."""
        raise NotImplementedError(f"{self.plan.name}: its ids travel once")

    @abstractmethod
    def receive_ids(self, batch: BatchT) -> None:
        """Take what is looked up here, as ``batch.lookups``.

        ``batch.everywhere`` is set by now, where this rank needs it.
        """

    def sort_ahead(self, batch: BatchT) -> None:
        """After ``receive_ids``, of a training batch: what an update will want sorted."""
        for lookup, (_, store) in zip(batch.lookups, self.stores(), strict=True):
            store.kernel.sort_ahead(lookup)

    def announce(self, batch: BatchT) -> None:
        """After ``receive_ids``, when the addresses are final, once for each batch in turn."""
        if batch.number is not None:
            for lookup, (_, store) in zip(batch.lookups, self.stores(), strict=True):
                rows = store.announce(batch.number, lookup.addresses)
                lookup.addresses = lookup.addresses if rows is None else rows

    def cancel(self, batch: BatchT) -> None:
        """After ``announce``, of a batch that will not be looked up: end its leases."""
        self._release([batch])

    @abstractmethod
    def lookup(self, batch: BatchT) -> None:
        """Read the rows that are stored here, and send them as vectors, rows or terms."""

    @abstractmethod
    def gather_outputs(self, batch: BatchT) -> Tensor:
        """[local batch, plan.width]."""

    @abstractmethod
    def send_grads(self, batch: BatchT, grad: Tensor) -> None:
        """Takes [local batch, plan.width]."""

    @abstractmethod
    def receive_grads(self, batch: BatchT) -> None:
        """Keeps the gradients for ``update``; several batches' may come together."""

    @abstractmethod
    def update(self, step: int) -> None:
        """One step on all that was collected; ``step`` is the job's."""

    def keep(self, batch: GroupInFlight, lookups: list[Lookup], grads: list[Tensor]) -> None:
        """Put aside for ``update`` what a batch gives this rank's stores."""
        self._collected.append((batch, lookups, grads))

    def gradient_squares(self) -> Tensor:
        """Squares of the collected gradients, those of a row summed first: 0-d float64, which adds
        up over the ranks, for of rows that all of them hold the first rank counts alone.
        """
        _, _, merged = self._merged = self._merged or self._merge()
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if self.plan.kind.copies and self.world.rank != self.plan.world.ranks[0]:
            return total
        for (lookup, grads), (_, store) in zip(merged, self.stores(), strict=True):
            total += sum_of_squares(store.kernel, lookup, grads)
        return total

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply what was collected by ``factor``, 0-d."""
        batches, batch_size, merged = self._merged or self._merge()
        scaled = [(lookup, grads * factor.to(grads.dtype)) for lookup, grads in merged]
        self._merged = (batches, batch_size, scaled)

    def take_collected(self) -> "Collected":
        """What is there for ``update``; it can be taken once."""
        taken, self._merged = self._merged or self._merge(), None
        return taken

    def _release(self, batches: Sequence[GroupInFlight]) -> None:
        """After their update: the stores may use the slots for other rows."""
        for batch in batches:
            if batch.number is not None:
                for _, store in self.stores():
                    store.release(batch.number)

    def _merge(self) -> "Collected":
        kept, self._collected = self._collected, []
        if not kept:
            raise RuntimeError(f"{self.plan.name}: an update without collected gradients")
        merged: list[tuple[Lookup, Tensor]] = []
        for index in range(len(kept[0][1])):
            lookup = Lookup.merge([lookups[index] for _, lookups, _ in kept])
            grads = [batch[index] for _, _, batch in kept]
            merged.append((lookup, grads[0] if len(grads) == 1 else torch.cat(grads)))
        batches = [batch for batch, _, _ in kept]
        return batches, sum(batch.batch_size for batch in batches), merged

    def start(self, steps: tuple[BoxingStep, ...], part: Tensor | None, channel: str) -> Pending:
        """Begin a conversion, of whatever the steps carry."""
        if part is not None and steps:
            part = part.to(steps[0].dtype)
        return self.boxing.start(steps, part, channel)

    def arrived(self, steps: tuple[BoxingStep, ...], pending: Pending) -> Tensor:
        """What this rank receives, as ``plan.dtype``; SbpError if that is not its part."""
        out = pending.wait()
        expected = steps[-1].dst.part_shape(steps[-1].shape, self.world.rank) if steps else None
        if out is None or (expected is not None and out.shape != expected):
            given = "no part" if out is None else f"a part of shape {list(out.shape)}"
            raise SbpError(
                f"{self.plan.name}: rank {self.world.rank} received {given}, not {expected}"
            )
        return out.to(self.plan.dtype)


AnyGroup = Group[Any]  # a batch goes back to the group that began it


def make_group(plan: GroupPlan, boxing: Boxing, given: Given) -> AnyGroup:
    """What runs a plan's exchange."""
    kind: object = resolve_name(plan.kind.runs)
    if not (isinstance(kind, type) and issubclass(kind, Group)):
        raise SbpError(f"exchange {plan.exchange}: {plan.kind.runs} is not a class of Group")
    return kind(plan, boxing, given)

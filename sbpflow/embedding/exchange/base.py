"""Defines the base class of groups. A group runs the moves of a batch in this order:

* ``start_id_exchange`` computes addresses, deduplicates them, and starts the first transfer.
* ``exchange_ids`` sends the ids. By then, the ranks know how many ids they send and receive.
* ``next_round`` runs only in exchanges with several id rounds. It receives ids, removes duplicates,
  and counts the ids to forward; ``exchange_ids`` then runs again.
* ``receive_ids`` receives the ids that this rank looks up. Addresses are final.
* ``announce`` notifies the stores of the rows that a training batch needs.
* ``mark_early``, which is optional, finds the rows whose values are final before the lookup.
* ``send_early`` sends the rows that ``mark_early`` found, one batch ahead.
* ``send_late`` starts sending the late gradients of the previous batch.
* ``lookup`` reads the rows and starts sending vectors.
* ``gather_outputs`` receives the vectors of this rank's samples.
* ``send_grads`` starts sending gradients.
* ``receive_grads`` receives the gradients on the ranks that store the rows.
* ``update`` takes one optimizer step.

Between two moves, the caller does other work, such as a move of another group; the transfers
overlap with this work. The moves up to ``receive_ids`` depend only on ids, so they can run several
batches ahead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
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

VECTORS = "vectors"
GRADIENTS = "gradients"
# Arguments: the group, the index of the stack, and a function that sums squares over the ranks that
# share a row.
MakeStore = Callable[[GroupPlan, int, SumOverColumns | None], RowStore]


@dataclass(slots=True, kw_only=True)
class GroupInFlight:
    """The state of one batch in one group, passed from move to move.

    ``number`` is the batch's position among the training batches of the collection, starting at 1,
    or ``None`` for a batch that is not used for training.
    """

    batch_size: int  # number of samples in the global batch
    local: BatchIds
    number: int | None
    lr_factor: float = 1.0  # Factor of the learning rates, fixed at the lookup.
    # Ids of the global batch, if this rank looks up ids of other ranks' samples.
    everywhere: BatchIds | None = None
    lookups: list[Lookup] = field(default_factory=list[Lookup])
    pending: Pending | None = None
    rows: Tensor | None = None  # Looked-up rows, until ``gather_outputs`` takes them.
    # Result of ``Group.counts``, as host integers.
    counts: list[int] = field(default_factory=list[int])
    round: int = 0  # current round of the id exchange

    @property
    def training(self) -> bool:
        return self.number is not None

    def lookup(self, store: RowStore, lookup: Lookup, lr: float) -> Tensor:
        """Read rows of a store.

        In training, the rows keep their slots until ``release``. ``lr`` is the learning rate of the
        store's optimizer.
        """
        if self.number is None:
            return store.peek(lookup)
        lookup.place(store.admit(self.number))
        return store.kernel.lookup(lookup, lr * self.lr_factor)

    def update(self, store: RowStore, lookup: Lookup, grads: Tensor, lr: float, step: int) -> None:
        """Take an optimizer step on rows that this batch or an earlier batch looked up."""
        store.kernel.update(lookup, grads, lr * self.lr_factor, step)

    def take_pending(self) -> Pending:
        """Remove and return the transfer that an earlier move started."""
        pending, self.pending = self.pending, None
        if pending is None:
            raise RuntimeError("no transfer is pending, because a move was skipped or repeated")
        return pending

    def take_rows(self) -> Tensor:
        """Remove and return the looked-up rows."""
        rows, self.rows = self.rows, None
        if rows is None:
            raise RuntimeError("no rows were looked up, because a move was skipped or repeated")
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions:
    """Options of all exchanges; the fields have the names of their keys in ``parallel``.

    On CUDA, ``row_buffer_fraction`` makes training batches send rows in buffers of a fixed size,
    this fraction of the maximum.
    """

    row_buffer_fraction: float | None = None

    @staticmethod
    def of(settings: object) -> "ExchangeOptions":
        """Read the options from attributes of ``settings``."""
        names = [field.name for field in fields(ExchangeOptions)]
        return ExchangeOptions(**{name: getattr(settings, name) for name in names})


@dataclass(frozen=True, slots=True)
class GroupContext:
    """Facts and objects that a collection provides to its groups.

    ``columns`` and ``places`` map the columns and lists of the global batch to those that this rank
    receives. ``compiled`` is passed to ``find_loops``.
    """

    make_store: MakeStore
    columns: Mapping[int, int]
    places: Mapping[int, int]
    compiled: bool
    options: ExchangeOptions


BatchT = TypeVar("BatchT", bound=GroupInFlight)


class Group(ABC, Generic[BatchT]):
    """Runs one group on one rank. Every rank runs the same moves in the same order."""

    def __init__(self, plan: GroupPlan, boxing: Boxing, context: GroupContext) -> None:
        self.plan, self.world, self.boxing = plan, boxing.world, boxing
        self._collected: list[GroupInFlight] = []
        # The gradients of each collected batch, with one pair per store; ``_merge`` joins them.
        self._kept: list[list[tuple[Lookup, Tensor]]] = []

    @abstractmethod
    def stores(self) -> list[tuple[TableBatch, RowStore]]:
        """Return the stacks stored on this rank, with their stores."""

    @abstractmethod
    def start_id_exchange(self, local: BatchIds, batch_size: int, *, number: int | None) -> BatchT:
        """Sort and count the ids of this rank's samples, and start the first transfer.

        ``batch_size`` is global. See ``GroupInFlight`` for ``number``.
        """

    def counts(self, batch: BatchT) -> Tensor | None:
        """Return the counts (int64 [n]) that the host needs before ``exchange_ids``, or ``None``.

        Call this method only once, because it finishes the transfer that ``start_id_exchange``
        started.
        """
        return None

    @abstractmethod
    def exchange_ids(self, batch: BatchT) -> None:
        """Use ``batch.counts`` to start sending the ids, if the exchange sends any."""

    def next_round(self, batch: BatchT) -> None:
        """Receive the ids of the previous round, and count the ids to forward in round
        ``batch.round``.
        """
        raise NotImplementedError(
            f"{self.plan.name}: next_round was called, but this exchange has only one round of ids"
        )

    @abstractmethod
    def receive_ids(self, batch: BatchT) -> None:
        """Set ``batch.lookups`` to the rows to look up on this rank.

        If this rank needs ``batch.everywhere``, the caller must set it first.
        """

    def sort_ahead(self, batch: BatchT) -> None:
        """Sort the lookups of a training batch for its update; call this after ``receive_ids``."""
        for lookup, (_, store) in zip(batch.lookups, self.stores(), strict=True):
            store.kernel.sort_ahead(lookup)

    def announce(self, batch: BatchT) -> None:
        """Announce a training batch to the stores; call this once, after ``receive_ids``."""
        if batch.number is not None:
            for lookup, (_, store) in zip(batch.lookups, self.stores(), strict=True):
                store.announce(batch.number, lookup.addresses)

    def cancel(self, batch: BatchT) -> None:
        """Release the slots of an announced batch that will not be looked up."""
        self._release([batch])

    def mark_early(self, batch: BatchT) -> None:
        """If the plan has ``early_rows``, find the rows that no batch with a pending update uses.

        Call this method after ``receive_ids`` of this batch and all earlier batches.
        """

    def send_early(self, batch: BatchT) -> None:
        """Start sending the rows that ``mark_early`` found; call this method before the next
        ``update``.
        """

    def send_late(self) -> None:
        """With ``late_gradients``, start sending the gradients that ``send_grads`` held back for
        the last updated batch.
        """

    def settle(self) -> None:
        """Receive and apply late gradients, if any; ``update`` calls this method first. Every rank
        must call this method.
        """

    @property
    def is_settled(self) -> bool:
        """Return False if the last updated batch has late gradients that are not yet applied."""
        return True

    @abstractmethod
    def lookup(self, batch: BatchT) -> None:
        """Read the rows stored on this rank and start sending vectors, rows, or partial sums."""

    @abstractmethod
    def gather_outputs(self, batch: BatchT) -> Tensor:
        """Return the vectors of this rank's samples: [local batch, plan.width]."""

    @abstractmethod
    def send_grads(self, batch: BatchT, grad: Tensor) -> None:
        """Start sending the gradient of the result of ``gather_outputs`` ([local batch,
        plan.width]).
        """

    @abstractmethod
    def receive_grads(self, batch: BatchT) -> None:
        """Collect the gradients for ``update``. Several batches can be collected before an
        update.
        """

    @abstractmethod
    def update(self, step: int) -> None:
        """Take one optimizer step with all collected gradients; ``step`` counts from 1."""

    def keep(self, batch: GroupInFlight, lookups: list[Lookup], grads: list[Tensor]) -> None:
        """Keep a batch's gradients for this rank's stores until ``update``."""
        self._collected.append(batch)
        self._kept.append(list(zip(lookups, grads, strict=True)))

    def gradient_squares(self) -> Tensor:
        """Sum the collected gradients per row, and return the sum of their squares (0-d float64).

        The results of all ranks can be summed, because replicated rows are counted only on the
        first rank.
        """
        merged = self._merge()
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if self.plan.kind.copies and self.world.rank != self.plan.world.ranks[0]:
            return total
        for (lookup, grads), (stack, store) in zip(merged, self.stores(), strict=True):
            # Growing tables need an order of summation that does not depend on row numbers, because
            # row numbers change when a run resumes.
            total += sum_of_squares(store.kernel, lookup, grads, in_order=stack.grows)
        return total

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the collected gradients by ``factor`` (a 0-d tensor)."""
        merged = self._merge()
        self._kept = [[(lookup, grads * factor.to(grads.dtype)) for lookup, grads in merged]]

    def take_collected(self) -> tuple[list[GroupInFlight], int, list[tuple[Lookup, Tensor]]]:
        """Remove and return the collected batches, their total number of samples, and one merged
        (lookup, gradients) pair per store.
        """
        merged, batches = self._merge(), self._collected
        self._collected, self._kept = [], []
        return batches, sum(batch.batch_size for batch in batches), merged

    def _release(self, batches: Sequence[GroupInFlight]) -> None:
        """Release the slots of ``batches``, so that stores can reuse them."""
        for batch in batches:
            if batch.number is not None:
                for _, store in self.stores():
                    store.release(batch.number)

    def _merge(self) -> list[tuple[Lookup, Tensor]]:
        if not self._kept:
            raise RuntimeError(
                f"{self.plan.name}: update was called without gradients; call receive_grads first"
            )
        if len(self._kept) > 1:
            merged: list[tuple[Lookup, Tensor]] = []
            for pairs in zip(*self._kept, strict=True):
                grads = torch.cat([grads for _, grads in pairs])
                merged.append((Lookup.merge([lookup for lookup, _ in pairs]), grads))
            self._kept = [merged]
        return self._kept[0]

    def start(
        self,
        steps: tuple[BoxingStep, ...],
        part: Tensor | None,
        channel: str,
        *,
        donate: bool = False,
    ) -> Pending:
        """Cast ``part`` to the dtype of the steps, and start its conversion.

        With ``donate``, an all-reduce may overwrite ``part``.
        """
        if part is not None and steps:
            part = part.to(steps[0].dtype)
        return self.boxing.start(steps, part, channel, donate=donate)

    def arrived(self, steps: tuple[BoxingStep, ...], pending: Pending) -> Tensor:
        """Wait for this rank's part and return it in ``plan.dtype``.

        Raise SbpError if its shape is wrong.
        """
        out = pending.wait()
        expected = steps[-1].dst.part_shape(steps[-1].shape, self.world.rank) if steps else None
        if out is None or (expected is not None and out.shape != expected):
            actual = "no part" if out is None else f"a part of shape {list(out.shape)}"
            raise SbpError(
                f"{self.plan.name}: rank {self.world.rank} received {actual}, expected {expected}"
            )
        return out.to(self.plan.dtype)


AnyGroup = Group[Any]  # every subclass has its own type of batch


def make_group(plan: GroupPlan, boxing: Boxing, context: GroupContext) -> AnyGroup:
    """Return the group that runs the exchange of ``plan``.

    Raise SbpError if the exchange's ``runs`` does not name a subclass of Group.
    """
    kind: object = resolve_name(plan.kind.runs)
    if not (isinstance(kind, type) and issubclass(kind, Group)):
        raise SbpError(
            f"exchange {plan.exchange}: the attribute `runs` must be a subclass of Group, got "
            f"{plan.kind.runs}"
        )
    return kind(plan, boxing, context)

"""Implements a row store for tests: rows in a Python dict, with few slots."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.store import WEIGHTS, StoreRequest

Row = dict[str, Tensor]  # the tensors of a row and its state, by name


@dataclass
class DictStores:
    """Makes stores with ``slots`` slots each, and records them in ``made``."""

    slots: int
    made: list["DictStore"] = field(default_factory=list)

    def __call__(self, request: StoreRequest) -> "DictStore":
        store = DictStore(request, min(self.slots, request.num_rows))
        self.made.append(store)
        return store


class DictStore:
    """Stores rows in a dict; rows of announced, unreleased batches never leave their slots.

    Among the other rows, the one that was brought into a slot last is evicted first: a deliberately
    bad policy, so that only leases protect rows. ``_lock`` guards the dict and the assignment of
    slots, so that a ``read`` by the writer thread finds each row in the dict or in a slot.
    """

    is_in_place = False
    starts_initial = False

    def __init__(self, request: StoreRequest, slots: int) -> None:
        self.kernel = request.make_kernel(slots)
        self.num_rows, self.width, self.num_slots = request.num_rows, request.width, slots
        self._block = {WEIGHTS: self.kernel.weights, **self.kernel.state}
        self._initial = {
            name: torch.full(
                tensor.shape[1:], 0.0 if name == WEIGHTS else request.optimizer.initial_state(name)
            ).to(tensor.dtype)
            for name, tensor in self._block.items()
        }
        self._rows: dict[int, Row] = {}
        self._slot_of: dict[int, int] = {}  # in the order in which rows were brought
        # Assign slots from the end of the block, so that few row numbers equal their slots.
        self._free = list(range(slots))
        self._leases: Counter[int] = Counter()
        self._announced: dict[int, Tensor] = {}
        self._admitted: set[int] = set()
        self._lock = threading.RLock()
        self.evicted = self.most_leased = self.most_announced = 0

    @property
    def memory_bytes(self) -> int:
        row = sum(tensor[:1].numel() * tensor.itemsize for tensor in self._block.values())
        return row * (self.num_slots + self.num_rows)

    def announce(self, number: int, addresses: Tensor) -> None:
        assert number not in self._announced
        assert all(number > earlier for earlier in self._announced)
        rows = self._unique(addresses)
        with self._lock:
            self._announced[number] = addresses.clone()
            self._leases.update(rows)
            self.most_announced = max(self.most_announced, len(self._announced))
            self.most_leased = max(self.most_leased, len(self._leases))
            assert len(self._leases) <= self.num_slots, "too few slots for the batches in flight"
            for row in rows:
                self._bring(row)

    def admit(self, number: int) -> Tensor:
        assert number not in self._admitted
        self._admitted.add(number)
        addresses = self._announced[number]
        slots = [self._slot_of.get(row, self.num_slots) for row in addresses.tolist()]
        return torch.tensor(slots, dtype=addresses.dtype)

    def release(self, number: int) -> None:
        self._admitted.discard(number)
        self._leases.subtract(self._unique(self._announced.pop(number)))
        self._leases = +self._leases

    def peek(self, lookup: Lookup) -> Tensor:
        before = list(self._slot_of)
        own = Lookup(lookup.addresses, lookup.offsets, lookup.weights)
        rows = own.rows()
        like = self.read(slice(0, 0))[WEIGHTS]
        block = like.new_zeros(rows.numel(), *like.shape[1:])
        # the address after the last row stands for absent rows; its vector stays zero
        stored = rows[rows < self.num_rows]
        self.read(stored, {WEIGHTS: block[: stored.numel()]})
        found = self.kernel.pool(block, own.place(own.inverse()))
        assert before == list(self._slot_of)
        return found

    def read(
        self, rows: slice | Tensor, into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        numbers = self._numbers(rows)
        if into is None:
            into = {
                name: tensor.new_empty(len(numbers), *tensor.shape[1:])
                for name, tensor in self._block.items()
            }
        with self._lock:
            for place, row in enumerate(numbers):
                slot = self._slot_of.get(row)
                for name, target in into.items():
                    held = self._of(row)[name] if slot is None else self._block[name][slot]
                    target[place] = held
        return into

    def write(self, rows: slice | Tensor, values: Mapping[str, Tensor]) -> None:
        with self._lock:
            for place, row in enumerate(self._numbers(rows)):
                slot = self._slot_of.get(row)
                for name, given in values.items():
                    if slot is None:
                        self._rows[row] = {**self._of(row), name: given[place].clone()}
                    else:
                        self._block[name][slot] = given[place]

    def _bring(self, row: int) -> None:
        if row not in self._slot_of:
            slot = self._free.pop() if self._free else self._evict()
            for name, value in self._of(row).items():
                self._block[name][slot] = value
            self._rows.pop(row, None)
            self._slot_of[row] = slot

    def _evict(self) -> int:
        row = next(row for row in reversed(self._slot_of) if not self._leases[row])
        slot = self._slot_of.pop(row)
        self._rows[row] = {name: tensor[slot].clone() for name, tensor in self._block.items()}
        # Overwrite the slot's content, so that tests notice a lost row.
        for tensor in self._block.values():
            tensor[slot] = float("nan")
        self.evicted += 1
        return slot

    def _of(self, row: int) -> Row:
        assert 0 <= row < self.num_rows
        return self._rows.get(row, self._initial)

    def _unique(self, addresses: Tensor) -> list[int]:
        return [row for row in addresses.unique().tolist() if row != self.kernel.absent]

    def _numbers(self, rows: slice | Tensor) -> list[int]:
        if isinstance(rows, slice):
            return list(range(*rows.indices(self.num_rows)))
        return rows.tolist()

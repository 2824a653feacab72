"""Implements the rules of growing tables in plain Python, with dicts of all keys, which are
admitted in sorted order.
"""

from dataclasses import dataclass, field

import numpy as np

from sbpflow.embedding.plan.growth import NUM_BUCKETS, Growth, first_row_of

SWEPT = 16  # number of buckets whose idle keys are evicted after each batch


@dataclass
class ReferenceVocabulary:
    """The vocabulary of one field over all ranks; addresses identify keys."""

    growth: Growth
    num_rows: int
    live: dict[int, list[int]] = field(default_factory=dict)  # address -> [last use, count]
    pending: dict[int, list[int]] = field(default_factory=dict)
    clock: list[int] = field(default_factory=lambda: [0])  # samples after each batch
    times: dict[int, int] = field(default_factory=dict)  # latest event time after each batch
    step_start: int = 0
    forgotten: int = 0  # number of counts that restarted

    def room(self, bucket: int) -> int:
        rows = first_row_of(bucket + 1, self.num_rows) - first_row_of(bucket, self.num_rows)
        return rows - (bucket == 0)

    def step(
        self, addresses: list[int], samples: int, *, begins_step: bool = True, time: int = 0
    ) -> list[bool]:
        """Decide admissions and evictions for a batch; return whether each key has a row of its
        own.
        """
        self.clock.append(self.clock[-1] + samples)
        now = len(self.clock) - 1
        self.times[now] = max(time, self.times.get(now - 1, time))
        if begins_step:
            self.step_start = now
        forget = self.growth.forget_after_samples
        for address in addresses:
            record = self.live.get(address) or self.pending.setdefault(address, [now, 0])
            gap = self.clock[now] - self.clock[record[0]]
            if address in self.pending and forget is not None and gap > forget:
                record[1] = 0
                self.forgotten += 1
            record[0], record[1] = now, record[1] + 1
        for address in sorted(set(addresses)):
            if address in self.pending and self.pending[address][1] >= self.growth.admit_count:
                self.admit(address)
        result = [address in self.live for address in addresses]
        self.sweep(now)
        return result

    def admit(self, address: int) -> None:
        bucket = bucket_of(address)
        here = [other for other in self.live if bucket_of(other) == bucket]
        if len(here) >= self.room(bucket):
            unused = [other for other in here if self.live[other][0] < self.step_start]
            if not unused:
                return
            del self.live[min(unused, key=self.order)]
        self.live[address] = self.pending.pop(address)

    def order(self, address: int) -> tuple[int, ...]:
        last, count = self.live[address]
        lfu = self.growth.evict.policy == "lfu"
        return (count if lfu else 0, last, address)

    def sweep(self, now: int) -> None:
        start = now % (NUM_BUCKETS // SWEPT) * SWEPT
        limits = (self.growth.evict.idle_samples, self.growth.forget_after_samples)
        for keys, limit in zip((self.live, self.pending), limits, strict=True):
            for address in [a for a in keys if start <= bucket_of(a) < start + SWEPT]:
                used = keys[address][0]
                stays = keys is self.live and used >= self.step_start
                is_idle = limit is not None and self.clock[now] - self.clock[used] > limit
                span = self.growth.evict.idle_time
                if keys is self.live and span is not None:
                    is_idle |= self.times[now] - self.times[used] > span
                if is_idle and not stays:
                    del keys[address]
                    self.forgotten += keys is self.pending

    def facts(self) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
        """Return the last uses of live keys, and the last uses and counts of pending keys."""
        live = {address: last for address, (last, _) in self.live.items()}
        return live, {address: (last, count) for address, (last, count) in self.pending.items()}


def bucket_of(address: int) -> int:
    return (address + 2**63) * NUM_BUCKETS >> 64


def address_in(bucket: int, number: int) -> int:
    """Return address ``number`` of a bucket; addresses are not in ascending order."""
    span = 2**64 // NUM_BUCKETS
    return bucket * span + number * 0x9E3779B97F4A7C15 % span - 2**63


def as_arrays(addresses: list[int]) -> np.ndarray:
    return np.array(addresses, dtype=np.int64)

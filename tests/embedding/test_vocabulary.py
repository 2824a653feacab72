"""Tests vocabularies of growing tables against a reference in plain Python."""

from collections import deque
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="vocabularies need numba")

from sbpflow.embedding.plan.growth import MIN_ROWS, NUM_BUCKETS, Eviction, Growth
from sbpflow.embedding.storage.live_rows import Saved
from sbpflow.embedding.vocabulary import counting_loops, eviction_loops, requests
from sbpflow.embedding.vocabulary import key_map as km
from sbpflow.embedding.vocabulary.vocabulary import Vocabulary
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.runtime.random.streams import unmix
from tests.embedding.vocabulary_reference import ReferenceVocabulary, address_in, as_arrays

# Buckets at both ends, in the middle, and some whose idle keys are evicted after batches 8 to 24.
BUCKETS = (0, 130, 200, 260, 330, 390, 8191, 8192, NUM_BUCKETS - 1)
NO_COUNTS = np.empty(0, np.int64)


def keys_of(addresses: list[int]) -> np.ndarray:
    return unmix(torch.from_numpy(as_arrays(addresses))).numpy()


def growth_of(
    policy="lru", admit=1, forget=None, idle=None, rows=MIN_ROWS, idle_time=None
) -> Growth:
    evict = Eviction(policy=policy, idle_samples=idle, idle_time=idle_time, max_rows=rows)
    return Growth(admit_count=admit, forget_after_samples=forget, evict=evict)


def stream(seed: int, batches: int, size: int = 40) -> list[tuple[list[int], int]]:
    """Return the addresses and the number of samples of each batch. Some keys are frequent, and new
    keys replace old ones.
    """
    random = np.random.default_rng(seed)
    made: list[tuple[list[int], int]] = []
    for batch in range(batches):
        count = int(random.integers(0, size))
        numbers = (random.random(count) ** 2 * 14).astype(int) + batch // 9
        buckets = random.integers(0, len(BUCKETS), count)
        addresses = [address_in(BUCKETS[b], int(n)) for b, n in zip(buckets, numbers, strict=True)]
        made.append((addresses, int(random.integers(1, 9))))
    return made


def time_of(batch: int) -> int:
    """Return the event time of a batch: some batches are late, and some come long after others."""
    return 1000 + 10 * batch - 35 * (batch % 5 == 3) + 40 * (batch // 12)


class Parts:
    """The vocabularies of all ranks; each rank counts its keys and sends the counts to the
    owners.
    """

    def __init__(self, growth: Growth, ranks: int) -> None:
        self.growth, self.ranks = growth, ranks
        ends = [NUM_BUCKETS * rank // ranks for rank in range(ranks + 1)]
        rows = growth.evict.max_rows
        self.parts = [Vocabulary(growth, rows, *ends[rank : rank + 2]) for rank in range(ranks)]

    def owned(self, part: Vocabulary, addresses: np.ndarray) -> np.ndarray:
        first, last = part.buckets
        bucket = (addresses >> 50) + NUM_BUCKETS // 2
        return (bucket >= first) & (bucket < last)

    def announce(
        self, addresses: list[int], samples: int, begins_step: bool = True, time: int = 0
    ) -> np.ndarray:
        all_rows = np.zeros(len(addresses), np.int64)
        array = as_arrays(addresses)
        for part in self.parts:
            mine = np.flatnonzero(self.owned(part, array))
            if self.ranks == 1:
                keys, counts = keys_of(addresses), NO_COUNTS
            else:  # every rank counts its samples, and the owner gets the counts of all ranks
                shares = [
                    np.unique(array[s], return_counts=True)
                    for s in np.array_split(mine, self.ranks)
                ]
                keys = keys_of(np.concatenate([a for a, _ in shares]).tolist())
                counts = np.concatenate([c for _, c in shares])
            rows, changes = part.announce(keys, counts, samples, begins_step=begins_step, time=time)
            assert not set(changes.rows.tolist()) & set(changes.freed.tolist())
            by_key = dict(zip(keys.tolist(), rows.tolist(), strict=True))
            own = keys_of(array[mine].tolist()).tolist()
            all_rows[mine] = [by_key[key] for key in own]
        return all_rows

    def facts(self) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
        live: dict[int, int] = {}
        pending: dict[int, tuple[int, int]] = {}
        for part in self.parts:
            saved = part.save().saved
            assert (saved.addresses[1:] > saved.addresses[:-1]).all()
            live |= dict(zip(saved.addresses.tolist(), saved.lasts.tolist(), strict=True))
            waiting = zip(saved.pending_lasts.tolist(), saved.pending_counts.tolist(), strict=True)
            pending |= dict(zip(saved.pending_addresses.tolist(), waiting, strict=True))
        return live, pending

    def resharded(self, ranks: int) -> "Parts":
        """Save these vocabularies, and return the vocabularies of ``ranks`` ranks that load
        them.
        """
        new = Parts(self.growth, ranks)
        saves = [part.save().saved for part in self.parts]
        for part in new.parts:

            def own(names: list[str], by: str, saves=saves, part=part) -> list[np.ndarray]:
                whole = [np.concatenate([getattr(s, name) for s in saves]) for name in names]
                keep = self.owned(part, np.concatenate([getattr(s, by) for s in saves]))
                return [array[keep] for array in whole]

            addresses, lasts, counts = own(["addresses", "lasts", "counts"], "addresses")
            names = ["pending_addresses", "pending_lasts", "pending_counts"]
            waiting = own(names, "pending_addresses")
            part.load(
                Saved(
                    addresses=addresses, lasts=lasts, counts=counts,
                    pending_addresses=waiting[0], pending_lasts=waiting[1],
                    pending_counts=waiting[2], now=saves[0].now, clock=saves[0].clock,
                    times=saves[0].times,
                )
            )  # fmt: skip
        return new

    def peek(self, addresses: list[int]) -> np.ndarray:
        array = as_arrays(addresses)
        rows = np.zeros(array.size, np.int64)
        for part in self.parts:
            mine = self.owned(part, array)
            rows[mine] = part.peek(keys_of(array[mine].tolist()))
        return rows


def run(growth, batches, *, ranks=1, ahead=0, reshards=(), cancel_at=(), accumulate=1):
    """Run a stream with ``ahead`` batches announced; compare everything with the reference at every
    batch.
    """
    reference = ReferenceVocabulary(growth, growth.evict.max_rows)
    parts, waiting = Parts(growth, ranks), deque()
    everything = sorted({a for addresses, _ in batches for a in addresses})
    announced = trained = 0
    owners: dict[int, int] = {}  # row -> address, as of the last batch trained on
    evicted = 0
    while trained < len(batches):
        while announced < len(batches) and announced <= trained + ahead:
            begins_step, time = announced % accumulate == 0, time_of(announced)
            rows = parts.announce(*batches[announced], begins_step, time)
            waiting.append(rows)
            announced += 1
        if trained in cancel_at:
            cancel_at = tuple(at for at in cancel_at if at != trained)
            for part, _ in product(parts.parts, waiting):
                part.roll_back()
            waiting.clear()
            announced = trained
            continue
        before = set(reference.live)
        expected = reference.step(
            *batches[trained], begins_step=trained % accumulate == 0, time=time_of(trained)
        )
        evicted += len(before - set(reference.live))
        rows = waiting.popleft()
        assert ((rows > 0) == expected).all()
        for part in parts.parts:
            part.release()
        trained += 1
        assert parts.facts() == reference.facts()
        seen = parts.peek(everything)
        assert {a for a, row in zip(everything, seen.tolist(), strict=True) if row} == set(
            reference.live
        )
        assert len(set(seen[seen > 0].tolist())) == len(reference.live)
        used = dict(zip(rows.tolist(), batches[trained - 1][0], strict=True))
        owners = {row: a for a, row in zip(everything, seen.tolist(), strict=True) if row}
        assert all(owners[row] == a for row, a in used.items() if row and a in reference.live)
        if (at := dict(reshards).get(trained)) is not None:
            parts = parts.resharded(at)
            announced = trained
            waiting.clear()
    totals = [part.totals for part in parts.parts]
    return reference, evicted, totals


GROWTHS = [
    growth_of(),
    growth_of(admit=3),
    growth_of("lfu", admit=2),
    growth_of(idle=30, forget=20, admit=2),
    growth_of("lfu", idle=25),
    growth_of(idle_time=60),
    growth_of(idle_time=95.5, idle=50, forget=20, admit=2),
]


@pytest.mark.few(12)
@pytest.mark.parametrize("growth", GROWTHS, ids=str)
@pytest.mark.parametrize("ahead", [0, 1, 4, 16, 64])
def test_decisions_do_not_depend_on_the_lookahead(growth, ahead):
    reference, evicted, totals = run(growth, stream(1, 60), ahead=ahead)
    assert evicted > 20
    assert sum(t.evicted for t in totals) == evicted
    assert sum(t.live for t in totals) == len(reference.live)
    assert sum(t.pending for t in totals) == len(reference.pending)
    assert sum(t.forgotten for t in totals) == reference.forgotten
    assert sum(t.lookups for t in totals) == sum(len(a) for a, _ in stream(1, 60))


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_decisions_do_not_depend_on_the_ranks(growth, ranks):
    run(growth, stream(2, 40), ranks=ranks, ahead=3)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_no_batch_waits_for_the_compiler(policy):
    part = Vocabulary(growth_of(policy, admit=2, idle=9, forget=9), MIN_ROWS, 0, NUM_BUCKETS)
    part.warm_up()
    assert len({signature[-2:] for signature in counting_loops.observe.signatures}) == 4
    own, other = counting_loops, eviction_loops
    loops = [own.observe, own.resolve, other.decide, other.sweep]
    compiled = [loop.signatures for loop in loops]
    many = keys_of([address_in(b, n) for b in range(1000) for n in range(40)])
    # The map grows, keys repeat, and some become idle.
    for batch in [many, np.tile(many[:50], 20)] * 3 + [many[:50]] * 20:
        part.announce(batch.copy(), NO_COUNTS, 1)
        part.release()
    assert part.totals.evicted
    assert [loop.signatures for loop in loops] == compiled


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
def test_batches_that_mostly_repeat_keys_follow_the_rules(growth):
    batches = [(addresses * 30, samples) for addresses, samples in stream(7, 40)]
    assert all(20 * len(set(addresses)) <= len(addresses) for addresses, _ in batches)
    _, evicted, _ = run(growth, batches, ahead=2)
    assert evicted > 20


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
def test_reshards_keep_the_vocabulary(growth):
    reshards = ((15, 3), (30, 1), (45, 8))
    _, evicted, _ = run(growth, stream(3, 60), ranks=4, ahead=4, reshards=reshards)
    assert evicted > 20


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
def test_canceled_batches_leave_no_trace(growth):
    run(growth, stream(4, 40), ahead=5, cancel_at=(3, 11, 12, 30))


@pytest.mark.parametrize("growth", [growth_of(admit=2), growth_of(idle=1)], ids=str)
def test_keys_of_an_accumulated_step_stay(growth):
    run(growth, stream(5, 60), ahead=7, accumulate=3)


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
def test_batches_canceled_within_an_accumulated_step_leave_no_trace(growth):
    run(growth, stream(5, 60), ahead=7, accumulate=3, cancel_at=(4, 14, 32, 50))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["lru", "lfu"]),
    admit=st.integers(1, 4),
    forget=st.none() | st.integers(1, 60),
    idle=st.none() | st.integers(1, 60),
    idle_time=st.none() | st.integers(1, 200),
    ranks=st.sampled_from([1, 2, 3, 8]),
    ahead=st.integers(0, 9),
    reshard=st.tuples(st.integers(1, 24), st.sampled_from([1, 2, 5])),
    cancel=st.integers(0, 24),
)
def test_the_vocabulary_follows_the_rules_for_any_stream(
    seed, policy, admit, forget, idle, idle_time, ranks, ahead, reshard, cancel
):
    growth = growth_of(policy, admit, forget, idle, idle_time=idle_time)
    run(
        growth, stream(seed, 25, 80), ranks=ranks, ahead=ahead, reshards=(reshard,),
        cancel_at=(cancel,),
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_idle_keys_leave(policy):
    growth = growth_of(policy, admit=2, forget=30, idle=45)
    _, _, totals = run(growth, stream(6, 40), ranks=2, ahead=2)
    assert sum(t.forgotten for t in totals) > 5
    unlimited = run(growth_of(policy, admit=2), stream(6, 40))[2]
    assert sum(t.evicted for t in totals) != sum(t.evicted for t in unlimited)


def test_idle_time_counts_from_the_first_known_time():
    """Keys loaded from a run without event times count as used at the time of the first batch."""
    before, key = Vocabulary(growth_of(), MIN_ROWS, 0, NUM_BUCKETS), keys_of([address_in(9, 1)])
    before.announce(key, NO_COUNTS, 1)
    before.release()
    part = Vocabulary(growth_of(idle_time=100), MIN_ROWS, 0, NUM_BUCKETS)
    part.load(before.save().saved)
    evicted = []
    for batch in range(1030):  # a whole round of sweeps; the time advances by at most 100
        part.announce(key[:0], NO_COUNTS, 1, time=5000 + min(100, batch))
        part.release()
        evicted.append(part.totals.evicted)
    assert evicted[-1] == 0
    for _ in range(1030):
        part.announce(key[:0], NO_COUNTS, 1, time=5101)
        part.release()
    assert part.totals.evicted == 1


def test_long_runs_forget_old_times():
    part = Vocabulary(growth_of(idle_time=100), MIN_ROWS, 0, NUM_BUCKETS)
    key = keys_of([address_in(9, 1)])
    for batch in range(9000):
        part.announce(key, NO_COUNTS, 1, time=batch)
        part.release()
    assert part.save().size("times") < 5000
    assert part.totals.evicted == 0


def test_new_limits_keep_keys_whose_idle_time_is_unknown():
    """A run without limits keeps the clock of its latest batches only, so older keys stay until the
    new limits have passed since the first of these batches.
    """
    key = keys_of([address_in(9, 1)])
    for admit in (1, 2):  # a key with a row, or a pending key
        before = Vocabulary(growth_of(admit=admit), MIN_ROWS, 0, NUM_BUCKETS)
        for batch in range(9000):
            before.announce(key if batch == 4000 else key[:0], NO_COUNTS, 1, time=batch)
            before.release()
        saved = before.save().saved
        assert saved.clock.size < 5000
        limits = [{"forget": 10**4}] if admit == 2 else [{"idle": 10**4}, {"idle_time": 10**4}]
        for limit in limits:
            part = Vocabulary(growth_of(admit=admit, **limit), MIN_ROWS, 0, NUM_BUCKETS)
            part.load(saved)
            num_keys = []
            for batch in range(2 * 1024):  # two rounds of sweeps; 10 samples per batch
                part.announce(key[:0], NO_COUNTS, 10, time=9000 + 10 * batch)
                part.release()
                num_keys.append(part.totals.live + part.totals.pending)
            assert num_keys[1023] == 1, limit
            assert num_keys[-1] == 0, limit


def test_occurrences_far_apart_do_not_count_together():
    part = Vocabulary(growth_of(admit=2, forget=50), MIN_ROWS, 0, NUM_BUCKETS)
    key = keys_of([address_in(8191, 1)])  # a bucket whose keys are not swept in this test

    def row_after(samples: int) -> int:
        part.announce(key[:0], NO_COUNTS, samples - 1)
        part.release()
        rows, _ = part.announce(key, NO_COUNTS, 1)
        part.release()
        return int(rows[0])

    assert row_after(5) == 0
    assert row_after(51) == 0
    assert (part.totals.pending, part.totals.forgotten) == (1, 1)
    part.announce(key, NO_COUNTS, 51)
    part.roll_back()
    assert row_after(50) > 0
    assert (part.totals.pending, part.totals.forgotten) == (0, 1)


def test_frequencies_start_at_the_admission_count_after_a_change_of_policy():
    keys = keys_of([address_in(9, n) for n in range(4)])
    before = Vocabulary(growth_of(admit=2), MIN_ROWS, 0, NUM_BUCKETS)
    before.announce(np.repeat(keys, 2), NO_COUNTS, 8)
    before.release()
    part = Vocabulary(growth_of("lfu", admit=2), MIN_ROWS, 0, NUM_BUCKETS)
    part.load(before.save().saved)
    part.announce(keys[:1].copy(), NO_COUNTS, 1)
    part.release()
    saved = part.save().saved
    counts = dict(zip(counting_loops.keys_of(saved.addresses), saved.counts, strict=True))
    assert [counts[key] for key in keys] == [3, 2, 2, 2]


@pytest.mark.parametrize(
    ("forget", "use"), [(None, "set it to a number of samples"), (9, "use a smaller number")]
)
def test_a_map_has_at_most_as_many_slots_as_it_can_address(forget, use):
    part = Vocabulary(growth_of(forget=forget), MIN_ROWS, 0, NUM_BUCKETS)
    text = rf"forget_after_samples is .* a map has at most {2**31 - 1}; {use}, or use more ranks"
    with pytest.raises(ConfigError, match=text):
        part.reserve(16 * 10**8)
    state = part.arrays.state
    state[km.SLOTS], state[km.ENTRIES] = 18 * 10**8, 15 * 10**8
    with pytest.raises(ConfigError, match=text):
        part.announce(keys_of([address_in(9, 1)]), NO_COUNTS, 1)
    last = km.home(2**63 - 1, part._scale(km.MAX_SLOTS), int(state[km.FIRST]))
    assert last == km.MAX_SLOTS - 1


def test_a_full_bucket_refuses_keys():
    part = Vocabulary(growth_of(), MIN_ROWS, 0, NUM_BUCKETS)
    keys = keys_of([address_in(9, n) for n in range(6)])
    rows, _ = part.announce(keys, NO_COUNTS, 6)
    assert sorted(rows.tolist()) == [0, 0, 1, 2, 3, 4]
    part.release()
    assert part.totals.refused_lookups == 2
    assert part.totals.live == 4


@pytest.mark.parametrize("bucket", [0, 9])
def test_the_proposed_number_of_rows_is_enough(bucket):
    large = Vocabulary(growth_of(rows=2 * MIN_ROWS), 2 * MIN_ROWS, 0, NUM_BUCKETS)
    large.announce(keys_of([address_in(bucket, n) for n in range(5)]), NO_COUNTS, 5)
    large.release()
    saved = large.save().saved
    with pytest.raises(CheckpointError, match=f"bucket {bucket} has 5 saved keys") as caught:
        Vocabulary(growth_of(), MIN_ROWS, 0, NUM_BUCKETS).load(saved)
    rows = int(str(caught.value).split("use ")[1].split()[0])
    part = Vocabulary(growth_of(rows=rows), rows, 0, NUM_BUCKETS)
    part.load(saved)
    assert part.totals.live == 5


def test_many_keys_grow_the_map():
    growth = growth_of(rows=2**20)
    part = Vocabulary(growth, 2**20, 0, NUM_BUCKETS)
    random = np.random.default_rng(7)
    keys = random.integers(-(2**63), 2**63 - 1, 200_000)
    rows: dict[int, int] = {}
    for start in range(0, keys.size, 5_000):
        batch = keys[start : start + 5_000]
        found, _ = part.announce(batch, NO_COUNTS, 1)
        rows |= dict(zip(batch.tolist(), found.tolist(), strict=True))
        assert (part.peek(batch) == 0).all()
        part.release()
        assert (part.peek(batch) == found).all()
    assert len(set(rows.values())) == keys.size
    assert part.totals.live == keys.size
    assert (part.peek(keys) == [rows[key] for key in keys.tolist()]).all()


@pytest.mark.parametrize("first", [10, 300, 830])
@pytest.mark.parametrize("second", [6_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_batch_may_be_much_larger_than_those_before(first, second):
    random = np.random.default_rng(4)
    for num_batches in range(1, 60):
        part = Vocabulary(growth_of(rows=2**20), 2**20, 0, NUM_BUCKETS)
        keys = random.integers(-(2**63), 2**63 - 1, num_batches * first + second)
        for batch in np.split(keys, np.cumsum([first] * num_batches)):
            part.announce(batch.copy(), NO_COUNTS, 1)
            part.release()
        assert part.totals.live == keys.size
        assert len(set(part.peek(keys).tolist()) - {0}) == keys.size


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 26), (16, 2), (1024, 5), (1040, 3)])
def test_columns_hold_a_matrix_with_an_odd_number_of_lines_between_them(shape):
    matrix = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, shape)
    columns = requests.empty_columns(shape[1], shape[0])
    assert columns.shape[1] // requests.LINE % 2 == 1
    requests.write_columns(matrix, columns)
    np.testing.assert_array_equal(columns[:, : shape[0]], matrix.T)
    again = np.empty_like(matrix)
    requests.read_columns(columns, again)
    np.testing.assert_array_equal(again, matrix)


def test_a_small_map_grows_earlier_than_a_large_one():
    part = Vocabulary(growth_of(rows=2**20), 2**20, 0, NUM_BUCKETS)
    random = np.random.default_rng(2)
    for _ in range(40):
        part.announce(random.integers(-(2**63), 2**63 - 1, 5000), NO_COUNTS, 5000)
        part.release()
        slots = part.arrays.slots.shape[0] - km.PAD
        if not part.arrays.new_slots.size > 2 * km.PAD:
            assert part.totals.live <= 0.6 * slots


@pytest.mark.parametrize("buckets", [(0, NUM_BUCKETS), (0, 5), (130, 200), (8000, NUM_BUCKETS)])
@pytest.mark.parametrize("size", [0, 1, 7, 3000])
def test_distinct_addresses_are_sorted(buckets, size):
    first, last = (bucket - NUM_BUCKETS // 2 for bucket in buckets)
    low, high = first << km.SHIFT, (last << km.SHIFT) - 1
    random = np.random.default_rng(3)
    addresses = random.integers(low, high, size, endpoint=True)
    addresses[: size // 3] = addresses[-1:]  # repeated
    addresses[size // 2 : size // 2 + 2] = (low, high)[: max(0, min(2, size - size // 2))]
    part = Vocabulary(growth_of(rows=2**20), 2**20, *buckets)
    state = part.arrays.state
    scale = size * state[km.SCALE] // state[km.SLOTS]
    found = eviction_loops.ascending(addresses, state[km.FIRST], scale)
    np.testing.assert_array_equal(found, np.unique(addresses))

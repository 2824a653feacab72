"""Tests that training, saving, and resuming with cached tables is bit-identical to doing so with
tables on the device.
"""

import itertools
import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.config.table_rules import TableRule
from sbpflow.embedding.cache.records import file_records
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.storage.store import StoreRequest, device_store
from sbpflow.runtime.ranks.world import World
from tests.quick import quick
from tests.training.test_stores import (
    BATCH,
    SAVED_AT,
    STEPS,
    UNIQUE_COLUMNS,
    Case,
    batch_of,
    check_checkpoints,
    make_job,
    saver_of,
    train,
    train_and_save,
)


class FileStores:
    """Makes cached stores over files, and records them."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.folder, self.slots = folder, slots
        self.made: list[CachedStore] = []

    def __call__(self, request: StoreRequest) -> Any:
        if not request.num_rows:
            return device_store(request)
        store = CachedStore(
            request,
            lambda rows, layout: file_records(rows, layout, self.folder, "key"),
            min(self.slots, request.num_rows),
        )
        self.made.append(store)
        return store


def whole_run(world: World, case: Case, folder: Path) -> list[dict[str, Any]]:
    """Train, save during training, and continue; then resume from the checkpoint that the other
    kind of store saved.
    """
    found: list[dict[str, Any]] = []
    # Slots for the rows of a step's two batches and, if rows are sent early, of the next batch.
    slots = (2 + case.early) * 4 * BATCH
    cached = FileStores(folder / "scratch", slots)
    kinds = {"device": device_store, "file": cached}
    for name, stores in kinds.items():
        job = make_job(world, case, stores)
        losses, log_bytes = train_and_save(job, case, folder / name)
        job.trainer.drain()
        found.append({"losses": losses, "log_bytes": log_bytes})
    for name, stores in kinds.items():
        other = "device" if name == "file" else "file"
        resumed = make_job(world, case, stores)
        resumed.restore(open_checkpoint(folder / other / f"step-{SAVED_AT}"))
        again = train(resumed, SAVED_AT + 1, STEPS, case.lookahead)
        saver_of(resumed, folder / f"{name}-resumed").save(STEPS, {})
        resumed.trainer.drain()
        found.append({"losses": again})
    for store in cached.made:
        store._mover.wait_idle()
    found[1]["evicted"] = sum(store.counts.written for store in cached.made)
    found[1]["leased"] = sum(store._mover.planner.num_leased for store in cached.made)
    return found


def check(ranks, size: int, case: Case, folder: Path) -> None:
    found = ranks(size, whole_run, case, folder)
    for device, cached, *resumed in found:
        assert cached["losses"] == device["losses"]
        for one in resumed:
            assert one["losses"] == device["losses"][-len(one["losses"]) :]
        assert cached["leased"] == 0
        assert cached["log_bytes"] > 0
    assert sum(cached["evicted"] for _, cached, *_ in found) > 20
    check_checkpoints(folder, "file")


KERNELS = ("torch", "numba", "fbgemm")
RULES = {
    "torch": [("lazy_adam", None), ("rowwise_adagrad", "bfloat16"), ("ftrl", None)],
    "numba": [("lazy_adam", None), ("rowwise_adagrad", "bfloat16"), ("adagrad", "float16")],
    "fbgemm": [("adagrad", None)],
}


def cases() -> list[tuple[int, Case]]:
    """Return a case for each scheme and number of ranks, with a random kernel, optimizer, row
    dtype, and lookahead, and some fixed cases.
    """
    draw = random.Random(30)
    chosen = []
    for size in (1, 2, 4):
        for scheme in "123":
            kernel = draw.choice(KERNELS)
            rule, rows = draw.choice(RULES[kernel])
            clipped = draw.random() < 0.3 and kernel != "fbgemm"
            lookahead = draw.choice((1, 2, 5))
            chosen.append((size, Case(scheme, kernel, rule, rows, clipped, None, lookahead)))
    unique = Case("3", "numba", "rowwise_adagrad", tables=UNIQUE_COLUMNS, lookahead=4)
    early = Case("3", "numba", "rowwise_adagrad", "bfloat16", lookahead=4, early=True)
    chosen.append((2, replace(early, late=True)))
    chosen.append((4, replace(early, kernel="torch", sparse="lazy_adam", clipped=True)))
    hops = {"*": TableRule(sbp="(S(0), S(0))", ranks=((0, 1), (2, 3)))}
    two_level = Case("3", "numba", "rowwise_adagrad", "bfloat16", True, hops, lookahead=4)
    chosen.append((4, two_level))
    return [*chosen, (2, unique), (2, replace(unique, kernel="torch", clipped=True))]


@pytest.mark.few(1)
@pytest.mark.parametrize(("size", "case"), quick(cases(), lambda n: n in (4, 9, 12)), ids=str)
def test_cached_tables_equal_tables_on_the_device(ranks, memory, size, case):
    pytest.importorskip({"fbgemm": "fbgemm_gpu"}.get(case.kernel, case.kernel))
    check(ranks, size, case, memory)


def evaluate_both_ways(world: World, folder: Path) -> list[list[list[float]]]:
    """Predict batches separately and consecutively; in the second case, the next batch's rows are
    read during each prediction.
    """
    case = Case("3", "torch", "lazy_adam", lookahead=2)
    cached = FileStores(folder / "scratch", 2 * 4 * BATCH)
    coming = [batch_of(number).part(world.rank, world.size) for number in range(100, 106)]
    found: list[list[list[float]]] = []
    reads: Counter[CachedStore] = Counter()
    changed = threading.Condition()
    for stores in (device_store, cached):
        job = make_job(world, case, stores)
        train(job, 1, 5, case.lookahead)
        job.trainer.drain()
        found.append([job.trainer.predict(batch).tolist() for batch in coming])
        for store in cached.made:

            def read_into(rows, into, store=store, real=store._mover.read_into):
                assert threading.current_thread() is store._thread
                real(rows, into)
                with changed:
                    reads[store] += 1
                    changed.notify_all()

            store._mover.read_into = read_into
        compute = job.trainer._dense_logits
        computed = itertools.count(2)

        def waiting(*args, compute=compute, computed=computed, **named):
            wanted = min(next(computed), len(coming))
            with changed:
                done = [lambda s=store: reads[s] >= wanted for store in cached.made]
                assert all(changed.wait_for(check, 30) for check in done)
            return compute(*args, **named)

        job.trainer._dense_logits = waiting
        predicted = list(job.trainer.predict_all(coming))
        assert [batch for batch, _ in predicted] == coming
        found.append([logits.tolist() for _, logits in predicted])
    assert cached.made
    return found


def test_the_rows_of_the_next_evaluation_batch_are_read_during_the_computation(ranks, memory):
    for device, *others in ranks(2, evaluate_both_ways, memory):
        assert all(other == device for other in others)

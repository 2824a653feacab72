"""Tests that training, saving, and resuming with tables in a store with few slots is bit-identical
to doing so with tables on the device.
"""

import itertools
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.write import PieceWriter
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import TableRule
from sbpflow.config.train_options import ClipConfig
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.embedding.storage.store import device_store
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.saved.save import Saver
from sbpflow.runtime.ranks.world import World
from tests.embedding.dict_store import DictStores
from tests.quick import quick
from tests.training.wdl_case import Rows, make_config

FIELDS = Fields.of(
    ("I1", "I2", "I3"),
    {"C1": 900, "C2": 611, "C3": 1203, "C4": 3},
    {"C1xC2": 1571, "C3xC4": 829},
)
BATCH = 10
STEPS, SAVED_AT = 12, 5
UNIQUE_COLUMNS = {"deep.*": TableRule(sbp="S(1)", exchange="unique")}


@dataclass(frozen=True)
class Case:
    """A job; ``lookahead`` is the number of batches announced after a step's own."""

    scheme: str
    kernel: str
    sparse: str
    rows: str | None = None
    clipped: bool = False
    tables: dict[str, TableRule] | None = None
    lookahead: int = 1
    early: bool = False  # send early rows
    late: bool = False  # send late gradients, which requires steps of one batch

    def slots(self, size: int) -> int:
        """Return the number of slots for all batches in flight: up to two in a step, one with late
        gradients, and the announced batches.

        Each of four ranks owns at most two thirds of a batch's rows.
        """
        rows = 4 * BATCH * (2 + self.late + self.lookahead)
        return 2 * rows // 3 if size == 4 else rows

    def config(self) -> Config:
        dtype = "float32" if self.rows or self.kernel != "torch" else "float64"
        wide = None if self.kernel == "fbgemm" else Ftrl(lr=0.1)
        config = make_config(
            self.scheme, self.sparse, dense="adam", dtype=dtype, kernel=self.kernel, wide=wide,
            dim=8, batch_size=BATCH, tables=self.tables,
        )  # fmt: skip
        if self.early:
            train = replace(config.train, early_rows=True, late_gradients=self.late)
            config = replace(config, train=train)
        if self.rows:
            config = replace(config, parallel=replace(config.parallel, table_dtype=self.rows))
        if self.clipped:
            clip = ClipConfig(norm=0.05, rows=True)
            config = replace(config, optimizer=replace(config.optimizer, clip=clip))
        return config


def batch_of(number: int) -> Rows:
    """Return skewed ids with duplicates; every fifth batch is short."""
    generator = torch.Generator().manual_seed(number)
    n = BATCH - 7 if number % 5 == 4 else BATCH
    ids = [(torch.rand(n, generator=generator) ** 2 * field.rows).int() for field in FIELDS.ids]
    dense = torch.randn(n, len(FIELDS.dense), generator=generator)
    labels = (torch.rand(n, generator=generator) < 0.5).float()
    return Rows(labels, dense, torch.stack(ids, 1), n)


def batches_of(step: int, world: World) -> list[Rows]:
    """Return one batch, or two batches in every third step."""
    numbers = [2 * step, 2 * step + 1] if step % 3 == 0 else [2 * step]
    return [batch_of(number).part(world.rank, world.size) for number in numbers]


def train(job: Job, first: int, last: int, lookahead: int) -> list[float]:
    """Run steps ``first`` to ``last``, with predictions in between; return once all rows are
    final.
    """
    world, found = job.boxing.world, []
    job.trainer.drain()  # drop batches that were announced before a save
    job.trainer.lookahead = lookahead
    most = 1 if any(group.late_gradients for group in job.plan.embeddings.groups) else 2
    steps = {step: batches_of(step, world)[:most] for step in range(first, last + 1 + lookahead)}
    coming = (batch for batches in steps.values() for batch in batches)
    for step in range(first, last + 1):
        while job.trainer.num_announced < len(steps[step]) + lookahead:
            job.trainer.announce(next(coming))
        found.append(float(job.trainer.step(steps[step])))
        if step % 4 == 0:  # while the announced batches are in flight
            found += job.trainer.predict(batch_of(999).part(world.rank, world.size)).tolist()
    job.trainer.settle()
    return found


def make_job(world: World, case: Case, stores: Any) -> Job:
    spec, plan = plan_run(case.config(), FIELDS, world_size=world.size, device_type="cpu")
    return build_job(case.config(), spec, plan, Boxing(world), stores=stores)


def saver_of(job: Job, folder: Path) -> Saver:
    folder.mkdir(exist_ok=True)
    return Saver(
        folder, job.boxing, job.state, run="r", deadline_s=60, stores=job.embeddings.stores
    )


def train_and_save(job: Job, case: Case, at: Path) -> tuple[list[float], int]:
    """Save slowly during training, then again; return the losses, and the bytes that the first save
    logged.
    """
    real = PieceWriter.write

    def slow(self: PieceWriter, data: memoryview) -> None:
        time.sleep(0.001)
        real(self, data)

    losses = train(job, 1, 4, case.lookahead) + train(job, 5, SAVED_AT, case.lookahead)
    saver = saver_of(job, at)
    PieceWriter.write = slow
    try:
        saver.start(SAVED_AT, {})
        losses += train(job, SAVED_AT + 1, STEPS, case.lookahead)
        saver.wait()
    finally:
        PieceWriter.write = real
    saver.save(STEPS, {})
    return losses, 0 if saver.last_cost is None else saver.last_cost.log_bytes


def whole_run(world: World, case: Case, folder: Path) -> list[dict[str, Any]]:
    """Train, save during training, continue, and resume from the checkpoint: with rows on the
    device, and with stores of few slots.
    """
    found: list[dict[str, Any]] = []
    for name, stores in (("device", device_store), ("slots", DictStores(case.slots(world.size)))):
        job = make_job(world, case, stores)
        at = folder / name
        losses, log_bytes = train_and_save(job, case, at)
        resumed = make_job(world, case, stores)
        resumed.restore(open_checkpoint(at / f"step-{SAVED_AT}"))
        again = train(resumed, SAVED_AT + 1, STEPS, case.lookahead)
        saver_of(resumed, folder / f"{name}-resumed").save(STEPS, {})
        for one in (job, resumed):
            one.trainer.drain()
        made = stores.made if isinstance(stores, DictStores) else []
        found.append(
            {
                "losses": losses,
                "again": again,
                "log_bytes": log_bytes,
                "evicted": sum(store.evicted for store in made),
                "announced": max((store.most_announced for store in made), default=0),
                "leased": sum(sum(store._leases.values()) for store in made),
            }
        )
    return found


def check(ranks, size: int, case: Case, folder: Path) -> None:
    pytest.importorskip({"fbgemm": "fbgemm_gpu"}.get(case.kernel, case.kernel))
    results = ranks(size, whole_run, case, folder)
    for device, slots in results:
        assert slots["losses"] == device["losses"]
        assert device["again"] == slots["again"] == device["losses"][-len(device["again"]) :]
        assert slots["leased"] == 0
        assert slots["announced"] >= 2, "the batches of a step are leased together"
        assert slots["log_bytes"] > 0
    assert sum(slots["evicted"] for _, slots in results) > 20
    check_checkpoints(folder, "slots")


def check_checkpoints(folder: Path, other: str) -> None:
    """Check that results with rows on the device and with ``other`` stores are equal, and that
    steps changed the rows.
    """
    names = (f"device/step-{SAVED_AT}", f"device/step-{STEPS}", f"device-resumed/step-{STEPS}")
    for name in names:
        one, two = (open_checkpoint(folder / n) for n in (name, name.replace("device", other)))
        assert one.tensors.keys() == two.tensors.keys()
        for tensor in one.tensors:
            assert one.tensor(tensor).equal(two.tensor(tensor)), (name, tensor)
    before, after = (open_checkpoint(folder / name) for name in names[:2])
    assert not before.tensor("tables/deep.C1").equal(after.tensor("tables/deep.C1"))


KINDS = [("torch", "lazy_adam", None), ("numba", "rowwise_adagrad", "bfloat16"),
         ("numba", "lazy_adam", None), ("torch", "rowwise_adagrad", "bfloat16")]  # fmt: skip
QUICK = {(1, "1"), (2, "2"), (4, "3")}
CASES = [
    pytest.param(
        size,
        Case(scheme, *KINDS[number % len(KINDS)]),
        marks=[pytest.mark.slow] * ((size, scheme) not in QUICK),
    )
    for number, (size, scheme) in enumerate(itertools.product((1, 2, 4), "123"))
]


@pytest.mark.parametrize(("size", "case"), CASES, ids=str)
def test_a_store_of_few_slots_equals_the_device(ranks, memory, size, case):
    check(ranks, size, case, memory)


FAR = ((1, "3"), (2, "1"), (4, "3"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "case"),
    quick(
        [
            (2, Case("3", "torch", "lazy_adam", clipped=True)),
            (2, Case("3", "numba", "rowwise_adagrad", "float16", clipped=True)),
            (2, Case("3", "numba", "rowwise_adagrad", tables=UNIQUE_COLUMNS)),
            (2, Case("1", "fbgemm", "adagrad")),
            (1, Case("3", "fbgemm", "adagrad")),
            *((size, Case(scheme, "numba", "lazy_adam", lookahead=4)) for size, scheme in FAR),
        ],
        lambda n: n in (1, 2, 3, 5),
    ),
    ids=str,
)
def test_other_kernels_exchanges_and_clipping_work(ranks, memory, size, case):
    check(ranks, size, case, memory)


def refused(world: World, case: Case) -> str:
    with pytest.raises(ValueError, match="cannot store a B table") as error:
        make_job(world, case, DictStores(case.slots(world.size)))
    return str(error.value)


def test_copies_on_several_ranks_are_refused(ranks):
    case = Case("3", "torch", "lazy_adam", tables={"deep.C2": TableRule(sbp="B")})
    for message in ranks(2, refused, case):
        assert message.startswith("table deep.C2: DictStore cannot store")

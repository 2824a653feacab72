"""Tests that models with rows by key equal models with rows by number.

The tests cover any number of ranks, batches in flight or not, and checkpoints. Sums of float64 in
another order stay within 1e-9.
"""

import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.save import Saver
from sbpflow.checkpoint.write import PieceWriter
from sbpflow.config.schema import Config
from sbpflow.embedding.plan.numbering import NUMBERINGS, keys_of
from sbpflow.embedding.plan.tables import Shard, TableConfig
from sbpflow.embedding.storage.initial import initial_rows
from sbpflow.embedding.storage.store import device_store
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.models.wdl import WdlConfig
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.export.plain_model import plain_model
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.saved.saved_model import load_values
from sbpflow.runtime.random.streams import mix
from sbpflow.runtime.ranks.world import World
from tests.embedding.key_map import KeyedStores
from tests.training.wdl_case import Rows, make_config

FIELDS = Fields.of(
    ("I1", "I2", "I3"),
    {"C1": 300, "C2": 211, "C3": 403, "C4": 3},
    {"C1xC2": 571, "C3xC4": 229},
)
BY_NUMBER = ("C4", "C3xC4")  # these tables have rows by number in every run
BATCH, STEPS, SAVED_AT = 12, 12, 5
NEVER_TRAINED = 999  # number of a batch
EXTREME = (0, -1, -(2**63), 2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class KeyedWdl(WdlConfig):
    """Implements Wide & Deep with most tables by key and more ``num_rows`` than keys.

    The ranks have different numbers of keys.
    """

    num_rows: int | None = None

    def spec(self, fields: Fields) -> Any:
        spec = super().spec(fields)
        outputs = tuple(
            replace(output, tables=tuple(self._by_key(table) for table in output.tables))
            for output in spec.outputs
        )
        return replace(spec, outputs=outputs)

    def _by_key(self, table: TableConfig) -> TableConfig:
        if table.features[0] in BY_NUMBER:
            return table
        return replace(table, by_key=True, num_rows=self.num_rows or table.num_rows + 100)


def keys_for(feature: str, rows: torch.Tensor) -> torch.Tensor:
    """Return the keys of a feature's rows: distinct, equal on all ranks, four of them extreme."""
    if feature in BY_NUMBER:
        return rows.long()
    keys_of_rows = mix(rows.long() + 1000 * len(feature))
    for row, key in enumerate(EXTREME):
        keys_of_rows[rows == row] = key
    return keys_of_rows


@dataclass(frozen=True)
class Case:
    scheme: str = "3"
    kernel: str = "torch"
    sparse: str = "lazy_adam"
    keyed: bool = True
    lookahead: int = 1
    slots: int | None = None  # rows of a store after the store with keys
    num_rows: int | None = None

    def config(self) -> Config:
        config = make_config(
            self.scheme, self.sparse, dense="adam", kernel=self.kernel, dim=4, batch_size=BATCH
        )
        if not self.keyed:
            return config
        model = config.model
        options = {field.name: getattr(model, field.name) for field in fields(model)}
        return replace(config, model=KeyedWdl(**options, num_rows=self.num_rows))


def batch_of(number: int, case: Case) -> Rows:
    """Return skewed ids with duplicates and new ids in every batch."""
    generator = torch.Generator().manual_seed(number)
    n = BATCH - 7 if number % 5 == 4 else BATCH
    rows = [(torch.rand(n, generator=generator) ** 2 * field.rows).int() for field in FIELDS.ids]
    if case.keyed:
        rows = [keys_for(field.name, ids) for field, ids in zip(FIELDS.ids, rows, strict=True)]
    dense = torch.randn(n, len(FIELDS.dense), generator=generator)
    labels = (torch.rand(n, generator=generator) < 0.5).float()
    return Rows(labels, dense, torch.stack(rows, 1), n)


def train(job: Job, case: Case, first: int, last: int) -> tuple[list[float], list[float]]:
    """Return losses of these steps, and logits in between, mostly for keys that are never trained.

    Every third step has two batches. Batches after the last step remain announced.
    """
    world, losses, logits = job.boxing.world, list[float](), list[float]()
    job.trainer.drain()
    job.trainer.lookahead = case.lookahead

    def batches(step: int) -> list[Rows]:
        numbers = [2 * step, 2 * step + 1] if step % 3 == 0 else [2 * step]
        return [batch_of(number, case).part(world.rank, world.size) for number in numbers]

    steps = {step: batches(step) for step in range(first, last + 1 + case.lookahead)}
    coming = (batch for step in steps.values() for batch in step)
    for step in range(first, last + 1):
        while job.trainer.num_announced < len(steps[step]) + case.lookahead:
            job.trainer.announce(next(coming))
        losses.append(float(job.trainer.step(steps[step])))
        if step % 4 == 0:
            part = batch_of(NEVER_TRAINED, case).part(world.rank, world.size)
            logits += job.trainer.predict(part).tolist()
    return losses, logits


def make_job(world: World, case: Case) -> tuple[Job, KeyedStores]:
    stores = KeyedStores(case.slots)
    spec, plan = plan_run(case.config(), FIELDS, world_size=world.size, device_type="cpu")
    job = build_job(case.config(), spec, plan, Boxing(world), stores=stores)
    if not case.keyed:
        start_as_keys(job, case.config().run.seed)
    return job, stores


def start_as_keys(job: Job, seed: int) -> None:
    """Give rows by number the starting values of their keys."""
    for stored in job.embeddings.stored():
        shard, table = stored.shard, stored.shard.table
        if table.features[0] in BY_NUMBER:
            continue
        whole = replace(table, by_key=True)
        rows = torch.arange(shard.row_start, shard.row_stop)
        of_keys = Shard(
            table=whole, rank=0, row_start=0, row_stop=table.num_rows,
            col_start=shard.col_start, col_stop=shard.col_stop,
        )  # fmt: skip
        values = initial_rows(
            mix(keys_for(table.features[0], rows)), (of_keys,), seed=seed, width=shard.width,
            optimizer=job.embeddings.plan.optimizer, dtype=torch.float64, row_dtype=torch.float64,
        )  # fmt: skip
        stored.store.write(stored.rows, values)


def saver_of(job: Job, folder: Path) -> Saver:
    folder.mkdir(exist_ok=True)
    return Saver(
        folder, job.boxing, job.state, run="r", deadline_s=60, stores=job.embeddings.stores
    )


def whole_run(world: World, case: Case, folder: Path) -> dict[str, Any]:
    """Train, save in the background, continue, save again."""
    job, stores = make_job(world, case)
    losses, logits = train(job, case, 1, SAVED_AT)
    saver, real = saver_of(job, folder), PieceWriter.write

    def slow(self: PieceWriter, data: memoryview) -> None:
        time.sleep(0.001)
        real(self, data)

    PieceWriter.write = slow
    try:
        saver.start(SAVED_AT, {})
        more = train(job, case, SAVED_AT + 1, STEPS)
        saver.wait()
    finally:
        PieceWriter.write = real
    in_flight = sum(store.num_live - store.num_trained for store in stores.made)
    saver.save(STEPS, {})
    job.trainer.drain()
    assert all(store.num_live == store.num_trained for store in stores.made)
    cost = saver.last_cost
    return {
        "losses": losses + more[0],
        "logits": logits + more[1],
        "logged": 0 if cost is None else cost.log_bytes,
        "in_flight": in_flight,
        "rows": [store.num_live for store in stores.made],
    }


def go_on(world: World, case: Case, folder: Path, own: Path) -> dict[str, Any]:
    """Resume from the first checkpoint and train to the last step, which is saved separately."""
    job, _ = make_job(world, case)
    train(job, case, 20, 22)  # ids of other batches; they must leave no trace
    job.trainer.drain()
    job.restore(open_checkpoint(folder / f"step-{SAVED_AT}"))
    losses, logits = train(job, case, SAVED_AT + 1, STEPS)
    saver_of(job, own).save(STEPS, {})
    return {"losses": losses, "logits": logits}


def equal(one: Path, other: Path, *, exactly: bool) -> None:
    first, second = open_checkpoint(one), open_checkpoint(other)
    assert first.tensors.keys() == second.tensors.keys()
    for name in first.tensors:
        a, b = first.tensor(name), second.tensor(name)
        assert a.shape == b.shape, name
        if exactly or not a.is_floating_point():
            assert torch.equal(a, b), name
        else:
            assert torch.allclose(a, b, rtol=0, atol=1e-9), name


def close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(
        abs(a - b) < 1e-9 for a, b in zip(one, other, strict=True)
    )


def all_logits(found: list[dict[str, Any]]) -> list[float]:
    """Predict all rows in order; each prediction is for one batch, split over the ranks."""
    each = [one["logits"] for one in found]
    count = STEPS // 4
    per = [len(one) // count for one in each]
    return [
        x
        for n in range(count)
        for one, p in zip(each, per, strict=True)
        for x in one[n * p : (n + 1) * p]
    ]


@pytest.fixture
def alone(ranks, memory) -> tuple[dict[str, Any], Path]:
    """Return one run on one rank, and its folder."""
    (found,) = ranks(1, whole_run, Case(), memory / "alone")
    return found, memory / "alone"


CASES = [
    (1, Case(kernel="numba", sparse="rowwise_adagrad")),
    (2, Case("2")),
    (2, Case("3", "numba", "rowwise_adagrad")),
    (4, Case("3")),
    (4, Case("2", "numba", "rowwise_adagrad")),
    (2, Case("3", slots=90)),
]


@pytest.mark.parametrize(("size", "case"), CASES, ids=str)
def test_rows_by_key_train_as_rows_by_number(ranks, memory, size, case):
    by_number = ranks(size, whole_run, replace(case, keyed=False, slots=None), memory / "number")
    runs = {}
    for lookahead in (0, 1, 4):
        one = replace(case, lookahead=lookahead)
        runs[lookahead] = ranks(size, whole_run, one, memory / f"keys-{lookahead}")
    for run in runs.values():
        for rank in range(size):
            assert run[rank]["losses"] == by_number[rank]["losses"]
            assert run[rank]["logits"] == by_number[rank]["logits"]
            assert run[rank]["logged"] > 0
    assert sum(run["in_flight"] for run in runs[0]) == 0
    assert sum(run["in_flight"] for run in runs[4]) > 20, "keys of batches that are not trained"
    for step in (SAVED_AT, STEPS):
        for lookahead in (1, 4):
            equal(
                memory / f"keys-0/step-{step}",
                memory / f"keys-{lookahead}/step-{step}",
                exactly=True,
            )
    check_rows(memory / "number", memory / "keys-4")


def check_rows(by_number: Path, by_key: Path) -> None:
    """Check that the saved rows of all trained keys equal the rows by number."""
    counts = []
    for step in (SAVED_AT, STEPS):
        rows, keys = (open_checkpoint(one / f"step-{step}") for one in (by_number, by_key))
        for name in ("deep.C1", "wide.C1xC2"):
            feature = name.partition(".")[2]
            saved_keys = keys.tensor(f"tables/{name}/keys")
            assert torch.equal(mix(saved_keys), mix(saved_keys).sort().values)
            number_of = {
                int(key): row
                for row, key in enumerate(
                    keys_for(feature, torch.arange(rows.tensors[f"tables/{name}"].shape[0]))
                )
            }
            at = torch.tensor([number_of[key] for key in saved_keys.tolist()])
            names = [
                one
                for one in rows.tensors
                if one == f"tables/{name}" or one.startswith(f"tables/{name}/")
            ]
            assert len(names) > 1
            for tensor in names:
                assert torch.equal(keys.tensor(tensor), rows.tensor(tensor)[at]), tensor
            counts.append(len(saved_keys))
    assert counts[2] > counts[0] > 10, "there are more keys at the second save"


@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_ranks_has_the_same_keys_and_rows(ranks, memory, alone, size):
    one, folder = alone
    results = ranks(size, whole_run, Case(lookahead=4), memory / "run")
    assert close(results[0]["losses"], one["losses"])
    assert close(all_logits(results), one["logits"])
    sizes = [sum(rows) for rows in (rank["rows"] for rank in results)]
    assert len(set(sizes)) > 1, "ranks have different numbers of rows"
    assert sum(sizes) == sum(one["rows"])
    for step in (SAVED_AT, STEPS):
        equal(folder / f"step-{step}", memory / f"run/step-{step}", exactly=False)


@pytest.mark.parametrize(("size", "other"), [(4, 1), (1, 2), (2, 2), (3, 4)])
def test_runs_resume_on_other_world_sizes(ranks, memory, size, other):
    case = Case("2" if size == 4 else "3", slots=90 if other == 2 else None)
    whole = ranks(size, whole_run, case, memory / "run")
    for lookahead in (0, 4):
        again = replace(case, lookahead=lookahead)
        own = memory / f"again-{lookahead}"
        results = ranks(other, go_on, again, memory / "run", own)
        losses = whole[0]["losses"][SAVED_AT:]
        if size == other:
            assert results[0]["losses"] == losses
        assert close(results[0]["losses"], losses)
        equal(memory / f"run/step-{STEPS}", own / f"step-{STEPS}", exactly=size == other)


def room(world: World, folder: Path) -> str:
    """Check that a rank without room for its keys reports it."""
    job, _ = make_job(world, Case(num_rows=9))
    with pytest.raises(CheckpointError, match="rank 0 has 9 rows for") as error:
        job.restore(open_checkpoint(folder / f"step-{SAVED_AT}"))
    return str(error.value)


def refusals(world: World, folder: Path) -> None:
    case, checkpoint = Case(), open_checkpoint(folder / f"step-{STEPS}")
    spec, plan = plan_run(case.config(), FIELDS, world_size=1, device_type="cpu")
    with pytest.raises(ConfigError, match=r"by_key=True .* DeviceStore"):
        build_job(case.config(), spec, plan, Boxing(world), stores=device_store)
    with pytest.raises(ConfigError, match=r"rows by key, .*Job\.trainer\.predict"):
        plain_model(
            spec, plan.embeddings, checkpoint.tensor, saved=checkpoint.tensors, num_dense=3, seed=0
        )
    by_number, _ = make_job(world, replace(case, keyed=False))
    with pytest.raises(CheckpointError, match=r"it has .*keys"):
        by_number.restore(checkpoint)


def predicted(world: World, folder: Path) -> list[float]:
    """Return the predictions of a job with the values of a checkpoint, without optimizer state."""
    job, _ = make_job(world, Case())
    load_values(job, open_checkpoint(folder / f"step-{STEPS}"))
    return job.trainer.predict(batch_of(NEVER_TRAINED, Case())).tolist()


def test_saved_models_predict_and_refuse_invalid_requests(ranks, alone):
    found, folder = alone
    (logits,) = ranks(1, predicted, folder)
    assert logits == found["logits"][-len(logits) :]
    ranks(1, refusals, folder)
    (message,) = ranks(1, room, folder)
    assert "saved keys; use num_rows of" in message


def test_cases_have_their_claimed_properties():
    keys = keys_for("C1", torch.arange(300))
    assert set(EXTREME) <= set(keys.tolist())
    assert keys.unique().numel() == 300
    assert torch.equal(keys_of(NUMBERINGS[True].addresses(keys)), keys)

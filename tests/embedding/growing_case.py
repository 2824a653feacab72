"""Trains small models with growing tables, and computes their expected results."""

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.restore import check_fits, restore
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.ids.batch_ids import Bags
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan, plan_embeddings
from sbpflow.embedding.plan.growth import MIN_ROWS, NUM_BUCKETS, Eviction, Growth
from sbpflow.embedding.plan.row_storage import RowStorage
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.run.saved.save import Saver
from sbpflow.runtime.random.streams import unmix
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import balanced_sizes
from tests.embedding.cases import Spec
from tests.embedding.vocabulary_reference import address_in

# Sweeps remove the idle keys of buckets 130 to 330 after batches 8 to 20.
BUCKETS = (0, 130, 200, 260, 330, 8191, 8192, NUM_BUCKETS - 1)
BATCH = 24
UNIQUE = Spec("S(0)", "unique")
GROWTH = Growth(evict=Eviction(max_rows=MIN_ROWS), admit_count=2)


@dataclass(frozen=True, kw_only=True)
class GrowingCase:
    """Fields f and g grow, each with a deep and a wide table; the ids of h are row numbers."""

    deep: Spec = UNIQUE
    wide: Spec = UNIQUE
    optimizer: SparseOptimizer = field(default_factory=lambda: sparse_optimizer("adagrad", lr=0.1))
    growth: Growth = GROWTH
    dtype: torch.dtype = torch.float64
    row_dtype: torch.dtype | None = None
    kernel: str = "torch"
    ahead: int = 1
    accumulate: int = 1
    batches: int = 24
    clip: float | None = None
    ragged: bool = False
    storage: RowStorage | None = None
    timed: bool = True
    device: str = "cpu"

    def features(self) -> list[FeatureConfig]:
        lists = {"hotness": 3, "ragged": True, "weighted": True} if self.ragged else {}
        return [FeatureConfig(name="f", **lists), FeatureConfig(name="g"), FeatureConfig(name="h")]

    def outputs(self) -> list[OutputConfig]:
        def table(kind: str, name: str, dim: int) -> TableConfig:
            rows, growth = (MIN_ROWS, self.growth) if name != "h" else (9, None)
            return TableConfig(
                name=f"{kind}.{name}", features=(name,), num_rows=rows, dim=dim, growth=growth,
                storage=self.storage if name != "h" and kind == "deep" else None,
            )  # fmt: skip

        return [
            OutputConfig(name="deep", tables=tuple(table("deep", name, 8) for name in "fgh")),
            OutputConfig(
                name="wide", tables=tuple(table("wide", name, 1) for name in "fgh"), combine="sum"
            ),
        ]

    def plan(self, size: int) -> EmbeddingPlan:
        layouts = {
            table.name: (self.deep if output.name == "deep" else self.wide).layout(
                size, self.device
            )
            for output in self.outputs()
            for table in output.tables
        }
        for name in ("deep.h", "wide.h"):
            layouts[name] = Spec("S(0)", "reduce").layout(size, self.device)
        return plan_embeddings(
            self.outputs(), layouts, features=self.features(), optimizer=self.optimizer,
            dtype=self.dtype, world=Placement.line(self.device, size),
            backend={"cpu": "gloo", "cuda": "nccl"}[self.device],
            batch_size=BATCH, row_dtype=self.row_dtype,
        )  # fmt: skip


@cache
def addresses_of(batch: int, name: str) -> tuple[int, ...]:
    """Return the address of each sample's key. Some keys are frequent, and new keys replace old
    ones.
    """
    random = np.random.default_rng((batch, *name.encode()))
    numbers = (random.random(BATCH) ** 2 * 12).astype(int) + batch // 4
    buckets = random.integers(0, len(BUCKETS), BATCH)
    return tuple(address_in(BUCKETS[b], int(n)) for b, n in zip(buckets, numbers, strict=True))


def keys_of(addresses: Any) -> torch.Tensor:
    return unmix(torch.tensor(addresses, dtype=torch.int64))


def size_of(batch: int) -> int:
    return BATCH - batch % 3


def time_of(batch: int, mine: slice) -> int | None:
    """Return the latest event time of a rank's samples, or None without samples; ranks usually have
    different times.
    """
    times = 1000 + 5 * batch + np.random.default_rng(batch).integers(0, 40, size_of(batch))[mine]
    return int(times.max()) if times.size else None


def ids_of(case: GrowingCase, batch: int, mine: slice) -> dict[str, Any]:
    """Return a rank's ids in a batch."""
    random = np.random.default_rng(batch)
    h = torch.from_numpy(random.integers(0, 9, BATCH))[: size_of(batch)][mine]
    f, g = (keys_of(addresses_of(batch, name))[: size_of(batch)] for name in "fg")
    ids: dict[str, Any] = {"g": g[mine], "h": h, "f": f[mine]}
    if case.ragged:  # sample i has i % 4 keys
        lengths = torch.arange(size_of(batch)) % 4
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.cat([f, g])[torch.arange(int(ends[-1])) % size_of(batch)]
        weights = torch.from_numpy(random.normal(size=int(ends[-1]))).to(case.dtype)
        start, stop = ends[mine.start], ends[min(mine.stop, size_of(batch))]
        own = ends[mine.start : min(mine.stop, size_of(batch)) + 1] - start
        ids["f"] = Bags(values[start:stop], own, weights[start:stop])
    return ids


def coefficients(batch: int, name: str, width: int) -> np.ndarray:
    return np.random.default_rng((batch, *name.encode())).normal(size=(size_of(batch), width))


class Run:
    """Trains a case on this rank, with up to ``case.ahead`` batches announced in advance."""

    def __init__(self, world: World, case: GrowingCase, **more: Any) -> None:
        self.world, self.case, self.boxing = world, case, Boxing(world)
        plan = case.plan(world.size)
        self.collection = EmbeddingCollection(
            plan, self.boxing, seed=11, kernel=case.kernel, **more
        )
        self.trained, self.announced = 0, 0
        self.window: deque[Any] = deque()
        self.outputs: list[dict[str, np.ndarray]] = []

    def mine(self, batch: int) -> slice:
        sizes = balanced_sizes(size_of(batch), self.world.size)
        return slice(sum(sizes[: self.world.rank]), sum(sizes[: self.world.rank + 1]))

    def announce(self) -> None:
        last = min(self.case.batches, self.trained + self.case.ahead + 1)
        while self.announced < last:
            batch = self.announced
            started = self.collection.start_id_exchange(
                ids_of(self.case, batch, self.mine(batch)), size_of(batch), training=True,
                begins_step=batch % self.case.accumulate == 0,
                event_time=time_of(batch, self.mine(batch)) if self.case.timed else None,
            )  # fmt: skip
            self.collection.receive_ids(started)
            self.window.append(started)
            self.announced += 1

    def train(self, until: int) -> None:
        """Train up to batch ``until``, a multiple of ``accumulate``."""
        while self.trained < until:
            self.announce()
            batch, started = self.trained, self.window.popleft()
            self.collection.lookup(started)
            vectors = self.collection.gather_outputs(started)
            for name, value in vectors.items():
                factors = coefficients(batch, name, value.shape[1])[self.mine(batch)]
                (value.tanh() * torch.from_numpy(factors).to(value)).sum().backward()
            self.collection.send_grads(started)
            self.collection.receive_grads(started)
            self.trained += 1
            if self.trained % self.case.accumulate == 0:
                self.clip()
                self.collection.update(self.trained // self.case.accumulate)
            self.outputs.append({n: v.detach().cpu().double().numpy() for n, v in vectors.items()})

    def clip(self) -> None:
        if self.case.clip is not None:
            squares = self.collection.gradient_squares().reshape(1)
            if self.world.size > 1:
                torch.distributed.all_reduce(squares)
            factor = (self.case.clip / squares.sqrt()).clamp(max=1.0)
            self.collection.scale_gradients(factor.to(self.case.dtype).squeeze(0))

    def drain(self) -> None:
        for started in self.window:
            self.collection.cancel(started)
        self.window.clear()
        self.announced = self.trained

    def evaluate(self, batch: int) -> dict[str, np.ndarray]:
        ids = ids_of(self.case, batch, self.mine(batch))
        values = self.collection.forward(ids, size_of(batch), training=False)
        return {name: value.cpu().double().numpy().copy() for name, value in values.items()}

    def saver(self, folder: Path, **more: Any) -> Saver:
        return Saver(
            folder, self.boxing, self.collection.state, run="r", deadline_s=60.0,
            stores=self.collection.stores, **more,
        )  # fmt: skip

    def restore(self, path: Path, trained: int) -> None:
        checkpoint, state = open_checkpoint(path), self.collection.state()
        check_fits(checkpoint, state)
        restore(checkpoint, state)
        self.trained = self.announced = trained


class CancelingRun(Run):
    """Cancels announced batches in the middle of every step, and announces them again."""

    def clip(self) -> None:
        super().clip()
        ids = ids_of(self.case, 0, self.mine(0))
        self.collection.cancel(self.collection.start_id_exchange(ids, size_of(0), training=False))
        self.drain()


def run_case(
    world: World, case: GrowingCase, folder: Path | None = None, kind: type[Run] = Run
) -> dict[str, Any]:
    """Train on all batches, evaluate every six batches, and save at the end to ``folder``."""
    run = kind(world, case)
    evaluated = []
    for until in range(0, case.batches + 1, 6):
        run.train(until)
        evaluated.append(run.evaluate(until % case.batches))
        evaluated.append(run.evaluate((until + 2) % case.batches))
    run.drain()
    counts = run.collection.growth_counts()
    if folder is not None:
        run.saver(folder).save(run.trained, {})
    return {"outputs": run.outputs, "evaluated": evaluated, "counts": counts}


def joined(results: list[dict[str, Any]], key: str) -> list[dict[str, np.ndarray]]:
    """Return the outputs of whole batches."""
    return [
        {name: np.concatenate([one[key][at][name] for one in results]) for name in first}
        for at, first in enumerate(results[0][key])
    ]


def saved_tensors(path: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    return {
        name: (checkpoint.tensor(name).double() if tensor.dtype.is_floating_point
               else checkpoint.tensor(name)).numpy()
        for name, tensor in checkpoint.tensors.items()
    }  # fmt: skip


def check_equal(one: Path, other: Path, *, atol: float = 1e-9) -> None:
    """Check that two checkpoints have rows within ``atol`` and bit-equal vocabularies. Totals may
    be distributed over the ranks in any way.
    """
    first, second = saved_tensors(one), saved_tensors(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        if name.startswith("vocabularies/") and name.endswith("/totals"):
            np.testing.assert_array_equal(
                values.reshape(-1, 8).sum(0), second[name].reshape(-1, 8).sum(0), err_msg=name
            )
        elif name.startswith("vocabularies/") or atol == 0:
            np.testing.assert_array_equal(values, second[name], err_msg=name)
        else:
            np.testing.assert_allclose(values, second[name], rtol=0, atol=atol, err_msg=name)

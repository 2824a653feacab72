"""Tests that cached tables give the same results as uncached tables. Cases cover schemes, kernels,
optimizers, row formats, and 1, 2, and 4 ranks. A case trains 14 steps with tables on the device,
and again with caches that contain only some of the rows. Both runs accumulate gradients, predict
between steps, and save a checkpoint while training continues. Then each run resumes from the other
run's checkpoint. Losses, predictions, and all tensors of the three checkpoints must be equal bit
for bit.
"""

import itertools
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from benchmarks.network import start_ranks
from benchmarks.record import Results
from benchmarks.reshard import Rows
from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.config.schema import Config, DataConfig, OptimizerConfig, RunConfig
from sbpflow.config.table_rules import ParallelConfig, Scheme, TableRule
from sbpflow.config.train_options import ClipConfig
from sbpflow.embedding.cache.records import file_records
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.store import RowStore, StoreFactory, StoreRequest, device_store
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.saved.save import Saver
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.sbp import balanced_sizes

BATCH, STEPS, SAVED_AT = 12, 14, 6
FIELDS = Fields.of(
    ("I1", "I2"), {"C1": 900, "C2": 611, "C3": 1203, "C4": 3}, {"C1xC2": 1571, "C3xC4": 829}
)
SIZES = (1, 2, 4)
SCHEMES = ("1", "2", "3", "columns, unique")
RULES = {"sgd": 0.1, "adagrad": 0.05, "rowwise_adagrad": 0.05, "lazy_adam": 0.01, "ftrl": 0.1}
BY_KERNEL = {"torch": tuple(RULES), "numba": tuple(RULES), "fbgemm": ("sgd", "adagrad")}


@dataclass(frozen=True)
class Case:
    """A training job that announces ``lookahead`` batches in advance."""

    size: int
    scheme: str
    kernel: str
    optimizer: str
    rows: Literal["float32", "bfloat16"]
    lookahead: int
    clipped: bool

    @property
    def slots(self) -> int:
        """Return enough slots for the rows of two batches. On 4 ranks with scheme 2 or 3, no rank
        owns more than two thirds of these rows.
        """
        rows = 2 * BATCH * len(FIELDS.ids)
        return 2 * rows // 3 if self.size == 4 and self.scheme in ("2", "3") else rows

    def config(self) -> Config:
        """Return the job's configuration without a storage rule."""
        unique = {"deep.*": TableRule(sbp="S(1)", exchange="unique")}
        columns = self.scheme == "columns, unique"
        parallel = ParallelConfig(
            device="cpu",
            scheme="3" if columns else cast(Scheme, self.scheme),
            kernel=cast(Any, self.kernel),
            table_dtype=self.rows,
            tables=unique if columns else {},
        )
        clip = ClipConfig(norm=0.05, rows=True) if self.clipped else None
        sparse = sparse_optimizer(self.optimizer, lr=RULES[self.optimizer])
        return Config(
            run=RunConfig(seed=7),
            data=DataConfig(batch_size=BATCH),
            model=WdlConfig(
                embedding_dim=16,
                hidden=(7, 6),
                dropout=0.2,
                wide=WideConfig(crosses=CROSSES),
            ),
            parallel=parallel,
            optimizer=OptimizerConfig(sparse=sparse, clip=clip),
        )


CROSSES = (("C1", "C2"), ("C3", "C4"))


def all_cases() -> list[Case]:
    """Return all cases; lookahead and clipping vary from case to case."""
    kinds = [
        (kernel, rule, rows)
        for kernel, rules in BY_KERNEL.items()
        for rule in rules
        for rows in (("float32",) if kernel == "fbgemm" else ("float32", "bfloat16"))
    ]
    return [
        Case(size, scheme, *kind, (1, 2, 5, 9)[place % 4], place % 3 == 0 and kind[0] != "fbgemm")
        for place, (size, scheme, kind) in enumerate(itertools.product(SIZES, SCHEMES, kinds))
    ]


def picked(count: int, seed: int) -> list[Case]:
    """Return a seeded sample of the cases, or all cases if ``count`` is 0."""
    cases = all_cases()
    return random.Random(seed).sample(cases, count) if count else cases


def make_rows(number: int, world: World) -> Rows:
    """Generate skewed ids with duplicates; every fifth batch is short."""
    generator = torch.Generator().manual_seed(number)
    count = BATCH - 7 if number % 5 == 4 else BATCH
    ids = torch.stack(
        [(torch.rand(count, generator=generator) ** 2 * f.rows).int() for f in FIELDS.ids], 1
    )
    dense = torch.randn(count, len(FIELDS.dense), generator=generator)
    labels = (torch.rand(count, generator=generator) < 0.4).float()
    sizes = balanced_sizes(count, world.size)
    mine = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
    return Rows(labels[mine], dense[mine], ids[mine], count)


class CachedStores:
    """Creates cached stores over files."""

    def __init__(self, folder: Path, slots: int) -> None:
        self._folder, self._slots = folder, slots
        self.made: list[CachedStore] = []

    def __call__(self, request: StoreRequest) -> RowStore:
        if not request.num_rows:
            return device_store(request)
        store = CachedStore(
            request,
            lambda rows, layout: file_records(rows, layout, self._folder, "benchmark"),
            min(self._slots, request.num_rows),
        )
        self.made.append(store)
        return store


def _make_job(world: World, case: Case, stores: StoreFactory) -> Job:
    spec, plan = plan_run(case.config(), FIELDS, world_size=world.size, device_type="cpu")
    return build_job(case.config(), spec, replace(plan, lookahead=1), Boxing(world), stores=stores)


def _train(job: Job, first: int, last: int, lookahead: int) -> list[float]:
    """Return the losses of the steps, and predictions made with batches in flight."""
    world, found = job.boxing.world, list[float]()
    job.trainer.drain()
    job.trainer.lookahead = lookahead
    numbers = {
        step: [2 * step, 2 * step + 1] if step % 3 == 0 else [2 * step]
        for step in range(first, last + 1 + lookahead)
    }
    steps = {step: [make_rows(n, world) for n in some] for step, some in numbers.items()}
    coming = itertools.chain.from_iterable(steps.values())
    for step in range(first, last + 1):
        while job.trainer.num_announced < len(steps[step]) + lookahead:
            job.trainer.announce(next(coming))
        found.append(float(job.trainer.step(list(steps[step]))))
        if step % 4 == 0:
            found += job.trainer.predict(make_rows(999, world)).tolist()
    return found


def _saver(job: Job, folder: Path) -> Saver:
    folder.mkdir(exist_ok=True)
    return Saver(
        folder, job.boxing, job.state, run="m", deadline_s=60, stores=job.embeddings.stores
    )


def run_case(world: World, case: Case, folder: Path) -> dict[str, Any]:
    """Return the names of the values that differ on this rank, and the number of rows that caches
    wrote back.
    """
    cached = CachedStores(folder / "scratch", case.slots)
    kinds: dict[str, StoreFactory] = {"device": device_store, "cached": cached}
    losses: dict[str, list[float]] = {}
    for name, stores in kinds.items():
        job = _make_job(world, case, stores)
        losses[name] = _train(job, 1, SAVED_AT, case.lookahead)
        saver = _saver(job, folder / name)
        saver.start(SAVED_AT, {})
        losses[name] += _train(job, SAVED_AT + 1, STEPS, case.lookahead)
        saver.wait()
        saver.save(STEPS, {})
        job.trainer.drain()
    world.barrier()
    for name, stores in kinds.items():
        other = "device" if name == "cached" else "cached"
        job = _make_job(world, case, stores)
        job.restore(open_checkpoint(folder / other / f"step-{SAVED_AT}"))
        losses[f"{name}, resumed"] = _train(job, SAVED_AT + 1, STEPS, case.lookahead)
        _saver(job, folder / f"{name}-resumed").save(STEPS, {})
        job.trainer.drain()
    differs = [name for name, some in losses.items() if some != losses["device"][-len(some) :]]
    if world.rank == 0:
        differs += _differing_tensors(folder)
    world.barrier()
    return {"differs": differs, "written": sum(store.counts.written for store in cached.made)}


def _differing_tensors(folder: Path) -> list[str]:
    pairs = [
        ("device", "cached", SAVED_AT),
        ("device", "cached", STEPS),
        ("device", "device-resumed", STEPS),
        ("device", "cached-resumed", STEPS),
    ]
    found: list[str] = []
    for first, second, step in pairs:
        one, two = (open_checkpoint(folder / name / f"step-{step}") for name in (first, second))
        if one.tensors.keys() != two.tensors.keys():
            found.append(f"{second}, step {step}: the tensors differ")
            continue
        found += [
            f"{second}, step {step}: {name}"
            for name in one.tensors
            if not _same_bits(one.tensor(name), two.tensor(name))
        ]
    return found


def _same_bits(one: Tensor, other: Tensor) -> bool:
    views = [tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*views)


def _worker(folder: str, count: str, seed: str) -> None:
    """Run one rank and write a line per case to ``found-SIZE-R.jsonl``."""
    torch.set_num_threads(1)
    with World.start("cpu", timeout_s=120) as world:
        files = [Path(folder) / f"found-{world.size}-{rank}.jsonl" for rank in range(world.size)]
        done = frozenset[int].intersection(*(frozenset(_found_in(file)) for file in files))
        world.barrier()  # no rank may write before all ranks have read
        for number, case in enumerate(picked(int(count), int(seed))):
            if case.size != world.size or number in done:
                continue
            work = Path(folder) / f"case-{number}"
            work.mkdir(exist_ok=True)
            found = run_case(world, case, work)
            with files[world.rank].open("a") as file:
                file.write(json.dumps([number, found]) + "\n")
            world.barrier()
            if world.rank == 0:
                shutil.rmtree(work)


def _found_in(file: Path) -> dict[int, dict[str, Any]]:
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return dict(json.loads(line) for line in lines if line.endswith("\n"))


def _groups(cases: list[Case]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield groups of case numbers with the same kernel, row format, and number of ranks."""
    for size, kernel, rows in itertools.product(SIZES, BY_KERNEL, ("float32", "bfloat16")):
        key = {"size": size, "kernel": kernel, "rows": rows}
        numbers = [n for n, case in enumerate(cases) if key.items() <= asdict(case).items()]
        if numbers:
            yield key, numbers


def measure(count: int, seed: int, kept: Path | None) -> None:
    """Record the cases and the number of cases that differ; raise SystemExit if any case
    differs.
    """
    results = Results("cache_matrix", recorded=not count)
    cases = picked(count, seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = kept or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for size in SIZES:
            words = [str(folder), str(count), str(seed)]
            start_ranks("benchmarks.cache_matrix", size, words, link=None)
        found: dict[int, list[dict[str, Any]]] = {}
        for file in folder.glob("found-*.jsonl"):
            for number, values in _found_in(file).items():
                found.setdefault(number, []).append(values)
    differing = {
        number: sorted({name for rank in ranks for name in rank["differs"]})
        for number, ranks in found.items()
    }
    for key, numbers in _groups(cases):
        results.add(
            ranks=key["size"],
            kernel=key["kernel"],
            rows=key["rows"],
            cases=len(numbers),
            optimizers=sorted({cases[n].optimizer for n in numbers}),
            schemes=sorted({cases[n].scheme for n in numbers}),
            steps=STEPS,
            rows_written_back=sum(rank["written"] for n in numbers for rank in found[n]),
            differing=sum(bool(differing[n]) for n in numbers),
        )
    for number, names in differing.items():
        if names:
            raise SystemExit(
                f"{cases[number]}: results differ from those without a cache: {', '.join(names)}"
            )


def main() -> None:
    """Run one rank of ``benchmarks.cache matrix``."""
    if len(sys.argv) != 5 or sys.argv[1] != "--worker":
        raise SystemExit("run python -m benchmarks.cache matrix")
    _worker(*sys.argv[2:])


if __name__ == "__main__":
    main()

"""Saves under one layout and world size, loads under another, and compares losses and state.

    python -m benchmarks.reshard             every pair of layouts with every optimizer, for Wide
                                             & Deep, with bfloat16 rows, and with a torch module
    python -m benchmarks.reshard --count 100 a seeded sample
    python -m benchmarks.reshard --folder F  store finished work in F; run it again to continue

The reference is a run of 10 + 20 steps. From the checkpoint after 10 steps, a second run continues
for 20 steps under the other layout. Every rank compares its whole state, including copies, with the
state saved at the end. With the same layout, all bits are equal; with other layouts, sums are
computed in a different order.
"""

import argparse
import itertools
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.network import start_ranks
from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.config.schema import (
    Adam,
    Config,
    DataConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from sbpflow.config.table_rules import ParallelConfig, TableRule
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.embedding.rules.lazy_adam import LazyAdam
from sbpflow.embedding.rules.rowwise_adagrad import RowwiseAdagrad
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.model.spec import Fields, embedding_output
from sbpflow.run.model.torch_model import TorchModel
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.saved.save import Saver
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.sbp import balanced_sizes

BATCH, SEED = 30, 7
LOOKAHEAD = 4  # number of batches in flight during a save; they must not affect the saved state
# Sizes that are not divisible by 2 or 4; C4 has fewer rows than there are ranks.
FIELDS = Fields.of(("I1", "I2"), {"C1": 37, "C2": 11, "C3": 53, "C4": 3}, {"C1xC2": 71})
SPARSE = {
    "rowwise_adagrad": RowwiseAdagrad(lr=0.05),
    "lazy_adam": LazyAdam(lr=1e-2),
    "ftrl": Ftrl(lr=0.1),
}
SCHEMES = ("dp", "1", "2", "3", "mixed")
# The rounding errors of float64 (53 bits) from summing in a different order over 30 steps are far
# below these bounds. In FTRL's state and Adam's second moments, errors may be 1e3 times as large as
# in their inputs.
BOUND = 1e-10


@dataclass(frozen=True)
class Lying:
    """A job's layout and number of ranks."""

    size: int
    scheme: str

    def config(self, case: "Case") -> Config:
        """Return the configuration of the case's job with this layout."""
        scheme, tables, dense = self.scheme, dict[str, TableRule](), dict[str, str]()
        if scheme == "mixed":
            scheme, tables, dense = "3", _mixed(self.size), {}
            if case.model == "wdl":
                dense = {"mlp.0.*": "S(0)", "mlp.1.weight": "S(1)"}
        sparse = SPARSE[case.optimizer]
        schedule = ScheduleConfig(warmup_steps=7)
        return Config(
            run=RunConfig(seed=SEED),
            data=DataConfig(batch_size=BATCH),
            model=_MODELS[case.model],
            parallel=ParallelConfig(
                device="cpu",
                scheme=scheme,
                dtype="float64",
                table_dtype="bfloat16" if case.half else None,
                kernel="torch",
                tables=tables,
                dense=dense,
            ),
            optimizer=OptimizerConfig(
                sparse=sparse,
                dense=Adam(lr=1e-3),
                schedule=ScheduleConfig() if isinstance(sparse, Ftrl) else schedule,
            ),
        )


def _mixed(size: int) -> dict[str, TableRule]:
    """Return layouts with uneven rows, columns, one rank, copies, and, on four ranks, a grid of
    uneven parts.
    """
    last = size - 1
    rules = {
        "deep.C1": TableRule(sbp="S(0)", sizes=(*[5] * last, 37 - 5 * last), exchange="unique"),
        "deep.C2": TableRule(sbp="S(1)"),
        "deep.C3": TableRule(sbp="S(0)", ranks=(last,)),
        "deep.C4": TableRule(sbp="B"),
    }
    if size == 4:
        rules["deep.C3"] = TableRule(
            sbp="(S(0), S(1))", ranks=((0, 2), (3, 1)), sizes=((40, 13), (2, 3))
        )
    return rules


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the layouts under which it is saved and loaded; ``half`` means bfloat16
    rows.
    """

    saved: Lying
    loaded: Lying
    optimizer: str
    model: str = "wdl"
    half: bool = False
    before: int = 10
    after: int = 20


class Net(nn.Module):
    """A dense part in plain torch. It has no dropout, because dropout masks would differ between
    ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4 * 5 + 2, 9)
        self.last = nn.Linear(9, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        hidden = self.first(torch.cat([vectors["deep"], dense], 1))
        return self.last(torch.relu(hidden))


@dataclass(frozen=True, kw_only=True)
class NetConfig:
    """Configures ``Net`` as the model of a run."""

    name: str = "net"

    def spec(self, fields: Fields) -> TorchModel:
        """Return a model with a single output, which contains the vectors of all tables."""
        return TorchModel(outputs=(embedding_output("deep", fields.sparse, dim=5),), make=Net)


_MODELS = {
    "wdl": WdlConfig(
        embedding_dim=5, hidden=(7, 6), dropout=0.2, wide=WideConfig(crosses=(("C1", "C2"),))
    ),
    "module": NetConfig(),
}


@dataclass
class Rows:
    """One rank's part of a batch."""

    labels: Tensor
    dense: Tensor
    ids: Tensor
    batch_size: int


def make_rows(step: int, rank: int, size: int) -> Rows:
    """Return a rank's part of the batch of a step (counted from 1); the batch depends only on the
    step.
    """
    generator = torch.Generator().manual_seed(step)
    rows = BATCH - 7 if step % 5 == 0 else BATCH
    counts = [field.rows for field in FIELDS.ids]
    ids = torch.stack(
        [(torch.rand(rows, generator=generator) ** 2 * count).int() for count in counts], 1
    )
    dense = torch.randn(rows, len(FIELDS.dense), generator=generator)
    labels = (torch.rand(rows, generator=generator) < dense[:, 0].sigmoid()).float()
    sizes = balanced_sizes(rows, size)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return Rows(labels[mine], dense[mine], ids[mine], rows)


def make_job(world: World, case: Case, lying: Lying) -> Job:
    """Return a job, built as in a run."""
    config = lying.config(case)
    spec, plan = plan_run(config, FIELDS, world_size=world.size, device_type="cpu")
    return build_job(config, spec, plan, Boxing(world))


def _train(world: World, job: Job, steps: int) -> list[float]:
    """Return the losses of ``steps`` steps; afterwards, LOOKAHEAD batches are in flight."""
    job.trainer.drain()
    job.trainer.lookahead = LOOKAHEAD
    first = job.trainer.num_steps + 1
    numbers = range(first, first + steps + LOOKAHEAD)
    rows = (make_rows(number, world.rank, world.size) for number in numbers)
    return [float(loss) for loss in itertools.islice(job.trainer.train_on(rows), steps)]


def save_and_go_on(world: World, folder: Path, case: Case) -> None:
    """Save to ``folder`` the state after the first steps, the state at the end, and the losses in
    between.
    """
    job = make_job(world, case, case.saved)
    folder.mkdir(parents=True, exist_ok=True)
    saver = Saver(folder, job.boxing, job.state, run="reshard", deadline_s=60)
    _train(world, job, case.before)
    saver.save(case.before, {})
    losses = _train(world, job, case.after)
    saver.save(case.before + case.after, {"losses": losses})


def go_on(world: World, folder: Path, case: Case) -> dict[str, float]:
    """Continue from the first checkpoint under the other layout, and compare the result with the
    second checkpoint.

    Returns the largest difference in the losses and in each state tensor on this rank.
    """
    job = make_job(world, case, case.loaded)
    job.restore(open_checkpoint(folder / f"step-{case.before}"))
    losses = _train(world, job, case.after)
    expected = open_checkpoint(folder / f"step-{case.before + case.after}")
    state = job.state()
    if state.keys() != expected.tensors.keys():
        raise RuntimeError(f"{case}: other tensors")
    reference = torch.tensor(expected.documents["losses"], dtype=torch.float64)
    found = {"losses": _apart(torch.tensor(losses, dtype=torch.float64), reference)}
    for name, tensor in state.items():
        whole = expected.tensor(name)
        flat = whole.reshape(whole.shape[0], -1) if whole.ndim else whole.reshape(1, 1)
        for part in tensor.rectangles:
            place = part.place
            there = flat[place.row_start : place.row_stop, place.col_start : place.col_stop]
            apart = _apart(part.values.reshape(there.shape), there)
            found[name] = max(apart, found.get(name, 0.0))
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    gaps = (one.double() - other.double()).abs()
    return float(gaps.max()) if gaps.numel() else 0.0


def saved_folder(folder: Path, case: Case) -> Path:
    """Return the folder of the uninterrupted run; several cases continue from this run."""
    rows = "half" if case.half else "whole"
    return folder / f"{case.model}-{rows}-{case.optimizer}-{case.saved.size}-{case.saved.scheme}"


def bound_of(case: Case) -> float:
    """Return the largest allowed difference in losses and state."""
    return 0.0 if case.saved == case.loaded else BOUND


def all_cases() -> list[Case]:
    """Return all cases that a full run compares."""
    lyings = [Lying(size, scheme) for size in (1, 2, 4) for scheme in SCHEMES]
    kinds = [("wdl", False), ("wdl", True), ("module", False)]
    return [
        Case(saved, loaded, optimizer, model, half)
        for optimizer, (model, half), saved, loaded in itertools.product(
            SPARSE, kinds, lyings, lyings
        )
    ]


def cases(*, seed: int, count: int, before: int = 10, after: int = 20) -> list[Case]:
    """Sample the cases; every eighth case is loaded under the layout under which it was saved."""
    picked = random.Random(seed).sample(all_cases(), count)
    return [
        replace(
            case,
            before=before,
            after=after,
            loaded=case.saved if place % 8 == 0 else case.loaded,
        )
        for place, case in enumerate(picked)
    ]


def save_all(world: World, folder: str, picked: Sequence[Case]) -> None:
    """Execute each uninterrupted run once, for the cases that save on this many ranks."""
    mine = {
        saved_folder(Path(folder), case): case for case in picked if case.saved.size == world.size
    }
    for where, case in mine.items():
        if not (where / f"step-{case.before + case.after}").exists():
            save_and_go_on(world, where, case)


def go_on_all(
    world: World, folder: str, picked: Sequence[Case], done: frozenset[int] = frozenset()
) -> dict[int, dict[str, float]]:
    """Return this rank's differences by case number, for the cases that load on this many ranks.

    Cases in ``done`` are skipped.
    """
    return dict(_go_on_each(world, folder, picked, done))


def _go_on_each(
    world: World, folder: str, picked: Sequence[Case], done: frozenset[int]
) -> Iterator[tuple[int, dict[str, float]]]:
    for number, case in enumerate(picked):
        if case.loaded.size == world.size and number not in done:
            yield number, go_on(world, saved_folder(Path(folder), case), case)


def _worker(folder: str, phase: str, seed: str, count: str) -> None:
    """Run one rank and write a line per case to ``found-SIZE-R.jsonl``."""
    picked = _picked(int(seed), int(count))
    with World.start("cpu", timeout_s=120) as world:
        if phase == "save":
            save_all(world, folder, picked)
            return
        files = [Path(folder) / f"found-{world.size}-{rank}.jsonl" for rank in range(world.size)]
        done = frozenset[int].intersection(*(frozenset(_found_in(file)) for file in files))
        world.barrier()  # no rank may write before all ranks have read
        with files[world.rank].open("a") as file:
            for number, found in _go_on_each(world, folder, picked, done):
                file.write(json.dumps([number, found]) + "\n")
                file.flush()


def _found_in(file: Path) -> dict[int, dict[str, float]]:
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return dict(json.loads(line) for line in lines if line.endswith("\n"))


def _picked(seed: int, count: int) -> list[Case]:
    return cases(seed=seed, count=count) if count else all_cases()


def _measure(folder: Path, seed: int, count: int) -> dict[Case, dict[str, float]]:
    """Return the largest difference on any rank for each case and tensor."""
    for phase in ("save", "go_on"):
        for size in (1, 2, 4):
            words = [str(folder), phase, str(seed), str(count)]
            start_ranks("benchmarks.reshard", size, words, link=None)
    picked = _picked(seed, count)
    found: dict[Case, dict[str, float]] = {case: {} for case in picked}
    for file in folder.glob("found-*.jsonl"):
        for number, apart in _found_in(file).items():
            worst = found[picked[number]]
            for name, value in apart.items():
                worst[name] = max(value, worst.get(name, 0.0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=0, help="0: all cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, help="the folder for finished work; default: a temporary one"
    )
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _worker(*args.worker)
        return
    results = Results("reshard", recorded=not args.count)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        largest = _measure(folder, args.seed, args.count)
    for same in (True, False):
        kinds: dict[tuple[str, str, bool], list[Case]] = defaultdict(list)
        for case in largest:
            if (case.saved == case.loaded) == same:
                kinds[case.model, case.optimizer, case.half].append(case)
        for (model, optimizer, half), some in kinds.items():
            worst = max(some, key=lambda case: max(largest[case].values()))
            results.add(
                model=model,
                optimizer=optimizer,
                rows="bfloat16" if half else "float64",
                same_layout=same,
                cases=len(some),
                steps=[worst.before, worst.after],
                beyond_bound=sum(max(largest[case].values()) > bound_of(case) for case in some),
                bound=bound_of(worst),
                largest_loss_difference=max(largest[case]["losses"] for case in some),
                largest_difference=max(largest[worst].values()),
                worst=f"{worst.saved} to {worst.loaded}",
            )


if __name__ == "__main__":
    main()

"""What is saved under one layout and world size, loaded under others: losses and state afterwards.

    python -m benchmarks.reshard             every layout to every other, each optimizer, rows of
                                             bfloat16 too, Wide & Deep and a torch module
    python -m benchmarks.reshard --count 100 a seeded sample

A run of 10 + 20 steps is the measure; its checkpoint after 10 goes on for 20 under the other
layout. Where the layout is the same the bits are; elsewhere sums are added in another order.
"""

import argparse
import itertools
import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.network import start_ranks
from benchmarks.record import Results
from models.wdl import WdlConfig, WideConfig
from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.save import Saver
from sbpflow.config.schema import (
    Adam,
    Config,
    DataConfig,
    Ftrl,
    LazyAdam,
    OptimizerConfig,
    RowwiseAdagrad,
    RunConfig,
    ScheduleConfig,
)
from sbpflow.config.table_rules import ParallelConfig, TableRule
from sbpflow.run.build_plan import plan_run
from sbpflow.run.job import Job, build_job
from sbpflow.run.model import Fields, embedding_output
from sbpflow.run.torch_model import TorchModel
from sbpflow.runtime.world import World
from sbpflow.sbp.sbp import balanced_sizes

BATCH, SEED = 30, 7
# No size divides by 2 or 4, and C4 has fewer rows than four ranks.
FIELDS = Fields.of(("I1", "I2"), {"C1": 37, "C2": 11, "C3": 53, "C4": 3}, {"C1xC2": 71})
SPARSE = {
    "rowwise_adagrad": RowwiseAdagrad(lr=0.05),
    "lazy_adam": LazyAdam(lr=1e-2),
    "ftrl": Ftrl(lr=0.1),
}
SCHEMES = ("dp", "1", "2", "3", "mixed")
# Float64 has 53 bits: 30 steps of sums in another order stay far below; a state of FTRL's or a
# square of Adam's is up to 1e3 times what it was.
BOUND = 1e-10


@dataclass(frozen=True)
class Lying:
    """How a job lies on ranks."""

    size: int
    scheme: str

    def config(self, case: "Case") -> Config:
        """Of the case's job on these ranks."""
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
    """Uneven rows, columns, one rank, copies and, on four ranks, a grid of uneven parts."""
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
    """A checkpoint's way: from a layout to a layout; ``half`` keeps rows in bfloat16."""

    saved: Lying
    loaded: Lying
    optimizer: str
    model: str = "wdl"
    half: bool = False
    before: int = 10
    after: int = 20


class Net(nn.Module):
    """A dense part of torch alone; without dropout, for a module's masks are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4 * 5 + 2, 9)
        self.last = nn.Linear(9, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        hidden = self.first(torch.cat([vectors["deep"], dense], 1))
        return self.last(torch.relu(hidden))


@dataclass(frozen=True, kw_only=True)
class NetConfig:
    """The module as a model of a run."""

    name: str = "net"

    def spec(self, fields: Fields) -> TorchModel:
        """Over one output of all tables."""
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
    num_rows: int


def make_rows(step: int, rank: int, size: int) -> Rows:
    """The batch of a step, counted from 1, which is the same whatever ran before it."""
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
    """A job as a run builds it."""
    config = lying.config(case)
    spec, plan = plan_run(config, FIELDS, world_size=world.size, device_type="cpu")
    return build_job(config, spec, plan, Boxing(world))


def _train(world: World, job: Job, steps: int) -> list[float]:
    return [
        float(job.trainer.step(make_rows(job.trainer.num_steps + 1, world.rank, world.size)))
        for _ in range(steps)
    ]


def _saver(folder: Path, job: Job) -> Saver:
    folder.mkdir(parents=True, exist_ok=True)
    return Saver(folder, job.boxing, job.state, run="reshard", deadline_s=60)


def save_and_go_on(world: World, folder: Path, case: Case) -> None:
    """Leave in ``folder`` the state after the steps before and at the end, and the losses since."""
    job = make_job(world, case, case.saved)
    _train(world, job, case.before)
    _saver(saved_folder(folder, case), job).save(case.before, {})
    losses = _train(world, job, case.after)
    _saver(saved_folder(folder, case), job).save(case.before + case.after, {"losses": losses})


def go_on(world: World, folder: Path, case: Case) -> None:
    """The same from the first of the two on, under the other layout."""
    job = make_job(world, case, case.loaded)
    job.restore(open_checkpoint(saved_folder(folder, case) / f"step-{case.before}"))
    losses = _train(world, job, case.after)
    _saver(loaded_folder(folder, case), job).save(case.before + case.after, {"losses": losses})


def saved_folder(folder: Path, case: Case) -> Path:
    """Of the run that is not interrupted; several cases go on from it."""
    rows = "half" if case.half else "whole"
    return folder / f"{case.model}-{rows}-{case.optimizer}-{case.saved.size}-{case.saved.scheme}"


def loaded_folder(folder: Path, case: Case) -> Path:
    """Of the one that goes on."""
    saved = saved_folder(folder, case)
    return saved.with_name(f"{saved.name}-to-{case.loaded.size}-{case.loaded.scheme}")


def bound_of(case: Case) -> float:
    """How far losses and state may be apart."""
    return 0.0 if case.saved == case.loaded else BOUND


def differences(folder: Path, case: Case) -> dict[str, float]:
    """The largest between the losses, and between the states at the end, by tensor."""
    one, two = (
        open_checkpoint(where(folder, case) / f"step-{case.before + case.after}")
        for where in (saved_folder, loaded_folder)
    )
    if one.tensors.keys() != two.tensors.keys():
        raise RuntimeError(f"{case}: other tensors")
    losses = [torch.tensor(found.documents["losses"], dtype=torch.float64) for found in (one, two)]
    values = {name: [found.tensor(name).double() for found in (one, two)] for name in one.tensors}
    return {
        name: float((first - second).abs().max())
        for name, (first, second) in {"losses": losses, **values}.items()
    }


def all_cases() -> list[Case]:
    """The whole matrix."""
    lyings = [Lying(size, scheme) for size in (1, 2, 4) for scheme in SCHEMES]
    kinds = [("wdl", False), ("wdl", True), ("module", False)]
    return [
        Case(saved, loaded, optimizer, model, half)
        for optimizer, (model, half), saved, loaded in itertools.product(
            SPARSE, kinds, lyings, lyings
        )
    ]


def cases(*, seed: int, count: int, before: int = 10, after: int = 20) -> list[Case]:
    """A sample of it; every eighth goes on under the layout that it was saved under."""
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
    """The uninterrupted runs of the cases that save on this many ranks, each once."""
    mine = {
        saved_folder(Path(folder), case): case for case in picked if case.saved.size == world.size
    }
    for case in mine.values():
        save_and_go_on(world, Path(folder), case)


def go_on_all(world: World, folder: str, picked: Sequence[Case]) -> None:
    """The runs of the cases that go on on this many ranks."""
    for case in picked:
        if case.loaded.size == world.size:
            go_on(world, Path(folder), case)


def _worker(folder: str, phase: str, seed: str, count: str) -> None:
    picked = cases(seed=int(seed), count=int(count)) if int(count) else all_cases()
    with World.start("cpu", timeout_s=120) as world:
        (save_all if phase == "save" else go_on_all)(world, folder, picked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=0, help="0: the whole matrix")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _worker(*args.worker)
        return
    picked = cases(seed=args.seed, count=args.count) if args.count else all_cases()
    results = Results("reshard", recorded=not args.count)
    with tempfile.TemporaryDirectory() as folder:
        for phase in ("save", "go_on"):
            for size in (1, 2, 4):
                words = [folder, phase, str(args.seed), str(args.count)]
                start_ranks("benchmarks.reshard", size, words, link=None)
        found = {case: differences(Path(folder), case) for case in picked}
    for same in (True, False):
        kinds: dict[tuple[str, str, bool], list[Case]] = defaultdict(list)
        for case in picked:
            if (case.saved == case.loaded) == same:
                kinds[case.model, case.optimizer, case.half].append(case)
        for (model, optimizer, half), some in kinds.items():
            worst = max(some, key=lambda case: max(found[case].values()))
            results.add(
                model=model,
                optimizer=optimizer,
                rows="bfloat16" if half else "float64",
                same_layout=same,
                cases=len(some),
                beyond_bound=sum(max(found[case].values()) > bound_of(case) for case in some),
                bound=bound_of(worst),
                largest_loss_difference=max(found[case]["losses"] for case in some),
                largest_difference=max(found[worst].values()),
                worst=f"{worst.saved} to {worst.loaded}",
            )


if __name__ == "__main__":
    main()

"""Measures what each engine stage costs and what each design choice gains.

    python -m benchmarks.stages [--shape dcnv2|t180|t510] [--link 1gbit]

The runs follow the order of EMBark's paper: (1) serial with every table S(0) and reduce, (2) with
overlap, (3) with a layout per table (small tables copied, other tables whole), and (4) with unique
rows for tables with few ids per sample. For comparison, two runs use whole tables and the plan of
``scheme: auto``. Further runs with unique rows omit one stage each to measure that stage's share of
the step. An omitted stage returns zeros, so only the times of such a run are meaningful.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.click_model import MLPERF_HOTNESS
from benchmarks.engine import Shape, many_tables, plan_tables, tables_of
from benchmarks.network import ranks_parser, result_of_ranks
from benchmarks.record import Results
from benchmarks.vs_torchrec import in_turns
from sbpflow.boxing.executor import Boxing, Pending
from sbpflow.boxing.step import BoxingStep
from sbpflow.config.table_layouts import resolve_table_layouts
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.exchange.all_to_all import RowTransfer
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import ExchangeStep
from sbpflow.embedding.plan.id_statistics import IdFrequencies
from sbpflow.embedding.plan.tables import TableLayout
from sbpflow.embedding.storage.measure import spread_of
from sbpflow.models.layered import LayeredPart
from sbpflow.models.layers import MlpShape
from sbpflow.models.wdl import WdlConfig, WdlSpec
from sbpflow.run.model.spec import make_parameters
from sbpflow.run.planning.auto_scheme import Candidate, Rules, candidates, rank_candidates
from sbpflow.runtime.ranks.topology import Topology
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.step_schedule import OVERLAPPED, SERIAL, StepSchedule
from sbpflow.training.trainer import Trainer

STAGES = ("serial, S(0) reduce", "+ overlap", "+ layout per table", "+ unique rows")
PLANNED = ("every table whole", "scheme: auto")
SKIPS = ("ids", "vectors", "gradients", "dense", "update")
BATCH = 2048
# For each table of MLPerf's DCNv2 (Criteo 1TB, multi-hot), about 1/100 of the number of rows (more
# for small tables).
DCNV2_ROWS = (
    400000, 390, 171, 74, 200, 3, 71, 14, 2, 400000, 30677, 4049, 11, 22, 120, 2, 9, 10, 7,
    400000, 400000, 400000, 5915, 129, 108, 36,
)  # fmt: skip


def make_shape(name: str) -> Shape:
    """Return tables and features, scaled down for two small cores: dims by 1/8, rows by 1/100 or
    1/1000.
    """
    if name == "t510":
        return many_tables(510)
    if name == "dcnv2":
        hotness, rows, dims = MLPERF_HOTNESS, DCNV2_ROWS, [16] * 26
    else:  # T180: 177 tables with 81.6 ids per sample each, here with a quarter of the ids
        random = np.random.default_rng(180)
        rows = np.exp(random.normal(7.0, 1.5, 177)).astype(int) + 2
        hotness = np.clip(random.geometric(4 / 81.6, 177), 1, 80)
        dims = random.choice([4, 8, 16, 32], 177)
    return tables_of(rows, dims, hotness)


def make_layouts(shape: Shape, stage: int, size: int) -> dict[str, TableLayout]:
    tables, features = shape
    everyone = Placement.line("cpu", size)
    rows = Layout(everyone, (Split(0),))
    if stage < 2:
        return {t.name: TableLayout(layout=rows, exchange="reduce") for t in tables}
    hotness = {f.name: f.hotness for f in features}
    layouts: dict[str, TableLayout] = {}
    load = [0.0] * size
    for table in sorted(tables, key=lambda t: -t.dim * hotness[t.features[0]]):
        ids = hotness[table.features[0]]
        if 2 * table.num_rows <= BATCH * ids // 4:
            layout = TableLayout(layout=Layout(everyone, (Broadcast(),)), exchange="local")
        elif stage > 2 and ids <= 2:
            layout = TableLayout(layout=rows, exchange="unique")
        else:
            rank = load.index(min(load))
            load[rank] += table.dim * ids
            whole = Layout(Placement.of("cpu", (rank,)), (Broadcast(),))
            layout = TableLayout(layout=whole, exchange="columns")
        layouts[table.name] = layout
    return layouts


def ranked_plans(
    shape: Shape,
    batch_size: int,
    topology: Topology,
    known: Mapping[str, IdFrequencies] | None = None,
) -> list[Candidate]:
    """Return the plans that ``scheme: auto`` compares, starting with the plan with the lowest
    price; ``known`` contains the id frequencies.
    """
    tables, features = shape
    shapes, size = {table.name: table.shape for table in tables}, topology.size
    parallel = ParallelConfig(scheme="auto")

    def plan(rules: Rules) -> EmbeddingPlan:
        layouts = resolve_table_layouts(parallel, shapes, {"auto": rules}, size)
        return plan_tables(shape, layouts, size, batch_size)

    rules = candidates(tables, features, size, batch_size, known)
    return rank_candidates(rules, plan, batch_size=batch_size, topology=topology, frequencies=known)


def plans_of(shape: Shape, size: int, gb_per_s: float | None) -> dict[str, EmbeddingPlan]:
    """Return the plan of each run."""
    topology = Topology.one_host(size)
    if gb_per_s is not None:
        topology = topology.with_link(gb_per_s)
    ranked = ranked_plans(shape, BATCH, topology, frequencies_of(shape))
    whole = next(one for one in ranked if one.name == "all whole")
    stages = {
        name: plan_tables(shape, make_layouts(shape, stage, size), size, BATCH)
        for stage, name in enumerate(STAGES)
    }
    return stages | dict(zip(PLANNED, (whole.plan, ranked[0].plan), strict=True))


def frequencies_of(shape: Shape) -> dict[str, IdFrequencies]:
    """Return the id frequencies in the form of a set's statistics: rows and lookups by powers of
    two.
    """
    tables, features = shape
    ids = np.concatenate([make_ids(shape, BATCH, (9, number)).numpy() for number in range(8)])
    found: dict[str, IdFrequencies] = {}
    column = 0
    for table, feature in zip(tables, features, strict=True):
        counts = np.bincount(ids[:, column : column + feature.hotness].reshape(-1))
        column += feature.hotness
        edges = [0, 1, *(2**n for n in range(1, 16)), 2**62]
        here = [(counts >= low) & (counts < high) for low, high in pairwise(edges)]
        bins = tuple((int(mask.sum()), int(counts[mask].sum())) for mask in here)
        found[table.features[0]] = IdFrequencies(bins, float(feature.hotness))
    return found


class Deep(LayeredPart):
    """The deep part over the tables; if ``left_out`` is true, the logits are the means of the
    vectors.
    """

    left_out = False

    def forward(
        self,
        vectors: Mapping[str, GlobalTensor],
        dense: GlobalTensor,
        *,
        training: bool,
        seed: int,
    ) -> GlobalTensor:
        if self.left_out:
            return ops.reshape(ops.reduce_mean(vectors["deep"], 1), (dense.shape[0], 1))
        return super().forward(vectors, dense, training=training, seed=seed)


class Rows(NamedTuple):
    labels: Tensor
    dense: Tensor
    ids: Tensor
    batch_size: int


class Loop:
    """Trains a CTR model with the tables, as in a run."""

    def __init__(
        self, world: World, shape: Shape, plan: EmbeddingPlan, schedule: StepSchedule
    ) -> None:
        boxing, everyone = Boxing(world), Placement.line("cpu", world.size)
        (output,) = plan.outputs
        self.tables = EmbeddingCollection(plan, boxing, seed=1)
        spec = WdlSpec(
            outputs=(output,),
            options=WdlConfig(),
            mlp=MlpShape(name="mlp", inputs=output.width + 1, hidden=(64,), outputs=1),
        )
        copied = {name: Layout(everyone, (Broadcast(),)) for name in spec.parameters}
        parameters = make_parameters(spec.parameters, copied, boxing, seed=2, dtype=torch.float32)
        self.model = Deep(spec, parameters, {})
        self.trainer = Trainer(
            self.model,
            self.tables,
            torch.optim.SGD([p.part for p in self.model.parameters.values()], lr=0.05),
            boxing,
            dtype=torch.float32,
            seed=3,
            schedule=schedule,
        )
        self.skip = ""
        self.batches = [make_rows(shape, world, number) for number in range(4)]
        self._place = 0

    def run(self, steps: int, skip: str = "") -> list[float]:
        """Train without the stage ``skip``; return the losses."""
        self.skip = skip
        self.model.left_out = skip == "dense"
        batches = [self.batches[(self._place + step) % 4] for step in range(steps)]
        self._place += steps
        return [float(loss) for loss in list(self.trainer.train_on(batches))]


def make_rows(shape: Shape, world: World, number: int) -> Rows:
    """Return this rank's rows of a batch."""
    samples = BATCH // world.size
    labels = torch.arange(samples).remainder(2).float()
    ids = make_ids(shape, samples, (world.rank, number))
    return Rows(labels, torch.zeros(samples, 1), ids, BATCH)


def make_ids(shape: Shape, samples: int, seed: int | tuple[int, ...], skew: float = 6) -> Tensor:
    """Return ids ([samples, columns]): uniform numbers to the power of ``skew``, as numbers of rows
    by frequency, which are spread over the table.
    """
    tables, features = shape
    random = np.random.default_rng(seed)
    columns = [
        (random.random((samples, f.hotness)) ** skew * t.num_rows).astype(np.int64)
        * spread_of(t.num_rows)
        % t.num_rows
        for t, f in zip(tables, features, strict=True)
    ]
    return torch.from_numpy(np.concatenate(columns, 1).astype(np.int32))


def leave_out(loop: Loop) -> None:
    """Replace the transfers on the channel ``loop.skip`` with zeros, or omit the update if it is
    "update".
    """
    real_start, real_rows, real_update = Boxing.start, RowTransfer.start, loop.tables.update

    def start(
        self: Boxing,
        steps: Sequence[BoxingStep],
        part: Tensor | None,
        channel: str,
        *,
        donate: bool = False,
    ) -> Pending:
        if channel != loop.skip or not steps:
            return real_start(self, steps, part, channel, donate=donate)
        shape = steps[-1].dst.part_shape(steps[-1].shape, self.world.rank)
        zeros = None if shape is None else torch.zeros(shape, dtype=steps[-1].dtype)
        return Pending(lambda: zeros, self.world)

    def rows(
        self: RowTransfer, step: ExchangeStep, send: Tensor, out: Sequence[int], into: Sequence[int]
    ) -> Pending:
        if self._channel != loop.skip or step.id.endswith("counts"):
            return real_rows(self, step, send, out, into)
        zeros = send.new_zeros(sum(into), *send.shape[1:])
        return Pending(lambda: zeros, self._world)

    def update(step: int) -> None:
        if loop.skip != "update":
            real_update(step)
            return
        for group in loop.tables._groups:
            group.take_collected()

    mock.patch.object(loop.tables, "update", update).start()
    mock.patch.object(Boxing, "start", start).start()
    mock.patch.object(RowTransfer, "start", rows).start()


def work(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    shape = make_shape(args.shape)
    with World.start("cpu") as world:
        plans = plans_of(shape, world.size, 0.12 if args.link == "1gbit" else None)
        loops = {
            name: Loop(world, shape, plan, SERIAL if name == STAGES[0] else OVERLAPPED)
            for name, plan in plans.items()
        }
        losses = {name: loop.run(4) for name, loop in loops.items()}
        first = losses[STAGES[0]]
        for name, loss in losses.items():
            # these runs omit no stage, so their losses must agree
            torch.testing.assert_close(loss, first, rtol=1e-4, atol=1e-6, msg=name)
        last = loops[STAGES[-1]]
        leave_out(last)
        jobs = {name: loop.run for name, loop in loops.items()}
        jobs |= {f"without {skip}": partial(last.run, skip=skip) for skip in SKIPS}
        times, _ = in_turns(world, jobs, args.steps, args.repeats)
        if world.rank == 0:
            args.output.write_text(json.dumps(times))


def main() -> None:
    parser = ranks_parser(__doc__)
    parser.add_argument("--shape", default="dcnv2", choices=["dcnv2", "t180", "t510"])
    parser.add_argument("--link")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    times = result_of_ranks("benchmarks.stages", 2, link=args.link)
    results = Results(f"stages_{args.shape}_{args.link or 'loopback'}")
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        is_whole = name in (*STAGES, *PLANNED)
        base = medians[STAGES[0]] if is_whole else medians[STAGES[-1]]
        results.add(
            benchmark="stages",
            shape=args.shape,
            link=args.link or "loopback",
            stage=name,
            step_ms=round(value, 2),
            spread_ms=[round(min(times[name]), 2), round(max(times[name]), 2)],
            **{
                "times_faster" if is_whole else "share": round(
                    base / value if is_whole else 1 - value / base, 3
                )
            },
        )


if __name__ == "__main__":
    main()

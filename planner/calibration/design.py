"""Generates what a calibration measures: random tasks, each with homogeneous plans (one shape for
all tables) and random mixes of shapes.

All random choices of a sample are seeded by the sample's number. Ranks therefore agree without
communication, and an interrupted calibration resumes where it stopped. Tables cover the ranges of
click-through-rate (CTR) models (rows, dims, ids per sample, skew). Ids follow a Zipf-Mandelbrot
law, and the id statistics are computed from the same law.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.embedding.ids.batch_ids import BatchIds, Lists
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.measure import spread_of
from sbpflow.planner import workloads
from sbpflow.planner.task import Choice, DenseWork, Plan, Shape, Task
from sbpflow.planner.workloads import Drawn, make_task
from sbpflow.sbp.sbp import balanced_sizes

# maximum number of elements in the tables of a sample; every rank that stores the tables must
# allocate them
MOST_ELEMENTS = 1 << 24
DIMS = (4, 8, 16, 32, 64)
# widths of hidden layers; narrow layers do more reads and writes per multiply-add
HIDDEN = ((16,), (64, 32), (16,), (256, 64))
# In every seventh sample, batches have as many ids as those of a large model.
LARGE_EVERY = 7
TWO_HOPS = ("(S(0), S(0))", "unique")


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The distribution of a table's ids: row k's share of lookups is proportional to (k + q) **
    -s.
    """

    s: float
    q: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A random task, the id distributions of its tables by name, and the widths of the dense part's
    hidden layers.
    """

    task: Task
    laws: Mapping[str, Law]
    hidden: tuple[int, ...] = ()


@dataclass(slots=True)
class Rows:
    """A rank's rows of a batch, in the form that ``Trainer.step`` accepts."""

    labels: Tensor
    dense: Tensor
    ids: Tensor | BatchIds
    batch_size: int


def drawing() -> str:
    """Return a digest of the sampling method; a different method generates a different sample for
    the same number.
    """
    code = [Path(file).read_bytes() for file in (__file__, workloads.__file__)]
    return hashlib.sha256(b"".join(code)).hexdigest()[:12]


def draw_sample(
    seed: int,
    world_size: int,
    device_type: str,
    optimizer: str,
    *,
    most_rows: int = 1_000_000,
    num_hosts: int = 1,
) -> Sample:
    """Generate the sample with this number."""
    random = np.random.default_rng([seed, 14])
    large = seed % LARGE_EVERY == LARGE_EVERY - 1
    count = round(float(np.exp(random.uniform(np.log(12.0) if large else 0.0, np.log(30.0)))))
    batch = 4096 if large else int(random.choice([512, 1024, 2048, 4096, 8192]))
    mixed = bool(random.random() < 0.5)
    dims = random.choice(DIMS, count) if mixed else [int(random.choice(DIMS))] * count
    rows = np.exp(random.uniform(np.log(30), np.log(most_rows), count)).astype(int)
    single, more = (0.2, 0.06) if large else (0.6, 0.15)
    many = np.clip(random.geometric(more, count), 1, 50 if large else 30)
    hotness = np.where(random.random(count) < single, 1, many)
    total = float((rows * np.asarray(dims)).sum())
    if total > MOST_ELEMENTS:
        rows = np.maximum((rows * (MOST_ELEMENTS / total)).astype(int), 30)
    # limit the number of ids, so that steps are short
    most_ids = (1_600_000 if large else 400_000) // batch
    while hotness.sum() > most_ids and hotness.max() > 1:
        hotness = np.maximum(hotness // 2, 1)
    offsets = 10 ** random.uniform(0.3, 1.7, count)
    exponents = np.clip(random.normal(0.8, 0.35, count), 0.0, 1.6)
    columns = (each.tolist() for each in (rows, hotness, exponents, offsets))
    drawn = [
        Drawn(num_rows=size, active=size, pooling=ids, s=s, q=q)
        for size, ids, s, q in zip(*columns, strict=True)
    ]
    widths, hidden = [int(dim) for dim in dims], HIDDEN[seed % len(HIDDEN)]
    task = replace(
        make_task(drawn, widths, world_size=world_size, batch_size=batch),
        optimizer=sparse_optimizer(optimizer, lr=0.05),
        device_type=device_type,
        num_hosts=num_hosts,
        dense=dense_work_of(sum(widths), hidden),
    )
    laws = {f"t{n}": Law(s=table.s, q=table.q) for n, table in enumerate(drawn)}
    return Sample(task=task, laws=laws, hidden=hidden)


def dense_work_of(width: int, hidden: Sequence[int]) -> DenseWork:
    """Return the work of the dense part that ``make_trainer`` builds for outputs of this width."""
    layers = list(pairwise((width + 1, *hidden, 1)))
    macs = sum(a * b for a, b in layers)
    return DenseWork(
        macs_per_sample=float(macs),
        elements_per_sample=float(sum(a + b for a, b in layers)),
        parameters=macs + sum(b for _, b in layers),  # weights and biases
    )


def draw_batches(sample: Sample, rank: int, count: int, device: torch.device) -> list[Rows]:
    """Generate this rank's rows of ``count`` batches."""
    task = sample.task
    samples = balanced_sizes(task.batch_size, task.world_size)[rank]
    batches: list[Rows] = []
    for number in range(count):
        random = np.random.default_rng([rank, number, task.batch_size])
        columns: list[NDArray[np.int64]] = [np.zeros((samples, 0), np.int64)]
        lists: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for table, feature in zip(task.tables, task.features, strict=True):
            law = sample.laws[table.name]
            if not feature.ragged:
                shape = (samples, feature.hotness)
                columns.append(draw_ids(random, table.num_rows, law, shape))
                continue
            mean = task.ids_per_sample[feature.name]
            lengths = int(mean) + (random.random(samples) < mean % 1.0).astype(np.int64)
            lists.append((lengths, draw_ids(random, table.num_rows, law, (int(lengths.sum()),))))
        matrix = torch.from_numpy(np.concatenate(columns, 1).astype(np.int32)).to(device)
        ids = BatchIds(matrix, _joined(lists, device)) if lists else matrix
        labels = torch.arange(samples, device=device).remainder(2).float()
        batches.append(Rows(labels, torch.zeros(samples, 1, device=device), ids, task.batch_size))
    return batches


def _joined(
    lists: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], device: torch.device
) -> Lists:
    """Join lists of (lengths [samples], values [n]); the values of each sample stay together."""
    lengths = np.stack([counts for counts, _ in lists], 1)
    owner = np.concatenate([np.repeat(np.arange(len(counts)), counts) for counts, _ in lists])
    values = np.concatenate([ids for _, ids in lists])[np.argsort(owner, kind="stable")]
    parts = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (lengths, values))
    return Lists(*parts, weights=None)


def draw_ids(
    random: np.random.Generator, num_rows: int, law: Law, shape: tuple[int, ...]
) -> NDArray[np.int64]:
    """Sample ids from a distribution, with the hot ids spread over the table."""
    cumulative = _cumulative(num_rows, law)
    ranks = np.searchsorted(cumulative, random.random(shape) * cumulative[-1])
    return np.minimum(ranks, num_rows - 1) * spread_of(num_rows) % num_rows


@lru_cache(64)
def _cumulative(num_rows: int, law: Law) -> NDArray[np.float64]:
    ranks = np.arange(1, num_rows + 1, dtype=np.float64)
    return np.cumsum((ranks + law.q) ** -law.s).astype(np.float64)


def shapes_for(table: TableConfig, world_size: int, num_hosts: int = 1) -> list[Shape]:
    """Return the shapes to sample for this table: on one rank, on half of the ranks, or on all
    ranks. With several hosts, the shapes include one whose exchange takes two hops.
    """
    if world_size == 1:
        return [Shape("B", "local")]
    shapes = [
        Shape("B", "local"),
        Shape("B", "columns"),
        Shape("S(0)", "reduce", (world_size, 1)),
        Shape("S(0)", "unique", (world_size, 1)),
    ]
    if table.dim >= world_size:
        shapes.append(Shape("S(1)", "columns", (1, world_size)))
        shapes.append(Shape("S(1)", "unique", (1, world_size)))
    half = world_size // 2
    if world_size % 2 == 0 and half > 1 and table.dim >= 2:
        shapes.append(Shape("(S(0), S(1))", "reduce", (half, 2)))
        shapes.append(Shape("S(0)", "unique", (half, 1)))
    if 1 < num_hosts < world_size:
        shapes.append(Shape(*TWO_HOPS, (num_hosts, world_size // num_hosts)))
    return shapes


def draw_plans(sample: Sample, seed: int, count: int) -> Iterator[tuple[str, Plan]]:
    """Generate ``count`` pairs (name, plan), alternating between homogeneous plans and random
    mixes.
    """
    task = sample.task
    random = np.random.default_rng([seed, 15])
    alike = _homogeneous(task)
    order = [str(name) for name in random.permutation(list(alike))]
    for number in range(count):
        if number % 2 == 0 and order:
            name = order.pop()
            yield name, alike[name]
        else:
            yield f"mix {number}", _mix(task, random)


def _mix(task: Task, random: np.random.Generator) -> Plan:
    """Give every table a random shape on random ranks, with some shapes more likely than others."""
    kinds = random.random(9) ** 2 + 0.02
    plan: Plan = {}
    for table in task.tables:
        shapes = shapes_for(table, task.world_size, task.num_hosts)
        weights = kinds[: len(shapes)] / kinds[: len(shapes)].sum()
        shape = shapes[int(random.choice(len(shapes), p=weights))]
        ranks = list(range(task.world_size))
        if not shape.copied:
            ranks = sorted(random.permutation(task.world_size)[: shape.num_shards].tolist())
        plan[table.name] = Choice(shape, tuple(ranks))
    return plan


def _homogeneous(task: Task) -> dict[str, Plan]:
    """Return one plan per kind of shape; tables that do not allow the shape are stored whole,
    balanced over the ranks.
    """
    world = tuple(range(task.world_size))
    if task.world_size == 1:
        return {"all local": {t.name: Choice(Shape("B", "local"), world) for t in task.tables}}
    whole = balanced_whole(task)
    plans: dict[str, Plan] = {"all whole": whole}
    kinds = [("B", "local"), ("S(0)", "reduce"), ("S(0)", "unique")]
    kinds += [("S(1)", "columns"), ("S(1)", "unique")]
    if 1 < task.num_hosts < task.world_size:
        kinds.append(TWO_HOPS)
    shapes = {t.name: shapes_for(t, task.world_size, task.num_hosts) for t in task.tables}
    for kind in kinds:
        on_all_ranks = {
            name: Choice(shape, world)
            for name, mine in shapes.items()
            for shape in mine
            if (shape.sbp, shape.exchange) == kind
            and (shape.copied or shape.num_shards == task.world_size)
        }
        plans[" ".join(("all", *kind))] = whole | on_all_ranks
    return plans


def balanced_whole(task: Task) -> Plan:
    """Place whole tables greedily: most expensive first, each on the least loaded rank."""
    loads = [0.0] * task.world_size
    plan: Plan = {}
    weight = {table.name: task.lookups(table) * (8 + table.dim) for table in task.tables}
    for table in sorted(task.tables, key=lambda table: -weight[table.name]):
        rank = loads.index(min(loads))
        loads[rank] += weight[table.name]
        plan[table.name] = Choice(Shape("B", "columns"), (rank,))
    return plan

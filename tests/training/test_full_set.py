"""Tests training on a set with every kind of column: lists with weights, sample weights, groups."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import train_wdl
from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import DataConfig
from sbpflow.data import fields_of, load_manifest
from sbpflow.data.__main__ import main
from sbpflow.data.read.loaders import open_loaders
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import build_job
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.sbp import balanced_sizes
from sbpflow.training.evaluate import score_split
from sbpflow.training.metrics import auc, gauc
from tests.data.backends import INSTALLED
from tests.data.full_set import make_full_set
from tests.data.tables import SCHEMA, SPLIT, table, write_csv
from tests.quick import quick
from tests.training.wdl_case import Rows, make_batches, make_config, make_job, pieces_of

STEPS, BATCH_SIZE = 8, 64


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write a data set column by column, and return its folder."""
    path = tmp_path_factory.mktemp("full") / "set"
    make_full_set(path)
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a typical CSV table, prepared by the command."""
    folder = tmp_path_factory.mktemp("table")
    schema = folder / "schema.yaml"
    schema.write_text(SCHEMA)
    source = write_csv(folder / "t.csv", table(900))
    words = ["--input", source, "--output", folder / "set", "--schema", schema, "--split", SPLIT]
    assert main(["prepare", *map(str, words), "--max-bad-fraction", "0.05"]) == 0
    return folder / "set"


def _train(world: World, folder, scheme: str, backend: str):
    """Return the losses of some steps, the scores on val, and val's logits, labels, and groups."""
    manifest = load_manifest(folder)
    config = replace(
        make_config(scheme, "adagrad"),
        data=DataConfig(path=folder, batch_size=BATCH_SIZE, loader=backend),
        model=WdlConfig(embedding_dim=4, hidden=(7, 6), dropout=0.0, wide=WideConfig(crosses=())),
    )
    spec, plan = plan_run(
        config, fields_of(manifest), world_size=world.size, device_type=world.device.type
    )
    job = build_job(config, spec, plan, Boxing(world))
    loaders = open_loaders(
        manifest, config.data, world.rank, world.size, seed=7, device=world.device
    )
    losses = []
    for _, batch in zip(range(STEPS), loaders["train"].epoch(0), strict=False):
        losses.append(float(job.trainer.step(batch)))
    scored = score_split(job.trainer, loaders["val"], job.boxing)
    columns = [
        (job.trainer.predict(batch), batch.labels, batch.columns["group"])
        for batch in loaders["val"].epoch(0)
    ]
    for loader in loaders.values():
        loader.close()
    return losses, scored, [torch.cat(parts).numpy() for parts in zip(*columns, strict=True)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "scheme"),
    quick(
        [
            ("written", "dp"),
            ("written", "1"),
            ("written", "2"),
            ("written", "3"),
            ("prepared", "1"),
        ],
        lambda n: n > 2,
    ),
)
def test_every_scheme_and_world_trains_to_the_losses_of_one_rank(ranks, request, kind, scheme):
    folder = request.getfixturevalue(kind)
    ((want, scored, (logits, labels, groups)),) = ranks(1, _train, folder, scheme, "memmap")
    assert scored.auc == auc(logits, labels)
    assert scored.gauc == gauc(logits, labels, groups)
    assert len(want) == STEPS
    assert np.isfinite(want).all()
    for size, backend in ((2, INSTALLED[-1]), (4, "memmap")):
        results = ranks(size, _train, folder, scheme, backend)
        for losses, _, _ in results:
            assert losses == pytest.approx(want, rel=1e-12)
        assert results[0][1].auc == pytest.approx(scored.auc, abs=1e-9)
        assert results[0][1].gauc == pytest.approx(scored.gauc, abs=1e-9)
        assert results[1][1] is None


@dataclass
class WeightedRows(Rows):
    """A batch with a weight per row."""

    weights: torch.Tensor | None = None

    def part(self, rank: int, size: int) -> "WeightedRows":
        sizes = balanced_sizes(self.labels.shape[0], size)
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        rows = super().part(rank, size)
        return WeightedRows(rows.labels, rows.dense, rows.ids, rows.batch_size, self.weights[mine])


def _weighted(world: World, scheme: str, repeat: bool):
    """Train on rows with weights 0, 1 and 2 or, with ``repeat``, on each row 0, 1 or 2 times;
    return the losses and this rank's tables."""
    job = make_job(world, make_config(scheme, "sgd"))
    losses = []
    for batch in make_batches(5, 30)[:4]:
        count = torch.tensor([0, 1, 2]).repeat(batch.batch_size // 3)
        rows = len(count)
        first = Rows(batch.labels[:rows], batch.dense[:rows], batch.ids[:rows], rows)
        chosen = torch.repeat_interleave(torch.arange(rows), count)
        if repeat:
            given = Rows(first.labels[chosen], first.dense[chosen], first.ids[chosen], rows)
        else:
            given = WeightedRows(first.labels, first.dense, first.ids, rows, count.float())
        losses.append(float(job.trainer.step(given.part(world.rank, world.size))))
    tables = {(name, place): weights for name, place, weights, _ in pieces_of(job)}
    return losses, tables


@pytest.mark.parametrize(("scheme", "size"), [("dp", 1), ("1", 2), ("3", 4)])
def test_weights_count_as_repeated_rows(ranks, scheme, size):
    """Training on 30 rows with weights 0, 1 and 2 equals training on rows that are used 0, 1 or 2
    times."""
    weighted = ranks(size, _weighted, scheme, False)
    repeated = ranks(size, _weighted, scheme, True)
    for (losses, tables), (want, want_tables) in zip(weighted, repeated, strict=True):
        assert losses == pytest.approx(want, rel=1e-13)
        for key, rows in tables.items():
            np.testing.assert_allclose(rows, want_tables[key], rtol=0, atol=1e-14)


def _batches_at_once(world: World, together: bool):
    """Train two steps on two weighted batches or, if ``together`` is true, on their rows as one
    batch; return the losses.
    """
    job = make_job(world, make_config("2", "adagrad"))
    first, second = make_batches(6, 30)[:2]
    weights = torch.linspace(0, 2, 60)
    parts = [
        WeightedRows(rows.labels, rows.dense, rows.ids, 30, weights[k * 30 : k * 30 + 30])
        for k, rows in enumerate((first, second))
    ]
    if together:
        joined = [torch.cat([getattr(p, k) for p in parts]) for k in ("labels", "dense", "ids")]
        parts = [WeightedRows(*joined, 60, weights)]
    given = [part.part(world.rank, world.size) for part in parts]
    losses = [float(job.trainer.step(given))]
    return [*losses, float(job.trainer.step(given))]


def test_accumulated_weighted_batches_are_one_batch(ranks):
    for losses in ranks(2, _batches_at_once, False):
        assert losses == pytest.approx(ranks(1, _batches_at_once, True)[0], rel=1e-12)


def test_gauc_of_more_rows_than_an_exact_auc_takes_can_stop_a_run(written, tmp_path):
    scores = []
    for exact in ("20000000", "0"):
        words = [f"data.path={written}", f"run.dir={tmp_path / exact}", "model.hidden=[8]"]
        words += ["train.stop={metric: gauc, patience: 3}", "train.epochs=20", "train.eval_every=3"]
        words += ["model.wide.crosses=[]", "checkpoint.every=3"]
        words += [f"train.exact_auc_rows={exact}", "data.batch_size=64"]
        assert train_wdl.main(["--config", "configs/scheme1.yaml", *words]) == 0
        lines = map(json.loads, (tmp_path / exact / "metrics.jsonl").read_text().splitlines())
        scores.append([(n["step"], n["gauc"]) for n in lines if n.keys() >= {"step", "gauc"}])
    assert len(scores[0]) > 2
    assert scores[0] == [(step, pytest.approx(value)) for step, value in scores[1]]

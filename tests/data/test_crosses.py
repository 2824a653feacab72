"""Tests the values of crosses computed during reading, and their equality with prepared crosses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import DataConfig
from sbpflow.data import load_manifest, open_loader
from sbpflow.data.format.manifest import SPLITS, write_manifest
from sbpflow.data.format.shards import write_shard
from sbpflow.data.prepare.split import parse_split
from sbpflow.data.read.crosses import hashed_ids
from sbpflow.errors import ConfigError
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import build_job
from sbpflow.run.model.spec import Fields, HashedColumn
from sbpflow.run.planning.build_plan import plan_run
from tests.data.backends import BACKENDS
from tests.data.full_set import make_full_set
from tests.data.rows import run_prepare, text_rows, write_rows
from tests.training.wdl_case import make_config

MASK = 2**64 - 1
CROSSES = (
    HashedColumn(columns=("C1", "C2"), rows=50),
    HashedColumn(columns=("C3", "C2", "C1"), rows=999),
)


def by_hand(ids, rows):
    """Compute the hash with Python integers."""
    if 0 in ids:
        return 0
    state = 0
    for value in ids:
        state = ((state + 0x9E3779B97F4A7C15) & MASK) ^ value
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return 2 + state % (rows - 2)


@given(
    st.lists(st.tuples(*[st.integers(0, 2**31 - 1)] * 3), min_size=1, max_size=20),
    st.integers(3, 2**31 - 1),
)
def test_a_cross_is_a_hash_of_the_ids(rows, size):
    columns = [np.array(column, dtype=np.int32) for column in zip(*rows, strict=True)]
    assert hashed_ids(columns, size).tolist() == [by_hand(row, size) for row in rows]


def test_hashes_are_spread_evenly_and_depend_on_the_order_of_the_parts():
    a, b = (grid.reshape(-1) for grid in np.meshgrid(np.arange(2, 302), np.arange(2, 302)))
    columns = [a.astype(np.int32), b.astype(np.int32)]
    counts = np.bincount(hashed_ids(columns, 1002), minlength=1002)[2:]
    assert abs(((counts - 90) ** 2 / 90).sum() - 999) < 4 * (2 * 999) ** 0.5  # chi squared
    same = hashed_ids(columns, 1002) == hashed_ids(columns[::-1], 1002)
    assert same.mean() < 0.01


def words_of(num_rows, seed):
    """Return rows of a label, a dense value, and the ids of three columns; a tenth of the ids are
    missing.
    """
    rng = np.random.default_rng(seed)
    words = np.empty((num_rows, 5), dtype=np.int32)
    words[:, :2].view(np.float32)[:] = np.stack(
        [rng.integers(0, 2, num_rows), np.arange(num_rows)], 1
    )
    ids = rng.integers(1, 30, (num_rows, 3))
    words[:, 2:] = np.where(rng.random((num_rows, 3)) < 0.1, 0, ids)
    return words


def write_set(folder, *, prepared):
    """Write the rows, either without crosses or with crosses as columns."""
    folder.mkdir()
    splits = {}
    for number, split in enumerate(SPLITS):
        words = words_of((3000, 40, 40)[number], number)
        if prepared:
            parts = {name: words[:, 2 + k] for k, name in enumerate(("C1", "C2", "C3"))}
            more = [hashed_ids([parts[n] for n in cross.columns], cross.rows) for cross in CROSSES]
            words = np.concatenate([words, np.stack(more, 1)], 1)
        splits[split] = [
            write_shard(folder, f"{split}-{n}.npy", words[n : n + 700])
            for n in range(0, len(words), 700)
        ]
    fields = [{"name": name, "rows": 30} for name in ("C1", "C2", "C3")]
    if prepared:
        fields += [{"name": cross.name, "rows": cross.rows} for cross in CROSSES]
    content = {"source": "test", "dense": [{"name": "I1"}], "fields": fields, "splits": splits}
    write_manifest(folder, content)
    return load_manifest(folder)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Return two sets, one without crosses and one with prepared crosses."""
    folder = tmp_path_factory.mktemp("crosses")
    return write_set(folder / "plain", prepared=False), write_set(folder / "full", prepared=True)


@pytest.mark.parametrize("shuffle", ["none", "runs"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_computed_columns_equal_prepared_ones(sets, backend, shuffle):
    plain, full = sets
    options = {"batch_size": 256, "shuffle": shuffle, "rank": 1, "world_size": 2}
    computed = open_loader(plain, backend=backend, crosses=CROSSES, **options)
    prepared = open_loader(full, backend="memmap", **options)
    for actual, expected in zip(computed.epoch(2), prepared.epoch(2), strict=True):
        assert torch.equal(actual.ids, expected.ids)
        assert torch.equal(actual.dense, expected.dense)
        assert torch.equal(actual.labels, expected.labels)


def test_a_computed_cross_is_equivalent_to_the_cross_of_prepare(tmp_path):
    """Rare values are excluded: prepare hashes their raw values, but the loader hashes the rare
    id.
    """
    source = write_rows(tmp_path / "rows.tsv", text_rows(600))
    pairs = (("C1", "C2"), ("C7", "C3"))
    rule = parse_split("time:1,0,0")
    manifest = run_prepare(tmp_path / "set", source, crosses=pairs, min_count=1, split=rule)
    columns = [HashedColumn(columns=pair, rows=2**31 - 1) for pair in pairs]
    loader = open_loader(
        manifest, batch_size=600, backend="memmap", shuffle="none", crosses=columns
    )
    ids = next(loader.epoch(0)).ids.numpy()
    for prepared, computed in zip(ids[:, -4:-2].T, ids[:, -2:].T, strict=True):
        assert ((prepared == 0) == (computed == 0)).all()
        together = np.unique(np.stack([prepared, computed], 1), axis=0)
        assert 100 < len(together) == len(np.unique(prepared)) == len(np.unique(computed))


def test_crosses_work_in_a_set_with_lists(tmp_path):
    manifest, rows = make_full_set(tmp_path / "set")
    cross = HashedColumn(columns=("C1", "C2"), rows=100)
    loader = open_loader(manifest, batch_size=300, backend="memmap", crosses=[cross])
    batch = next(loader.epoch(0))
    own = [rows[number] for number in batch.dense[:, 0].int().tolist()]
    expected = [[*row.ids, by_hand(row.ids, 100)] for row in own]
    assert batch.ids.matrix.tolist() == expected
    assert batch.ids.bounds.columns == (10_000, 10_000, 100)
    assert batch.ids.lists.values.tolist() == [i for r in own for ids in r.lists for i in ids]


def test_a_column_that_cannot_be_crossed_is_named(sets, tmp_path):
    with pytest.raises(ConfigError, match=r"cross hashed\.C1xC9: C9 is not a column with one"):
        open_loader(sets[0], batch_size=8, crosses=[HashedColumn(columns=("C1", "C9"), rows=9)])
    manifest, _ = make_full_set(tmp_path / "set")
    with pytest.raises(ConfigError, match="L0 is not a column with one id per row"):
        open_loader(manifest, batch_size=8, crosses=[HashedColumn(columns=("C1", "L0"), rows=9)])


def _train(world, manifest, fields, wide):
    world.checked = False
    model = WdlConfig(embedding_dim=4, hidden=(5,), dropout=0.0, wide=wide)
    config = make_config("2", "adagrad")
    config = type(config)(
        data=DataConfig(batch_size=256, loader="memmap"), model=model,
        parallel=config.parallel, optimizer=config.optimizer,
    )  # fmt: skip
    spec, plan = plan_run(config, fields, world_size=world.size, device_type="cpu")
    names = [table.name for output in spec.outputs for table in output.tables]
    job = build_job(config, spec, plan, Boxing(world))
    loader = open_loader(
        manifest, batch_size=256, rank=world.rank, world_size=world.size, backend="memmap",
        crosses=spec.hashed_columns,
    )  # fmt: skip
    return names, [float(job.trainer.step(batch)) for batch in loader.epoch(0)]


def test_a_model_can_have_hashed_and_raw_wide_columns(ranks, sets):
    """Two ranks must give the same losses as one rank, and crosses must change the losses."""
    plain, full = sets
    columns = {"C1": 30, "C2": 30, "C3": 30}
    wide = WideConfig(columns=("C3",), crosses=(("C1", "C2"), ("C3", "C2", "C1")), hash_size=50)
    names, losses = ranks(2, _train, plain, Fields.of(("I1",), columns), wide)[0]
    assert names[:3] == ["wide.C3", "wide.hashed.C1xC2", "wide.hashed.C3xC2xC1"]
    ((_, alone),) = ranks(1, _train, plain, Fields.of(("I1",), columns), wide)
    assert losses == pytest.approx(alone, rel=1e-12)
    ((_, without),) = ranks(
        1, _train, plain, Fields.of(("I1",), columns), WideConfig(columns=("C3",), crosses=())
    )
    assert without != pytest.approx(alone, rel=1e-6)
    assert full.num_words == plain.num_words + 2


@pytest.mark.parametrize(
    ("wide", "message"),
    [
        ({"columns": ("C9",), "crosses": ()}, "model.wide.columns: C9 is not a sparse column"),
        ({"crosses": (("C1", "C9"),), "hash_size": 50}, "C9 is not a column with one id per row"),
    ],
)
def test_columns_missing_from_the_data_are_named(wide, message):
    with pytest.raises(ConfigError, match=message):
        WdlConfig(wide=WideConfig(**wide)).spec(Fields.of(("I1",), {"C1": 30}))


@pytest.mark.parametrize(
    "wide",
    [{"crosses": (("C1", "C2", "C3"),)}, {"crosses": (("C1",),), "hash_size": 9},
     {"crosses": (("C1", "C1"),), "hash_size": 9}, {"columns": ("C1", "C1")}],
)  # fmt: skip
def test_an_invalid_cross_is_refused(wide):
    with pytest.raises(ConfigError, match=r"not a cross|listed twice"):
        WideConfig(**wide)

"""Tests that the content ID depends on the rows, not on their source or shard files."""

import random
import zlib

import numpy as np
import pytest

from sbpflow.data import open_loader
from sbpflow.data.format.content_id import joined_crc32, rows_crc32
from sbpflow.data.format.manifest import SPLITS, load_manifest, write_manifest
from sbpflow.data.format.npy import write_array
from sbpflow.data.format.shards import write_shard
from sbpflow.errors import DataError
from tests.data.conftest import make_set
from tests.data.rows import run_prepare, text_rows, write_rows
from tests.data.tables import table, write_csv, write_parquet
from tests.data.test_tables import prepare_table

ROWS = text_rows(600, seed=3)


@pytest.mark.parametrize("num_parts", [0, 1, 2, 9, 300])
def test_the_checksum_of_a_concatenation_follows_from_its_parts(num_parts):
    rng = random.Random(num_parts)
    parts = [rng.randbytes(rng.choice([0, 1, 5, 4096])) for _ in range(num_parts)]
    crc32s = np.array([zlib.crc32(part) for part in parts], dtype=np.uint32)
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    assert joined_crc32(crc32s, sizes) == zlib.crc32(b"".join(parts))


def test_sizes_beyond_the_period_of_the_polynomial():
    """A part with the CRC32 0 can be appended at once or in two halves, and sizes wrap at the
    period of the CRC.
    """
    long, half = 3 * (2**32 - 1) + 8, 2**33 + 3
    crc32s = np.array([zlib.crc32(b"rows"), 0, 0], dtype=np.uint32)
    whole = joined_crc32(crc32s[:2], np.array([4, 2 * half]))
    assert joined_crc32(crc32s, np.array([4, half, half])) == whole
    eight = joined_crc32(crc32s[:2], np.array([4, 8]))  # the period is 2^32 - 1 bytes
    assert joined_crc32(crc32s[:2], np.array([4, long])) == eight != whole


def test_the_checksum_of_rows_excludes_headers(tmp_path):
    rows = np.arange(700, dtype=np.int32).reshape(-1, 7)
    pieces = [rows[:0], rows[:33], rows[33:]]
    files = [write_array(tmp_path / f"{k}.npy", piece) for k, piece in enumerate(pieces)]
    shapes = [piece.shape for piece in pieces]
    assert rows_crc32("<i4", shapes, files) == zlib.crc32(rows.tobytes())


@pytest.fixture(scope="module")
def from_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return run_prepare(folder / "set", write_rows(folder / "rows.tsv", ROWS))


@pytest.mark.slow
def test_inputs_pieces_and_versions_do_not_matter(tmp_path, from_text, monkeypatch):
    compressed = run_prepare(tmp_path / "gz", write_rows(tmp_path / "other.tsv.gz", ROWS))
    first, second = (
        write_rows(tmp_path / f"{part}.tsv", rows)
        for part, rows in (("a", ROWS[:250]), ("b", ROWS[250:]))
    )
    cut = run_prepare(tmp_path / "cut", first, second, piece_bytes=5000)
    monkeypatch.setattr("sbpflow.data.prepare.content.__version__", "99.0")
    monkeypatch.setattr("sbpflow.data.prepare.content.np.__version__", "9.9")
    later = run_prepare(tmp_path / "later", tmp_path / "other.tsv.gz")
    assert len(cut.shards("train")) > 1
    manifests = (from_text, compressed, cut, later)
    assert len({manifest.fingerprint for manifest in manifests}) == 4
    assert {manifest.content_id for manifest in manifests} == {from_text.content_id}


def test_lists_and_side_columns_matter_but_not_their_file_format(tmp_path):
    rows = table(300)
    (tmp_path / "again").mkdir()
    text = prepare_table(tmp_path / "text", write_csv(tmp_path / "t.csv", rows))
    parquet = prepare_table(tmp_path / "parquet", write_parquet(tmp_path / "t.parquet", rows))
    assert text.content_id == parquet.content_id
    assert text.fingerprint != parquet.fingerprint
    content_ids = {text.content_id}
    for column, value in (("w", 2.5), ("user", "u9"), ("id", "row-x"), ("buy", 1), ("more", [7])):
        changed = [dict(row) for row in rows]
        place = next(k for k, row in enumerate(rows) if row[column] != value)
        changed[place][column] = value
        other = prepare_table(tmp_path / column, write_csv(tmp_path / "again" / "t.csv", changed))
        assert other.content_id not in content_ids, column
        content_ids.add(other.content_id)


def test_rows_order_splits_and_ids_matter(tmp_path, from_text):
    def prepared(name, rows, **options):
        return run_prepare(tmp_path / name, write_rows(tmp_path / f"{name}.tsv", rows), **options)

    swapped = [*ROWS[:10], ROWS[11], ROWS[10], *ROWS[12:]]
    changed = [list(row) for row in ROWS]
    changed[5][1] = "4" if changed[5][1] != "4" else "5"
    others = [
        prepared("swapped", swapped),
        prepared("changed", changed),
        prepared("fewer", ROWS[:-1]),
        prepared("seed", ROWS, seed=8),
        prepared("transform", ROWS, transform="log1"),
        prepared("crosses", ROWS, crosses=()),
        prepared("min_count", ROWS, min_count=3),
    ]
    content_ids = [from_text.content_id, *(other.content_id for other in others)]
    assert len(set(content_ids)) == len(content_ids)


@pytest.mark.parametrize("key", ["dense", "fields"])
def test_column_names_matter(tmp_path, key):
    manifest = make_set(tmp_path / "set", 50)
    entries = [dict(entry) for entry in manifest.content[key]]
    entries[0]["name"] = "renamed"
    write_manifest(manifest.path, {**manifest.content, key: entries})
    assert load_manifest(manifest.path).content_id != manifest.content_id


def recut(manifest, folder, shard_rows):
    """Return the train rows of ``make_set``, stored in shards of a different size."""
    other = make_set(folder, manifest.splits["train"], shard_rows)
    assert other.fingerprint != manifest.fingerprint
    return other


@pytest.mark.parametrize("shuffle", ["runs", "none"])
def test_a_read_continues_in_a_set_with_other_shards(tmp_path, row_set, shuffle):
    settings = {"batch_size": 700, "backend": "memmap", "shuffle": shuffle}
    loader = open_loader(row_set(9000), **settings)
    batches = loader.epoch(0)
    next(batches)
    state = loader.state_dict()
    expected = [batch.ids.clone() for batch in batches]
    other = open_loader(recut(row_set(9000), tmp_path / "set", 333), **settings)
    other.load_state_dict(state)
    actual = [batch.ids for batch in other.epoch(0)]
    assert len(actual) == len(expected)
    assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))


def test_a_state_of_an_earlier_version_is_compared_by_fingerprint(tmp_path, row_set):
    loader = open_loader(row_set(9000), batch_size=700)
    state = loader.state_dict()
    del state["content_id"]
    loader.load_state_dict(state)
    other = open_loader(recut(row_set(9000), tmp_path / "set", 333), batch_size=700)
    with pytest.raises(
        DataError, match=r"fingerprint is .* in the saved state and .* the same rows"
    ):
        other.load_state_dict(state)


def test_empty_shards_do_not_matter(tmp_path):
    manifest = make_set(tmp_path / "set", 50)
    splits = {split: list(manifest.content["splits"][split]) for split in SPLITS}
    words = np.empty((0, manifest.num_words), dtype=np.int32)
    splits["train"].insert(0, write_shard(manifest.path, "empty.npy", words))
    write_manifest(manifest.path, {**manifest.content, "splits": splits})
    assert load_manifest(manifest.path).content_id == manifest.content_id
    write_manifest(manifest.path, {**manifest.content, "splits": {**splits, "val": []}})
    assert load_manifest(manifest.path).content_id != manifest.content_id

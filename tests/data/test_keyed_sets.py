"""Tests sets with raw 64-bit keys: files, batches, statistics, encoding, and refusals."""

import hashlib
import json

import numpy as np
import polars as pl
import pytest
import torch

from sbpflow.data import fields_of, load_manifest, open_loader
from sbpflow.data.__main__ import main
from sbpflow.data.format.manifest import MANIFEST, SPLITS, fingerprint_of
from sbpflow.data.format.shards import RowFiles
from sbpflow.data.frames import prepared_set
from sbpflow.data.prepare.distinct import count_group
from sbpflow.data.profile import profile_set
from sbpflow.data.read.crosses import hashed_ids
from sbpflow.data.stats import compute_stats, load_stats
from sbpflow.data.values import keys_of_values, value_blocks, values_and_rows
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.errors import ConfigError, DataError
from sbpflow.run.model.spec import HashedColumn
from sbpflow.runtime.files.json_file import read_json
from sbpflow.serving.cells import MISSING_KEY
from tests.data.backends import BACKENDS
from tests.data.rows import folder_bytes, text_rows, write_rows
from tests.data.tables import table, write_csv, write_parquet
from tests.data.test_tables import good_rows, prepare_table

MIXED = "--keys", "city,tags,genre"  # the fields `shop` and `more` have vocabularies
ROWS = table(700)


def key_of(value):
    """Compute the key of a cell without the code under test."""
    if value in (None, ""):
        return -(2**63)
    if isinstance(value, int):
        return value
    digest = hashlib.blake2b(value.encode(), digest_size=12).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    return prepare_table(folder / "set", write_csv(folder / "t.csv", ROWS), *MIXED)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keyed")
    return prepare_table(folder / "set", write_parquet(folder / "t.parquet", ROWS), "--keys")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted")
    return prepare_table(folder / "set", write_csv(folder / "t.csv", ROWS))


def ids_of(manifest, split):
    """Return the names of a split's matrix columns, the matrix, and the lists."""
    rows = RowFiles(manifest, split)
    loader = open_loader(manifest, split=split, batch_size=1000, backend="memmap", shuffle="none")
    (batch,) = loader.epoch(0)
    assert isinstance(batch.ids, BatchIds)
    assert batch.batch_size == rows.num_rows
    names = [field.name for field in manifest.fixed for _ in range(field.hot)]
    return names, batch.ids.matrix, batch.ids.lists


def lists_by_row(lists, number):
    ends = lists.lengths.reshape(-1).cumsum(0)
    flat = [
        lists.values[end - n : end].tolist()
        for n, end in zip(lists.lengths.reshape(-1).tolist(), ends.tolist(), strict=True)
    ]
    return flat[number :: lists.lengths.shape[1]]


@pytest.mark.parametrize("split", SPLITS)
def test_rows_hold_the_keys_of_their_cells_and_fitted_ids_stay(mixed, fitted, split):
    rows = good_rows(split)
    names, matrix, lists = ids_of(mixed, split)
    assert names == ["city", "shop", "genre", "genre", "score"]
    assert matrix.dtype == lists.values.dtype == torch.int64
    assert matrix[:, 0].tolist() == [key_of(row["city"]) for row in rows]
    genres = [[*row["genre"][-2:], None, None][:2] for row in rows]
    assert matrix[:, 2:4].tolist() == [[key_of(cell) for cell in cells] for cells in genres]
    tags = [[key_of(cell) for cell in row["tags"][:3]] for row in rows]
    assert lists_by_row(lists, 0) == tags
    _, others, other_lists = ids_of(fitted, split)
    assert others.dtype == other_lists.values.dtype == torch.int32
    assert torch.equal(matrix[:, [1, 4]], others[:, [1, 4]].long())
    assert lists_by_row(lists, 1) == lists_by_row(other_lists, 1)
    assert torch.equal(lists.weights, other_lists.weights)


@pytest.mark.parametrize("split", SPLITS)
def test_all_fields_can_have_keys_and_integers_keep_their_bits(keyed, split):
    rows = good_rows(split)
    names, matrix, lists = ids_of(keyed, split)
    assert matrix[:, names.index("shop")].tolist() == [key_of(row["shop"]) for row in rows]
    assert lists_by_row(lists, 1) == [row["more"] for row in rows]
    assert keyed.content["vocabulary"]["fields"] == {}
    assert not list(keyed.path.glob("vocabulary/*"))


def test_hex_values_and_crosses_have_keys(tmp_path):
    text = text_rows(400)
    source = write_rows(tmp_path / "t.tsv", text)
    words = ["prepare", "--input", source, "--output", tmp_path / "set", "--keys", "C1,C1xC2"]
    assert main(list(map(str, words))) == 0
    manifest = load_manifest(tmp_path / "set")
    keys = RowFiles(manifest, "train").keys(0, 320)
    ones, twos = ([row[14 + k] for row in text[:320]] for k in range(2))
    assert keys[:, 0].tolist() == [int(cell, 16) if cell else MISSING_KEY for cell in ones]
    pairs = zip(ones, twos, strict=True)
    wide = [int(a + b, 16) if a and b else MISSING_KEY for a, b in pairs]
    assert keys[:, 1].view(np.uint64).tolist() == [key % 2**64 for key in wide]
    by_name = {field.name: field for field in manifest.fields}
    assert [(by_name[n].keyed, by_name[n].rows > 2) for n in ("C1xC2", "C3xC4")] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("shuffle", ["none", "runs"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_reading_path_gives_the_same_keys(mixed, backend, shuffle):
    crosses = [HashedColumn(columns=("city", "shop"), rows=50)]
    whole = open_loader(
        mixed, batch_size=64, backend="memmap", shuffle=shuffle, crosses=crosses
    ).epoch(1)
    parts = [
        open_loader(
            mixed, batch_size=64, backend=backend, shuffle=shuffle, crosses=crosses, rank=rank,
            world_size=2,
        ).epoch(1)
        for rank in range(2)
    ]  # fmt: skip
    for batch, *halves in zip(whole, *parts, strict=True):
        ids = [half.ids for half in halves]
        assert torch.equal(torch.cat([half.matrix for half in ids]), batch.ids.matrix)
        assert torch.equal(torch.cat([half.lists.values for half in ids]), batch.ids.lists.values)
        weights = torch.cat([half.lists.weights for half in ids])
        assert torch.equal(weights, batch.ids.lists.weights)
        for name in ("group", "time"):
            columns = torch.cat([half.columns[name] for half in halves])
            assert torch.equal(columns, batch.columns[name])
        city, shop, cross = (batch.ids.matrix[:, k].numpy() for k in (0, 1, -1))
        assert (cross == hashed_ids([city, shop], 50, [MISSING_KEY, 0])).all()
        missing = (city == MISSING_KEY) | (shop == 0)
        assert ((cross == 0) == missing).all()


def test_a_set_without_lists_gives_int64_batches_in_blocks(tmp_path):
    source = write_rows(tmp_path / "t.tsv", text_rows(3000))
    sets = {}
    for name, more in (("fitted", []), ("keyed", ["--keys"])):
        words = ["prepare", "--input", source, "--output", tmp_path / name, *more]
        assert main(list(map(str, words))) == 0
        sets[name] = load_manifest(tmp_path / name)
    batches = [
        list(open_loader(sets[name], batch_size=100, backend=backend, shuffle="runs").epoch(0))
        for name, backend in (("fitted", "memmap"), ("keyed", "memmap"), ("keyed", "auto"))
    ]
    for fitted, memmap, auto in zip(*batches, strict=True):
        assert (fitted.ids.dtype, memmap.ids.dtype) == (torch.int32, torch.int64)
        assert torch.equal(memmap.ids, auto.ids)
        assert torch.equal(fitted.dense, memmap.dense)
        assert torch.equal(fitted.labels, memmap.labels)
        assert torch.equal(memmap.ids == MISSING_KEY, fitted.ids == 0)
    assert fields_of(sets["keyed"]).ids[0].keyed


def test_statistics_of_keys_equal_those_of_a_whole_vocabulary(tmp_path, capsys):
    source = write_rows(tmp_path / "t.tsv", text_rows(3000))
    for name, more in (("fitted", ["--min-count", "1"]), ("keyed", ["--keys"])):
        words = ["prepare", "--input", source, "--output", tmp_path / name, *more]
        assert main(list(map(str, words))) == 0
    fitted, keyed = (load_manifest(tmp_path / name) for name in ("fitted", "keyed"))
    for one, other in zip(load_stats(fitted), load_stats(keyed), strict=True):
        for part in ("lookups", "missing", "distinct", "bins_rows", "unique_ratio", "top_mass"):
            assert getattr(one, part) == getattr(other, part), (one.name, part)
        assert (other.rows, other.rare) == (0, 0)
    assert compute_stats(keyed) == load_stats(keyed)
    profile = profile_set(keyed)
    for one, other in zip(profile_set(fitted).fields, profile.fields, strict=True):
        assert one.missing == other.missing
        assert set(other.unknown.values()) == {0.0}
        assert one.is_constant == other.is_constant
    assert main(["stats", str(keyed.path)]) == 0
    assert "       keys " in capsys.readouterr().out


def test_equal_input_gives_equal_bytes_in_every_format(mixed, tmp_path):
    source = write_parquet(tmp_path / "t.parquet", ROWS)
    again = prepare_table(tmp_path / "again", source, *MIXED)
    files = [folder_bytes(one.path) for one in (mixed, again)]
    names = {name for name in files[0] if "json" not in name}
    assert len(names) > 10
    assert all(files[0][name] == files[1][name] for name in names)
    assert mixed.content_id == again.content_id


def test_a_keyed_set_has_a_version_that_older_programs_refuse(mixed, fitted, tmp_path):
    assert mixed.content["version"] == 3
    assert fitted.content["version"] == 2
    assert mixed.content_id != fitted.content_id
    raw = {**read_json(mixed.path / MANIFEST), "version": 4}
    raw["fingerprint"] = fingerprint_of(raw)
    (tmp_path / MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(DataError, match="version 4, but this program reads only versions 2 and 3"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"keyed": 1}, r"keyed is 1 but must be true or false"),
        ({"keyed": True, "rows": 9}, r"rows is 9 but must be absent with keys"),
        ({"keyed": False}, r"rows is None but must be a whole number"),
    ],
)
def test_invalid_manifests_are_refused(mixed, tmp_path, field, message):
    raw = read_json(mixed.path / MANIFEST)
    raw["fields"][0] = {"name": "city", **field}
    raw["fingerprint"] = fingerprint_of(raw)
    (tmp_path / MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(DataError, match=message):
        load_manifest(tmp_path)


def test_new_rows_get_the_same_keys(mixed, keyed, tmp_path, capsys):
    rows = table(60, seed=3)
    source = write_csv(tmp_path / "new.csv", rows)
    for manifest in (mixed, keyed):
        words = ["encode", "--like", manifest.path, "--input", source, "--output"]
        output = tmp_path / f"encoded-{manifest.path.parent.name}"
        assert main([*map(str, [*words, output]), "--max-bad-fraction", "1"]) == 0
        new = load_manifest(output)
        assert new.vocabulary_digest == manifest.vocabulary_digest
        keys = RowFiles(new, "test").keys(0, new.splits["test"])
        good = [row for row in rows if row["price"] != float("inf")]
        assert keys[:, 0].tolist() == [key_of(row["city"]) for row in good]
    assert main(["verify", str(mixed.path)]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--keys", "none"], "--keys: 'none' is not a field; choose from city, shop"),
        (["--keys", "score"], "--keys: 'score' is not a field; choose from city, shop"),
        (["--keys", "city", "--hash-size", "city=9"], "--keys: city also has a --hash-size"),
        (["--keys", "--min-count", "3"], "--min-count: no field has a vocabulary, because all"),
        (["--keys", "--spare", "1"], "--spare: no field has a vocabulary"),
        (["--keys", "--keep-strings"], "--keep-strings: no field has a vocabulary"),
        (["--hash-size", "9", "--spare", "1"], "or hash fewer fields, such as --hash-size city=1"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, capsys, more, message):
    source = write_csv(tmp_path / "t.csv", ROWS[:20])
    with pytest.raises(AssertionError):
        prepare_table(tmp_path / "set", source, *more)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "more"),
    [
        ("sparse: {city: string}", ["--hash-size", "9", "--spare", "1"]),
        ("sparse: {city: string}", ["--keys", "--spare", "1"]),
        ("dense: {a: {buckets: 8}}", ["--spare", "1"]),
        ("sparse: {city: string, b: string}", ["--like", "--grow"]),
    ],
)
def test_options_are_advised_only_if_they_give_a_field_a_vocabulary(
    tmp_path, capsys, columns, more
):
    (tmp_path / "t.csv").write_text("".join(f"{n % 2},c{n % 3},b,{n}\n" for n in range(60)))
    schema = tmp_path / "schema.yaml"
    schema.write_text(f"separator: ','\ncolumns: [click, city, b, a]\nlabel: click\n{columns}\n")
    words = ["prepare", "--input", tmp_path / "t.csv", "--output", tmp_path / "set"]
    if "--like" in more:
        old = [*words[:-1], tmp_path / "old", "--schema", schema, "--hash-size", "9"]
        assert main([*map(str, old)]) == 0
        more = ["--like", tmp_path / "old", "--grow"]
    else:
        words += ["--schema", schema]
    assert main([*map(str, [*words, *more])]) == 2
    error = capsys.readouterr().err
    assert "no field has a vocabulary" in error
    assert "; remove the option" in error
    assert "remove the option, or" not in error


def test_growth_and_shared_vocabularies_are_checked(keyed, tmp_path, capsys):
    source = write_csv(tmp_path / "t.csv", ROWS)
    words = ["prepare", "--like", keyed.path, "--input", source, "--output", tmp_path / "more"]
    assert main([*map(str, words), "--grow"]) == 2
    assert "--grow: no field has a vocabulary" in capsys.readouterr().err
    schema = tmp_path / "shared.yaml"
    schema.write_text(
        "separator: ','\nheader: true\nquote: '\"'\nlabel: click\nsparse:\n"
        "  city: {kind: string, vocabulary: places}\n  user: {kind: string, vocabulary: places}\n"
    )
    words = ["prepare", "--input", source, "--output", tmp_path / "s", "--schema", schema]
    assert main([*map(str, words), "--keys", "city"]) == 2
    assert "so both or neither must have keys" in capsys.readouterr().err
    assert main([*map(str, words), "--keys", "city,user"]) == 0
    fields = load_manifest(tmp_path / "s").fields
    assert [(field.vocabulary, field.keyed) for field in fields] == [("places", True)] * 2


def test_values_of_saved_keys_have_the_rows_of_a_checkpoint(mixed, keyed):
    saved = np.array([key_of("Paris"), 5, MISSING_KEY, -7])
    values, rows = values_and_rows(mixed, "city", None, saved)
    assert values.tolist() == [key_of("Paris"), 5, -7]
    assert rows.tolist() == [1, 2, 4]
    values, rows = values_and_rows(mixed, "city", pl.Series(["Oslo", "Paris", None]), saved)
    assert (values.tolist(), rows.tolist()) == (["Paris"], [1])
    values, rows = values_and_rows(keyed, "shop", pl.Series([-7, 6, 5]), saved)
    assert (values.tolist(), rows.tolist()) == ([-7, 5], [4, 2])
    blocks = value_blocks(keyed, "shop", 2, saved)
    assert [rows.tolist() for _, rows in blocks] == [[1, 2], [4]]
    values, ids = values_and_rows(mixed, "shop", None)
    assert len(values) == len(ids) > 0


def test_the_key_of_missing_values_is_not_a_value(keyed):
    ends = [str(1 - 2**63), "", str(2**63 - 1)]
    assert keys_of_values(keyed, "shop", ends).tolist() == [1 - 2**63, 2**63 - 1]
    message = r"^field shop, line 4: '-9223372036854775808' has the key of missing values, whose "
    with pytest.raises(ConfigError, match=message):
        keys_of_values(keyed, "shop", [*ends, str(-(2**63))])


def test_frames_accept_a_list_of_keys(tmp_path):
    frame = pl.DataFrame({"click": [0, 1] * 20, "user": list(range(40)), "shop": [5, 6] * 20})
    schema = {"label": "click", "sparse": {"user": "integer", "shop": "integer"}}
    path = prepared_set(frame, tmp_path, schema, {"keys": ["user"], "min_count": 1})
    assert [field.keyed for field in load_manifest(path).fields] == [True, False]


def test_keys_are_not_counted(tmp_path, monkeypatch):
    def counted(rows, *rest):
        assert set(rows) == {"shop", "more"}
        return count_group(rows, *rest)

    monkeypatch.setattr("sbpflow.data.prepare.count.count_group", counted)
    prepare_table(tmp_path / "set", write_csv(tmp_path / "t.csv", ROWS), *MIXED)

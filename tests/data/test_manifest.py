"""Tests the messages for manually edited manifests, flipped bits in shards, and bad statistics."""

import json
import shutil

import numpy as np
import pytest

from sbpflow.config.checks import data_path
from sbpflow.config.schema import Config, DataConfig
from sbpflow.data import load_manifest, open_loader
from sbpflow.data.__main__ import main
from sbpflow.data.format.manifest import MANIFEST, Manifest, fingerprint_of
from sbpflow.data.format.verify import check_lists
from sbpflow.data.stats import compute_stats, stats_json
from sbpflow.errors import ConfigError, DataError
from sbpflow.models.wdl import WdlConfig
from tests.data.conftest import make_set
from tests.data.full_set import make_full_set


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Manifest:
    """Return a set with statistics and known best scores, like those that synth writes."""
    manifest = make_set(tmp_path_factory.mktemp("manifest") / "set", 50, shard_rows=20)
    bayes = {"train": {"auc": 0.8, "logloss": 0.4, "ctr": 0.2}}
    forge(manifest.path, bayes=bayes, stats=stats_json(compute_stats(manifest)))
    return load_manifest(manifest.path)


def forge(folder, **changes):
    """Change top-level keys of a manifest and recompute its fingerprint."""
    content = json.loads((folder / MANIFEST).read_text()) | changes
    content["fingerprint"] = fingerprint_of(content)
    (folder / MANIFEST).write_text(json.dumps(content))


@pytest.fixture
def copy(whole, tmp_path):
    """Copy the set, so that a test may damage it."""
    shutil.copytree(whole.path, tmp_path / "set")
    return load_manifest(tmp_path / "set")


def shard(**changes):
    return {"file": "a.npy", "rows": 1, "crc32": 5} | changes


def splits(*train):
    return {"train": list(train), "val": [], "test": []}


FORGED = [
    ("dense", None, "dense is None"),
    ("dense", ["I1"], "dense is ['I1']"),
    ("dense", [{"name": 5}], "dense[0].name is 5"),
    ("dense", [{"name": "C1"}], "a name that occurs only once"),
    ("fields", [], "at least one table"),
    ("fields", {"C1": 5}, "a list of mappings"),
    ("fields", [{"name": "C1"}], "fields[0].rows is None"),
    ("fields", [{"name": "C1", "rows": True}], "fields[0].rows is True"),
    ("fields", [{"name": "C1", "rows": 2**31}], "from 2 to 2147483647"),
    ("fields", [{"name": "C1", "rows": 9, "hot": 0}], "fields[0].hot is 0"),
    ("splits", None, "splits is None"),
    ("splits", {"train": []}, "shards of train, val and test"),
    ("splits", splits(5), "splits.train is [5]"),
    ("splits", splits({"file": "a.npy", "rows": 1}), "a mapping with file, rows and crc32"),
    ("splits", splits(shard(extra=1)), "a mapping with file, rows and crc32"),
    ("splits", splits(shard(rows=-1)), "splits.train[0].rows is -1"),
    ("splits", splits(shard(rows="1")), "splits.train[0].rows is '1'"),
    ("splits", splits(shard(crc32=1.5)), "splits.train[0].crc32 is 1.5"),
    ("splits", splits(shard(file="../../other/train.npy")), "next to the manifest"),
    ("splits", splits(shard(file="/etc/passwd")), "next to the manifest"),
    ("splits", splits(shard(file=["a.npy"])), "next to the manifest"),
    ("splits", splits(shard(), shard()), "a file that occurs only once"),
    ("bayes", 0.8, "bayes is 0.8"),
    ("bayes", {}, "auc, logloss and ctr by split"),
    ("bayes", {"all": {"auc": 1, "logloss": 1, "ctr": 1}}, "auc, logloss and ctr by split"),
    ("bayes", {"test": {"auc": 0.8}}, "bayes.test"),
    ("bayes", {"test": {"auc": "0.8", "logloss": 1, "ctr": 1}}, "bayes.test"),
]


@pytest.mark.parametrize(("key", "value", "message"), FORGED)
def test_a_hand_made_manifest_is_refused_with_key_and_rule(copy, key, value, message):
    forge(copy.path, **{key: value})
    with pytest.raises(DataError) as error:
        load_manifest(copy.path)
    assert message in str(error.value)
    assert str(copy.path / MANIFEST) in str(error.value)


STATS = [
    [],
    [5],
    "all",
    [{"name": "C1"}],
    {"C1": 5},
]


@pytest.mark.parametrize("stats", STATS)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_hand_made_statistics_are_refused(copy, capsys, stats, flags):
    forge(copy.path, stats=stats)
    assert main(["stats", str(copy.path), *flags]) == 2
    captured = capsys.readouterr()
    assert "sbpflow stats --recount" in captured.err
    assert captured.out == ""
    assert main(["stats", str(copy.path), "--recount"]) == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_mass", {"1": 0.5}),
        ("lookups", "many"),
        ("bins_rows", [1, 2]),
        ("unique_ratio", {"77": 0.5}),
        ("unique_ratio", []),
        ("name", "C9"),
        ("rows", 7),
        ("unknown", 1),
    ],
)
def test_a_single_wrong_statistic_is_refused(copy, capsys, key, value):
    stats = [dict(entry) for entry in copy.content["stats"]]
    stats[1][key] = value
    forge(copy.path, stats=stats)
    assert main(["stats", str(copy.path)]) == 2
    assert "sbpflow stats --recount" in capsys.readouterr().err


def test_a_list_weight_that_is_not_finite_is_reported_with_its_row(tmp_path):
    manifest, rows = make_full_set(tmp_path / "set")
    row = next(n for n in range(50, len(rows)) if rows[n].lists[2])
    before = sum(len(ids) for earlier in rows[:row] for ids in earlier.lists)
    first = before + sum(map(len, rows[row].lists[:2]))  # the first value of L2 in this row
    shard = manifest.shards("train")[0]
    weights = np.load(manifest.path / shard.parts["value_weights"].file, mmap_mode="r+")
    weights[first] = np.inf
    weights.flush()
    with pytest.raises(DataError, match=f"row {row} has L2 weight inf, but it must be finite"):
        check_lists(manifest, shard)


@pytest.mark.parametrize("bad", [-1, 500, -(2**31)])
def test_an_id_out_of_range_is_reported_with_its_row_and_found_by_verify(copy, capsys, bad):
    words = np.load(copy.path / "train-20.npy", mmap_mode="r+")
    words[11, 4] = bad
    words.flush()
    assert main(["stats", str(copy.path), "--recount"]) == 2
    error = capsys.readouterr().err
    assert f"row 31 of train has id {bad} for C2, but its table has rows 0..499" in error
    assert "sbpflow verify" in error
    assert main(["verify", str(copy.path)]) == 2
    assert "train-20.npy: the checksum differs" in capsys.readouterr().err


def test_the_loader_delivers_ids_without_checking_them(copy):
    """Embeddings check ids, but readers do not, as docs/data.md states."""
    words = np.load(copy.path / "train-0.npy", mmap_mode="r+")
    words[0, 3] = 500
    words.flush()
    batch = next(open_loader(copy, batch_size=50, shuffle="none").epoch(0))
    assert batch.ids[0, 0] == 500


def test_recounting_a_set_with_a_missing_shard_gives_one_line(copy, capsys):
    (copy.path / "train-20.npy").unlink()
    assert main(["stats", str(copy.path), "--recount"]) == 2
    error = capsys.readouterr().err
    assert "train-20.npy cannot be read" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("where", ["absent/plot.png", "."])
def test_a_picture_that_cannot_be_written_gives_one_line(copy, capsys, tmp_path, where):
    pytest.importorskip("matplotlib")
    assert main(["stats", str(copy.path), "--png", str(tmp_path / where)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {tmp_path}")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_a_picture_needs_no_suffix(copy, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["stats", str(copy.path), "--png", str(tmp_path / "plot.xyz")]) == 0
    assert (tmp_path / "plot.xyz").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("splits", [("train",), ("train", "val"), ("train", "val", "test")])
def test_the_best_scores_are_those_of_the_last_split(copy, capsys, splits):
    pair = {"logloss": 0.4, "ctr": 0.2}
    forge(copy.path, bayes={name: {"auc": 0.7 + k / 100, **pair} for k, name in enumerate(splits)})
    bayes = load_manifest(copy.path).bayes
    assert bayes.split == splits[-1]
    assert (bayes.auc, bayes.logloss) == bayes.by_split[splits[-1]]
    assert main(["verify", str(copy.path)]) == 0
    assert f"best possible on {splits[-1]}: AUC {bayes.auc:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["nothing", "file"])
def test_a_run_and_stats_give_the_same_message_for_a_missing_folder(tmp_path, capsys, kind):
    path = tmp_path / "set"
    if kind == "file":
        path.touch()
    with pytest.raises(ConfigError) as of_run:
        data_path(Config(model=WdlConfig(), data=DataConfig(path=path)))
    with pytest.raises(DataError) as of_manifest:
        load_manifest(path)
    assert main(["stats", str(path)]) == 2
    text = str(of_run.value)
    assert text == str(of_manifest.value)
    expected = text.replace("data.path:", "DIR:", 1)  # the command's name for this argument
    assert capsys.readouterr().err == f"error: {expected}\n"
    problem = "does not exist" if kind == "nothing" else "is not a folder"
    assert text.startswith(f"data.path: {path} {problem}; make a set with `sbpflow prepare")

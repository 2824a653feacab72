"""Tests growing fields from raw rows to scores, using only commands."""

import json
import shutil

import numpy as np
import polars as pl
import pytest
import torch

from sbpflow.checkpoint.folder import list_checkpoints
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.commands import train
from sbpflow.commands.checkpoint import checkpoint
from sbpflow.commands.explain import explain
from sbpflow.commands.predict import predict
from sbpflow.data.__main__ import main as data
from sbpflow.data.format.manifest import load_manifest
from sbpflow.data.format.shards import RowFiles
from sbpflow.embedding.storage import live_rows
from sbpflow.errors import ConfigError, DataError
from sbpflow.run.report.page import write_report
from sbpflow.runtime.files.run_folder import RunLock
from sbpflow.runtime.random.streams import mix
from tests.quick import quick
from tests.training.test_resume import Interrupted, interrupt

ROWS, BATCH = 4000, 100
MODEL = """
data: {batch_size: 100, shuffle: none, loader: memmap}
model:
  name: wdl
  embedding_dim: 4
  hidden: [8]
  wide: {columns: [C3], crosses: [[C1, C2]]}
  fields:
    C3: {vocabulary: dynamic, admit_count: 2, evict: {max_rows: 65536}}
    C7: {vocabulary: dynamic, admit_count: 3, forget_after_samples: 1500,
         evict: {max_rows: 65536, idle_samples: 200}}
optimizer: {sparse: {name: rowwise_adagrad}}
parallel: {kernel: torch, scheme: 3}
train: {log_every: 8, eval_every: 0}
checkpoint: {every: 16}
"""


def make(folder, name, seed, *more, rows=ROWS):
    text = folder / f"{name}.tsv"
    words = ["--format", "tsv", "--rows", str(rows), "--vocab-scale", "0.001", "--drift", "300"]
    assert data(["synth", *words, "--seed", str(seed), "--output", str(text)]) == 0
    words = ["--input", str(text), "--output", str(folder / name), *map(str, more)]
    assert data(["prepare", *words, "--workers", "1"]) == 0
    return folder / name


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Return a folder with two sets and the configuration of a run."""
    folder = tmp_path_factory.mktemp("growing")
    (folder / "run.yaml").write_text(MODEL)
    first = make(folder, "first", 1, "--keys", "C3,C7")
    make(folder, "second", 2, "--like", first)
    return folder


@pytest.fixture(scope="module")
def run(sets):
    """Return the folder after a run on the first set."""
    pytest.importorskip("numba", reason="growing tables need numba")
    assert start(sets, sets / "first", "run") == 0
    return sets


def start(folder, path, name, *more):
    words = ["--config", str(folder / "run.yaml"), f"data.path={path}"]
    return train.main([*words, f"run.dir={folder / name}", *more])


def steps_of(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "step"]


def seen(path, column, steps):
    """Return the keys of a field in the first steps, and how often each occurs."""
    rows = RowFiles(load_manifest(path), "train")
    return np.unique(rows.keys(0, steps * BATCH)[:, column], return_counts=True)


def test_rows_go_to_keys_that_occur_often_enough(run):
    last = steps_of(run / "run")[-1]
    keys, counts = seen(run / "first", 0, last["step"])
    assert last["step"] == 32
    assert last["growth.C3.live"] == (counts >= 2).sum()
    assert last["growth.C3.pending"] == (counts < 2).sum()
    assert last["growth.C3.admitted"] == last["growth.C3.live"] == last["growth.C3.rows_of_rank_0"]
    assert last["growth.C7.forgotten"] > 0
    assert last["growth.C7.evicted"] > 0
    assert last["growth_live"] == last["growth.C3.live"] + last["growth.C7.live"]
    saved = open_checkpoint(run / "run" / "checkpoints" / "step-32")
    for table in ("deep.C3", "wide.C3"):
        rows = saved.tensors[f"tables/{table}"].shape[0]
        assert (counts >= 2).sum() <= rows <= (counts >= 2).sum() + 1
    assert keys[0] == -(2**63), "the key of missing values"
    assert "Growing tables" in write_report([run / "run"]).read_text()


def test_explain_shows_the_limits(sets, capsys):
    words = ["--config", str(sets / "run.yaml"), f"data.path={sets / 'first'}", "--ranks", "1"]
    assert explain(words) == 0
    out = capsys.readouterr().out
    assert "growing tables:" in out
    line = next(line for line in out.splitlines() if line.strip().startswith("deep.C7: a key"))
    assert "after 3 occurrences" in line
    assert "at most 65,536 rows, then lru eviction" in line
    assert explain([*words, "--json"]) == 0
    growing = json.loads(capsys.readouterr().out)["growing"]
    assert [entry["table"] for entry in growing] == ["wide.C3", "deep.C3", "deep.C7"]


def test_explain_forecasts_the_rows_of_keys_in_a_cache(sets, capsys):
    pytest.importorskip("numba", reason="growing tables need numba")
    words = ["--config", str(sets / "run.yaml"), "--ranks", "2", f"data.path={sets / 'first'}"]
    words += ["model.embedding_dim=8", 'parallel.storage={"deep.C3": {kind: file, cache: 1%}}']
    assert explain([*words, "--json"]) == 0
    caches = json.loads(capsys.readouterr().out)["caches"]
    num_rows: list[int] = []  # per batch: keys with rows, plus 1 if the shared row is used
    counts = dict[int, int]()
    keys = RowFiles(load_manifest(sets / "first"), "train").keys(0, 32 * BATCH)[:, 0]
    for batch in keys.reshape(32, BATCH).tolist():
        for key in batch:
            counts[key] = counts.get(key, 0) + 1
        present = {key for key in batch if counts[key] >= 2}
        num_rows.append(len(present) + (len(present) < len(set(batch))))
    expected = np.mean(num_rows[16:])
    assert sum(cache["rows_per_step"]["unique"] for cache in caches) == pytest.approx(expected)
    with pytest.raises(
        ConfigError, match=r"cache: the cache of .*deep\.C3 has 4 slots for rows on rank"
    ):
        explain([*words, 'parallel.storage={"deep.C3": {kind: file, cache: 0.01%}}'])


def test_a_forecast_without_numba_names_the_missing_package(sets, monkeypatch):
    monkeypatch.setattr(live_rows, "find_spec", lambda name: None)
    words = ["--config", str(sets / "run.yaml"), "--ranks", "2", f"data.path={sets / 'first'}"]
    words += ['parallel.storage={"deep.C3": {kind: file, cache: 1%}}']
    with pytest.raises(ConfigError, match=r"field C3: vocabulary: dynamic needs numba, which is"):
        explain(words)


def test_raw_rows_are_scored_by_their_keys(run):
    assert data(["synth", "--format", "tsv", "--rows", "300", "--vocab-scale", "0.001",
                 "--output", str(run / "new.tsv")]) == 0  # fmt: skip
    words = ["--checkpoint", str(run / "run"), "--input"]
    scores = {}
    for name, given in {"raw": [run / "new.tsv"], "set": [run / "first"]}.items():
        output = run / f"{name}.parquet"
        assert predict([*words, *map(str, given), "--output", str(output)]) == 0
        scores[name] = pl.read_parquet(output)
    assert len(scores["raw"]) == 300
    assert scores["set"]["score"].is_finite().all()
    assert scores["raw"]["score"].n_unique() > 100


@pytest.mark.parametrize("background", quick(["true", "false"], lambda n: n == 0))
def test_a_run_with_deltas_resumes_and_predicts_bit_for_bit(run, monkeypatch, background):
    name, path = f"deltas-{background}", run / "first"
    more = ("checkpoint.every=3", "checkpoint.deltas=5", f"checkpoint.background={background}")
    for at in (8, 20):
        with monkeypatch.context() as patch:
            interrupt(patch, at)
            with pytest.raises(Interrupted):
                start(run, path, name, *more)
    assert start(run, path, name, *more) == 0
    one, two = (open_checkpoint(run / each / "checkpoints/step-32") for each in ("run", name))
    assert two.chain_length == 5
    assert one.tensors.keys() == two.tensors.keys()
    for tensor in one.tensors:
        assert one.tensor(tensor).equal(two.tensor(tensor)), tensor
    scores = []
    for each in ("run", name):
        output = run / f"scores-{each}-of-{name}.parquet"
        words = ["--checkpoint", str(run / each), "--input", str(path), "--output", str(output)]
        assert predict(words) == 0
        scores.append(pl.read_parquet(output))
    assert scores[0].equals(scores[1])


def test_a_run_continues_on_rows_of_another_day(run, capfd):
    checkpoint = run / "run" / "checkpoints" / "step-32"
    assert start(run, run / "second", "later", f"checkpoint.resume={checkpoint}") == 0
    assert f"step-32, at the first row of {run / 'second'}\n" in capfd.readouterr().err
    before, after = steps_of(run / "run")[-1], steps_of(run / "later")[-1]
    assert after["step"] == 64
    for name in ("live", "admitted"):
        assert after[f"growth.C3.{name}"] > before[f"growth.C3.{name}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.scheme=dp"], None),
        (["model.fields={}"], r"model\.fields\.C3: the data has 64-bit keys for this field"),
        (
            ["model.fields={C*: {vocabulary: dynamic, evict: {max_rows: 65536}}}"],
            r"model\.fields\.C1xC2\.vocabulary is dynamic, but .*`--keys C1xC2`",
        ),
    ],
)
def test_settings_are_checked_before_training(sets, words, message):
    path = sets / "first"
    if message is None:  # on one rank, nothing is copied
        pytest.importorskip("numba", reason="growing tables need numba")
        assert start(sets, path, "dp", "train.max_steps=2", *words) == 0
        return
    with pytest.raises(ConfigError, match=message):
        start(sets, path, "refused", *words)


def test_copies_of_growing_tables_are_refused(sets):
    words = ["--config", str(sets / "run.yaml"), f"data.path={sets / 'first'}", "--ranks", "2"]
    with pytest.raises(ConfigError, match=r"table .*C3: grows: layout .* use S\(0\) or S\(1\)"):
        explain([*words, "parallel.scheme=dp"])
    assert explain([*words, "parallel.scheme=auto"]) == 0
    assert explain([*words, "parallel.scheme=1"]) == 0


def remains(folder, arrays):
    """Return the files that contain any of the byte strings."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files for array in arrays if array in path.read_bytes()]


def test_listed_keys_are_erased_from_the_files(run, tmp_path, capsys):
    shutil.copytree(run / "run", tmp_path / "run")
    for older in list_checkpoints(tmp_path / "run" / "checkpoints")[1:]:
        shutil.rmtree(older)
    (newest,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    saved = open_checkpoint(newest)
    before = {name: saved.tensor(name) for name in saved.tensors}
    keys, pending = before["vocabularies/C3/keys"], before["vocabularies/C3/pending_keys"]
    chosen = torch.cat([keys[10:30:2], pending[:10]])
    rows = before["tables/deep.C3"][11:31:2]
    arrays = [key.numpy().tobytes() for key in chosen] + [row.numpy().tobytes() for row in rows]
    assert len(remains(newest, arrays)) == 30
    (tmp_path / "keys.txt").write_text("".join(f"{key & 0xFFFFFFFF:08x}\n" for key in chosen))
    words = ["erase", str(tmp_path / "run"), "--field", "C3", "--keys", str(tmp_path / "keys.txt")]
    assert checkpoint(words) == 0
    assert "erased 10 keys with rows and 10 pending keys of C3" in capsys.readouterr().out
    assert remains(tmp_path / "run", arrays) == []
    after = open_checkpoint(newest)
    after.verify()
    keeps = ~torch.isin(keys, chosen)
    whole = torch.cat([torch.tensor([True]), keeps])
    for name, old in before.items():
        if name.startswith(("tables/deep.C3", "tables/wide.C3")):
            old = old[whole]
        elif name in ("vocabularies/C3/keys", "vocabularies/C3/last_uses"):
            old = old[keeps]
        if not name.startswith(("vocabularies/C3/pending", "vocabularies/C3/counts")):
            assert torch.equal(old, after.tensor(name)), name
    assert start(run, run / "second", tmp_path / "later", f"checkpoint.resume={newest}") == 0
    with pytest.raises(ConfigError, match=r"--field C1 does not grow .*; use C3 or C7"):
        checkpoint([*words[:3], "C1", *words[4:]])
    (tmp_path / "keys.txt").write_bytes(b"\xef\xbb\xbf68fd1e64\r\n\n4-5\n")
    with pytest.raises(ConfigError, match="field C3, line 3: '4-5' is not a value of kind hex"):
        checkpoint(words)
    (tmp_path / "keys.txt").write_text("68fd1e64\u20284c\n", "utf-8")  # one value, not two
    with pytest.raises(ConfigError, match=r"field C3, line 1: .* is not a value of kind hex"):
        checkpoint(words)
    (tmp_path / "keys.txt").write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match=r"^--keys: .*keys.txt: not UTF-8 text"):
        checkpoint(words)
    # This mistake is found before any values are read.
    with pytest.raises(ConfigError, match="--field C99 does not grow"):
        checkpoint([*words[:3], "C99", *words[4:]])


def test_a_fitted_run_continues_with_keys(run, tmp_path):
    """After the conversion to keys, the run scores rows as before: known values use their own rows,
    and other values use the rare row.
    """
    fitted = make(tmp_path, "fitted", 1)
    words = ["--config", str(run / "run.yaml"), f"data.path={fitted}", "model.fields={}"]
    assert train.main([*words, f"run.dir={tmp_path / 'run'}"]) == 0
    (newest, *_) = list_checkpoints(tmp_path / "run" / "checkpoints")
    words = [str(tmp_path / "run"), "--data", str(run / "first"), "--output"]
    assert checkpoint(["to-keys", *words, str(tmp_path / "keyed")]) == 0
    old, new = open_checkpoint(newest), open_checkpoint(tmp_path / "keyed" / newest.name)
    new.verify()
    keyed_rows = RowFiles(load_manifest(run / "first"), "train").keys(0, 500)[:, 0]
    ids = RowFiles(load_manifest(fitted), "train").read(0, 500)[:, 1 + 13 + 2]
    keys = new.tensor("vocabularies/C3/keys")
    places = {int(key): place + 1 for place, key in enumerate(keys)}
    assert len(places) == keys.numel() > 100
    assert (mix(keys)[1:] > mix(keys)[:-1]).all()
    for name in ("tables/deep.C3", "tables/wide.C3"):
        for tensor in (each for each in old.tensors if each.startswith(name)):
            rows = [places.get(int(key), 0) for key in keyed_rows]
            assert torch.equal(new.tensor(tensor)[rows], old.tensor(tensor)[ids]), tensor
    assert torch.equal(new.tensor("tables/deep.C1"), old.tensor("tables/deep.C1"))
    path = tmp_path / "keyed" / newest.name
    assert start(run, run / "first", tmp_path / "later", f"checkpoint.resume={path}") == 0
    last = steps_of(tmp_path / "later")[-1]
    assert last["growth.C3.live"] >= keys.numel()
    with pytest.raises(ConfigError, match=r"--output .* already has a checkpoint of step 32"):
        checkpoint(["to-keys", *words, str(tmp_path / "keyed")])
    saving = tmp_path / "busy" / ".step-6.partial-0123456789"  # of a run that is saving
    saving.mkdir(parents=True)
    lock = RunLock(saving.parent, rank=0, key="checkpoint.dir")
    with pytest.raises(ConfigError, match=r"busy: a run is saving there"):
        checkpoint(["to-keys", *words, str(saving.parent)])
    assert saving.is_dir()
    lock.close()
    words[2] = str(tmp_path / "missing")
    with pytest.raises(DataError, match=r"^--data: \S+/missing does not exist"):
        checkpoint(["to-keys", *words, str(tmp_path / "other")])
    words[2] = str(fitted)
    with pytest.raises(ConfigError, match=r"--data .* has no keys for the fields of .* --keys"):
        checkpoint(["to-keys", *words, str(tmp_path / "other")])
    words[2] = str(make(tmp_path, "new", 1, "--keys", "C3,C7", "--dense", "standardise", rows=500))
    with pytest.raises(ConfigError, match=r"--data: the dense columns of \S+/new have other trans"):
        checkpoint(["to-keys", *words, str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()


TIMED = """
data: {batch_size: 2, shuffle: none, loader: memmap}
model:
  name: wdl
  embedding_dim: 2
  hidden: [4]
  wide: {columns: [], crosses: []}
  fields: {user: {vocabulary: dynamic, evict: {max_rows: 65536, idle_time: 500}}}
parallel: {kernel: torch, scheme: 3}
train: {log_every: 100, eval_every: 0}
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("timed", [True, False])
def test_keys_leave_by_the_event_time_of_the_rows(tmp_path, timed):
    """Row i has time i and user i // 3: no user returns, and keys are evicted only for being
    idle.
    """
    rows = "\n".join(f"{row % 2},{row}.5,u{row // 3},{row}" for row in range(2700))
    (tmp_path / "rows.csv").write_text(f"click,price,user,ts\n{rows}\n")
    text = "header: true\nseparator: ','\nlabel: click\ndense: {price: log1}\n"
    text += "sparse: {user: string}\n" + "time: {ts: integer}\n" * timed
    (tmp_path / "schema.yaml").write_text(text)
    (tmp_path / "run.yaml").write_text(TIMED)
    words = ["--schema", tmp_path / "schema.yaml", "--input", tmp_path / "rows.csv", "--keys"]
    words += ["--output", tmp_path / "set", "--workers", "1"]
    assert data(["prepare", *map(str, words)]) == 0
    if not timed:
        message = r"model\.fields\.user\.evict\.idle_time .* rows of this set have no time"
        with pytest.raises(ConfigError, match=message):
            start(tmp_path, tmp_path / "set", "run")
        return
    pytest.importorskip("numba", reason="growing tables need numba")
    assert start(tmp_path, tmp_path / "set", "run") == 0
    last = steps_of(tmp_path / "run")[-1]
    assert last["step"] == 1080
    # At step s, (2 s - 500) / 3 users are idle. Each step looks at 1/1,024 of all keys and evicts
    # the idle ones: on average, 224 users over all steps.
    assert 150 < last["growth.user.evicted"] < 300

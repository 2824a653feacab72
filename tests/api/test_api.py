"""Tests that ``sbpflow.fit`` gives the same results as the commands, and leaves the process
unchanged.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

import sbpflow
from sbpflow.api import Run
from sbpflow.checkpoint.folder import list_checkpoints
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.commands import train
from sbpflow.commands.predict import predict
from sbpflow.data import load_manifest, open_loader
from sbpflow.data.__main__ import main as data_main
from sbpflow.data.prepare.new_rows import encode
from sbpflow.errors import CheckpointError, ConfigError, DataError
from sbpflow.models.dlrm import DlrmConfig
from sbpflow.serving import scorer
from sbpflow.training.progress import Progress
from sbpflow.training.trainer import Trainer

SCHEMA = {
    "label": "clicked",
    "dense": {"price": "log1"},
    "sparse": {"user": "integer", "item": "integer", "city": "string"},
}
CONFIG = {
    "data": {"batch_size": 256, "loader": "memmap"},
    "model": {"name": "dlrm", "embedding_dim": 4, "bottom": [8], "top": [8]},
    "optimizer": {"sparse": {"name": "adagrad", "lr": 0.1}},
    "parallel": {"kernel": "torch", "device": "cpu"},
    "train": {"epochs": 2, "eval_every": 0, "log_every": 5},
}
CITIES = np.array(["Berlin", "Lagos", "Lima", "Osaka"])


def rows(count: int, seed: int = 0) -> pd.DataFrame:
    """Return clicks that depend on the item, the city and the price."""
    random = np.random.default_rng(seed)
    item, city = random.integers(-20, 20, count), random.integers(4, size=count)
    price = random.uniform(1, 100, count)
    logit = np.sin(item) * 2 + city - price / 50
    clicked = random.random(count) < 1 / (1 + np.exp(-logit))
    user = random.integers(200, size=count)
    columns = {"user": user, "item": item, "city": CITIES[city], "price": price}
    return pd.DataFrame({**columns, "clicked": clicked.astype(int)})


def fit(folder: Path, data: object = None, **more: object) -> Run:
    data = rows(3000) if data is None else data
    return sbpflow.fit(CONFIG, data=data, schema=SCHEMA, run={"dir": folder}, **more)


def events(folder: Path) -> list[dict]:
    """Return a run's events, without times and speeds."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    measured = ("time", "samples_per_s", "eta_s", "peak_memory_bytes")
    return [
        {k: v for k, v in json.loads(line).items() if k not in measured and not k.endswith("_ms")}
        for line in lines
    ]


def state() -> dict[str, object]:
    """Return the parts of this process's state that a training run must not change."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    loggers = ("", "sbpflow", "torch.distributed.elastic", "torch.distributed.launcher")
    return {
        "signals": [signal.getsignal(number) for number in numbers],
        "environment": dict(os.environ),
        "levels": [logging.getLogger(name).level for name in loggers],
        "handlers": list(logging.getLogger().handlers),
        "process group": dist.is_initialized(),
        "temporary files": sorted(Path(tempfile.gettempdir()).glob("sbpflow-*")),
        "children": children(),
        "folder": Path.cwd(),
        "path": list(sys.path),
    }


def children() -> list[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return sorted(pid for task in tasks for pid in task.read_text().split())


@pytest.fixture(autouse=True)
def temporary(run, tmp_path, monkeypatch):
    """Use a private folder for temporary files. The fixture ``run`` comes first, because a run
    imports parts of torch that set environment variables.
    """
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return fit(tmp_path_factory.mktemp("api") / "run")


def test_a_run_gives_the_same_results_as_the_commands(run, tmp_path):
    rows(3000).to_parquet(tmp_path / "clicks.parquet")
    (tmp_path / "schema.yaml").write_text(json.dumps(SCHEMA))
    words = ["--input", tmp_path / "clicks.parquet", "--schema", tmp_path / "schema.yaml"]
    assert data_main(["prepare", *map(str, words), "--output", str(tmp_path / "set")]) == 0
    (tmp_path / "run.yaml").write_text(json.dumps(CONFIG))
    more = [f"data.path={tmp_path / 'set'}", f"run.dir={tmp_path / 'run'}", "parallel.scheme=auto"]
    assert train.main(["--config", str(tmp_path / "run.yaml"), *more]) == 0
    assert events(tmp_path / "run") == events(run.dir)
    assert run.result["auc"] > 0.7
    assert {"event": "final", **run.result}.items() >= events(run.dir)[-1].items()


def test_the_process_state_is_unchanged(tmp_path):
    before, threads = state(), threading.active_count()
    run = fit(tmp_path / "run")
    run.predict(rows(50))
    run.evaluate(rows(50))
    with pytest.raises(ConfigError, match=r"^train\.epoch: unknown key"):
        fit(tmp_path / "other", train={"epoch": 1})
    large = {**CONFIG, "data": {"batch_size": 5000, "tail": "drop"}}
    with pytest.raises(ConfigError, match=r"^data\.batch_size is 5000, but the train split"):
        sbpflow.fit(large, data=rows(100), schema=SCHEMA, run={"dir": tmp_path / "other"})
    assert state() == before
    assert threading.active_count() <= threads + 1, "tqdm has one"
    fit(tmp_path / "other")  # works only if the first run's lock is released


def test_arguments_are_not_changed(tmp_path):
    rest = {key: group for key, group in CONFIG.items() if key != "parallel"}
    groups = {"kernel": "torch", "device": "cpu"}
    run = {"dir": tmp_path / "run"}
    sbpflow.fit(rest, data=rows(600), schema=SCHEMA, run=run, parallel=groups)
    assert groups == {"kernel": "torch", "device": "cpu"}
    assert run == {"dir": tmp_path / "run"}


def test_two_ranks_train_equally_and_leave_the_process_state_unchanged(run, tmp_path):
    before = state()
    two = fit(tmp_path / "two", ranks=2)
    assert state() == before
    assert two.result["auc"] == pytest.approx(run.result["auc"], abs=1e-4)
    assert len(two.result["peak_memory_bytes"]) == 2
    steps = [event for event in events(two.dir) if event["event"] == "step"]
    assert {step["last_step"] for step in steps} == {steps[-1]["step"]}
    new = rows(200, seed=1)
    np.testing.assert_allclose(two.predict(new)["score"], run.predict(new)["score"], atol=1e-4)


@pytest.mark.slow
def test_an_error_of_the_ranks_is_raised_in_the_caller(tmp_path):
    before = state()
    tables = {"kernel": "torch", "device": "cpu", "tables": {"none": {"sbp": "B"}}, "scheme": "1"}
    with pytest.raises(ConfigError, match=r"^parallel\.tables\.none matches no table") as mistake:
        fit(tmp_path / "run", ranks=2, parallel=tables)
    assert "[rank" not in str(mistake.value)
    assert state() == before
    with pytest.raises(ConfigError) as alone:
        fit(tmp_path / "run", parallel=tables)
    assert str(alone.value) == str(mistake.value)


@dataclass(frozen=True, kw_only=True)
class Failing(DlrmConfig):
    """A model whose dense part cannot be built."""

    name: str = "failing"

    def spec(self, fields):
        raise ZeroDivisionError("a bug of the model")


@pytest.mark.slow
def test_a_crash_of_a_rank_comes_with_its_traceback(tmp_path):
    model = {**CONFIG["model"], "name": f"{__name__}:Failing"}
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug of the model") as crash:
        fit(tmp_path / "run", ranks=2, model=model)
    assert "in spec" in str(crash.value)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "run", model=model)


def interrupt_at(monkeypatch, step: int, *, times: int = 1) -> None:
    """Send SIGINT during the step, as interrupting a notebook does."""
    real = Trainer.step

    def interrupted(self, batches):
        loss = real(self, batches)
        if self.num_steps == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return loss

    monkeypatch.setattr(Trainer, "step", interrupted)


def test_an_interrupt_saves_the_run_and_the_same_call_resumes_it(run, tmp_path, monkeypatch):
    before = state()
    with monkeypatch.context() as patch:
        interrupt_at(patch, 7)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "run")
    assert state() == before
    part = sbpflow.load(tmp_path / "run")
    assert part.result == {}
    assert part.evaluate(rows(100))["num_rows"] == 100
    assert [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")] == ["step-7"]
    again = fit(tmp_path / "run")
    assert events(again.dir) == events(run.dir)


def test_a_second_interrupt_ends_at_once(tmp_path, monkeypatch):
    before = state()
    interrupt_at(monkeypatch, 7, times=2)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run")
    assert state() == before
    assert list_checkpoints(tmp_path / "run/checkpoints") == []


@pytest.mark.slow
def test_an_interrupt_reaches_two_ranks(tmp_path):
    before = state()
    metrics = tmp_path / "run/metrics.jsonl"

    def interrupt() -> None:
        while '"step"' not in (metrics.read_text() if metrics.exists() else ""):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", ranks=2, train={"epochs": 1000})
    thread.join()
    assert state() == before
    assert len(list_checkpoints(tmp_path / "run/checkpoints")) == 1
    assert sbpflow.load(tmp_path / "run").predict(rows(10)).shape == (10, 3)


@dataclass(frozen=True, kw_only=True)
class OfCell(DlrmConfig):
    """A model as defined in a notebook cell."""

    name: str = "of cell"


def test_a_class_of_a_cell_trains_here_and_is_refused_elsewhere(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "OfCell", OfCell, raising=False)
    model = {**CONFIG["model"], "name": "__main__:OfCell"}
    with pytest.raises(ConfigError, match=r"^ranks is 2, but __main__:OfCell is defined in this"):
        fit(tmp_path / "run", ranks=2, model=model)
    own = fit(tmp_path / "run", model=model)
    assert own.result["auc"] == run.result["auc"]
    assert own.predict(rows(20))["score"].tolist() == run.predict(rows(20))["score"].tolist()
    with pytest.raises(ConfigError, match="use --model __main__:OfCell"):
        sbpflow.load(own.dir).predict(rows(20))
    loaded = sbpflow.load(own.dir, model="__main__:OfCell")
    assert loaded.evaluate(rows(20)) == own.evaluate(rows(20))


@pytest.mark.parametrize("kind", ["pandas", "polars", "arrow", "file"])
def test_predictions_equal_those_of_the_command(run, tmp_path, kind):
    new = rows(300, seed=2).drop(columns="clicked").set_index(np.arange(300) * 3)
    frame = pl.DataFrame(new.reset_index(drop=True))
    frame.write_parquet(tmp_path / "new.parquet")
    words = ["--checkpoint", run.dir, "--input", tmp_path / "new.parquet"]
    assert predict([*map(str, words), "--output", str(tmp_path / "s.parquet")]) == 0
    expected = pl.read_parquet(tmp_path / "s.parquet")
    data = {"pandas": new, "polars": frame, "arrow": frame.to_arrow()}
    scores = run.predict(data.get(kind, tmp_path / "new.parquet"))
    kinds = {"pandas": pd.DataFrame, "arrow": pa.Table}
    assert type(scores) is kinds.get(kind, pl.DataFrame)
    assert pl.DataFrame(scores).equals(expected)
    if kind == "pandas":
        assert scores.index.tolist() == new.index.tolist()


def test_missing_values_of_pandas_are_missing(run):
    new = rows(4, seed=3).drop(columns="clicked")
    lost = new.astype({"item": float, "price": float})
    lost.loc[1, ["item", "price"]] = np.nan
    lost.loc[2, "city"] = None
    nulls = pl.DataFrame(new).with_columns(
        item=pl.Series([new["item"][0], None, *new["item"][2:]]),
        price=pl.Series([new["price"][0], None, *new["price"][2:]]),
        city=pl.Series([*new["city"][:2], None, new["city"][3]]),
    )
    assert run.predict(lost)["score"].tolist() == run.predict(nulls)["score"].to_list()
    assert run.predict(lost)["score"].tolist() != run.predict(new)["score"].tolist()


def test_errors_use_the_callers_names_for_rows_in_memory(run, tmp_path):
    new = rows(30)
    with pytest.raises(
        DataError, match=r"^data has no column 'price'; its columns are user, item, city, click"
    ):
        run.predict(new.drop(columns="price"))
    new["price"] = "$1,234.50"
    with pytest.raises(DataError) as error:
        run.predict(new)
    assert "data:1: price is not a number: '$1,234.50'" in str(error.value)
    with pytest.raises(DataError, match=r"data\['val'\] has no column 'price'"):
        fit(tmp_path / "run", {"train": rows(300), "val": rows(30).drop(columns="price")})


def test_an_evaluation_of_the_test_rows_equals_that_of_the_run(run):
    scores = run.evaluate(rows(3000)[2700:])
    final = run.result
    assert {key: scores[key] for key in ("auc", "logloss")} == pytest.approx(
        {key: final[key] for key in ("auc", "logloss")}, abs=1e-6
    )
    assert scores["num_rows"] == 300
    with pytest.raises(DataError, match=r"^data: the rows have no label column 'clicked'"):
        run.evaluate(rows(30).drop(columns="clicked"))


def test_the_splits_may_be_given_as_separate_tables(run, tmp_path):
    table = rows(3000)
    parts = {"test": table[2700:], "train": table[:2400], "val": pl.DataFrame(table[2400:2700])}
    own = fit(tmp_path / "run", parts)
    assert own.result["auc"] == pytest.approx(run.result["auc"], abs=0.05)
    assert own.evaluate(table[2700:])["auc"] == pytest.approx(own.result["auc"], abs=1e-6)
    with pytest.raises(ConfigError, match=r"^data contains rows for train, tests; pass rows for"):
        fit(tmp_path / "run", {"train": table, "tests": table})


def test_embeddings_are_the_rows_that_the_loader_looks_up(run, tmp_path):
    table = rows(100)
    table.to_parquet(tmp_path / "some.parquet")
    like = run.dir / "checkpoints" / "data"
    encode(
        [tmp_path / "some.parquet"], tmp_path / "set", like=like, workers=1, max_bad_fraction=0.0
    )
    manifest = load_manifest(tmp_path / "set")
    loader = open_loader(manifest, split="test", batch_size=100, shuffle="none")
    ids = next(iter(loader.epoch(0))).ids.clone().numpy()
    loader.close()
    saved = open_checkpoint(run.dir / "checkpoints" / "step-20")
    for column, name in enumerate(["user", "item", "city"]):
        stored = saved.tensor(f"tables/deep.{name}").numpy()
        has_row = ids[:, column] > 1
        values, vectors = run.embeddings(f"deep.{name}", values=table[name])
        by_value = dict(zip(values.tolist(), vectors.tolist(), strict=True))
        assert list(by_value) == table[name][has_row].unique().tolist()
        found = [by_value[value] for value in table[name][has_row]]
        assert found == stored[ids[has_row, column]].tolist()


def test_embeddings_of_all_values_and_of_some(run):
    items, vectors = run.embeddings("deep.item")
    assert items.tolist() == [*range(20), *range(-20, 0)], "in the order of unsigned keys"
    assert (vectors.shape, vectors.dtype) == ((40, 4), np.float32)
    some, of_some = run.embeddings("deep.item", values=[7, -3, 99, None, 7])
    assert some.tolist() == [7, -3]
    assert of_some.tolist() == vectors[[7, 37]].tolist()
    with pytest.raises(
        ConfigError, match=r"pass the strings \(for example, values=frame\['city'\]"
    ):
        run.embeddings("deep.city")
    with pytest.raises(
        ConfigError, match=r"^table 'deep.items' is not .* \(for example, deep.item\)$"
    ):
        run.embeddings("deep.items")


def test_an_exported_model_gives_the_same_scores(run, tmp_path):
    files = run.export(tmp_path / "model", pt2=True)
    assert {"model.json", "model.pt2", "scorer.py"} <= {file.name for file in files}
    model = torch.export.load(tmp_path / "model" / "model.pt2").module()
    # All categorical values are missing, and the dense value is 0.
    ids, dense = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 1)
    missing = pl.DataFrame({"user": [None], "item": [None], "city": [None], "price": [0.0]})
    (score,) = run.predict(missing)["score"]
    assert torch.sigmoid(model(ids, dense, {})).tolist() == pytest.approx([score] * 2, abs=1e-6)
    assert scorer.load(tmp_path / "model").score(missing).tolist() == pytest.approx(
        [score], abs=1e-6
    )


def test_a_later_run_in_the_same_folder_is_not_mistaken_for_this_one(tmp_path):
    first = fit(tmp_path / "run")
    before = first.predict(rows(20))
    fit(tmp_path / "run", train={"epochs": 1})
    with pytest.raises(CheckpointError, match="now contains the checkpoints of a later run"):
        first.predict(rows(20))
    moved = sbpflow.load(tmp_path / "run/previous-1")
    assert moved.result == first.result
    assert moved.predict(rows(20)).equals(before)


def test_a_run_without_checkpoints_has_only_its_result(tmp_path):
    run = fit(tmp_path / "run", checkpoint={"every": 0})
    assert run.result["auc"] > 0.5
    with pytest.raises(CheckpointError, match=r"because checkpoint\.every is 0"):
        run.predict(rows(10))


def test_a_prepared_set_is_used_as_it_is(run, tmp_path):
    rows(3000).to_csv(tmp_path / "clicks.csv", index=False)
    (tmp_path / "schema.yaml").write_text(json.dumps({**SCHEMA, "separator": ",", "header": True}))
    words = ["--input", tmp_path / "clicks.csv", "--schema", tmp_path / "schema.yaml"]
    words += ["--output", tmp_path / "set", "--split", "time:.9,.1,0"]
    assert data_main(["prepare", *map(str, words), "--min-count", "1"]) == 0
    here = sbpflow.fit(CONFIG, data=tmp_path / "set", run={"dir": tmp_path / "here"})
    there = sbpflow.fit(
        CONFIG,
        data=str(tmp_path / "clicks.csv"),
        schema=tmp_path / "schema.yaml",
        prepare={"min_count": 1, "keep_strings": False, "hash_size": None, "split": "time:.9,.1,0"},
        run={"dir": tmp_path / "there"},
    )
    assert events(here.dir) == events(there.dir)
    assert here.evaluate(tmp_path / "set", split="val")["auc"] == pytest.approx(
        here.result["val_auc"], abs=1e-6
    )
    here.export(tmp_path / "model")  # not scored, because the set has no test rows
    with pytest.raises(ConfigError, match=r"^split: val needs a prepared set, .* remove split"):
        here.predict(rows(10), split="val")
    with pytest.raises(ConfigError, match=r"^max_bad_fraction: 0\.5 needs raw rows"):
        here.evaluate(tmp_path / "set", max_bad_fraction=0.5)
    with pytest.raises(ConfigError, match=r"^prepare: .* is already prepared; omit prepare"):
        sbpflow.fit(CONFIG, data=tmp_path / "set", prepare={"min_count": 1})


MISTAKES = {
    "no table": ({"data": [1, 2]}, r"^data: a value of type list is not a table; give a pandas"),
    "ranks": (
        {"ranks": 0},
        r"^ranks must be a whole number of 1 or more, got 0; for example, ranks=2$",
    ),
    "group": ({"epochs": 3}, r"^epochs: unknown key; did you mean train\.epochs"),
    "option": ({"prepare": {"min_counts": 2}}, r"^unrecognized arguments: --min-counts 2; usage"),
    "schema": ({"schema": {"labels": "x"}}, r"^schema: labels is 'x'; write a list of names$"),
    "no data": ({"data": None, "schema": None}, r"^data\.path is not given; use data\.path=DIR"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_exceptions(mistake, tmp_path):
    words, message = MISTAKES[mistake]
    given = {"data": rows(10), "schema": SCHEMA, "run": {"dir": tmp_path / "run"}, **words}
    with pytest.raises(ConfigError, match=message):
        sbpflow.fit(CONFIG, **given)
    assert not (tmp_path / "run").exists()


def test_ranks_of_a_launcher_are_refused(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in (lambda: fit(run.dir), lambda: run.predict(rows(1))):
        with pytest.raises(ConfigError, match=r"^this process is rank 1 of 2; do not use"):
            call()


class CellOutput:
    """A stream like the output streams of a notebook's kernel."""

    __module__ = "ipykernel.iostream"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_a_notebook_shows_a_bar_and_a_log_file_does_not(monkeypatch):
    for stream, bars in ((CellOutput(), True), (open(os.devnull, "w"), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        progress = Progress(3, visible=True)
        for step in (1, 2, 3):
            progress.advance(step)
        progress.close()
        if bars:
            assert "3/3" in stream.text
        else:
            assert progress._bar is None

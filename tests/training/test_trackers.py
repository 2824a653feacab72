"""Tests ``train.trackers`` by reading logged values with each tracker's own reader."""

import json
import struct
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from sbpflow.config.load import config_facts, load_config
from sbpflow.errors import ConfigError, PeerStoppedError
from sbpflow.models.registry import MODELS
from sbpflow.training import trackers
from sbpflow.training.report import Report
from tests.training.test_resume import CONFIG, interrupted, run, words

needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")


def events(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("[tensorbord]", ["train.trackers", "tensorbord", "tensorboard, mlflow, wandb"]),
        (
            "mlflow",
            ["in which each entry is one of tensorboard, mlflow, wandb", "trackers: [mlflow]"],
        ),
        ("[mlflow, mlflow]", ["train.trackers", "twice", "['mlflow']"]),
    ],
)
def test_unknown_and_repeated_names_are_rejected(given, parts):
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG, [f"train.trackers={given}"], models=MODELS)
    for part in parts:
        assert part in str(caught.value)


def test_a_missing_package_is_rejected_before_the_run_starts(synth_set, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: name == "tensorboard" or None)
    with pytest.raises(ConfigError, match=r"train\.trackers: .*\[mlflow, wandb\].*pip install mlf"):
        run(synth_set, tmp_path / "run", "train.trackers=[tensorboard, mlflow, wandb]")
    assert not (tmp_path / "run").exists()


class Closing:
    """A tracker that stores its status and fails to close."""

    def __init__(self, closed):
        self.closed = closed

    def close(self, status):
        self.closed.append(status)
        raise OSError("no space left")


def test_a_tracker_that_cannot_start_ends_the_trackers_before_it(monkeypatch, caplog):
    def start(name, *_):
        if name == "wandb":
            raise ConfigError("wandb cannot start")
        return Closing(closed)

    closed = []
    monkeypatch.setattr(trackers, "_open", start)
    chosen = "train.trackers=[tensorboard, mlflow, wandb]"
    config = load_config(CONFIG, [chosen], models=MODELS)
    with pytest.raises(ConfigError, match="wandb cannot start"):
        trackers.open_trackers(config, "run", None)
    assert closed == ["FAILED", "FAILED"]
    assert caplog.text.count("OSError: no space left") == 2


def test_a_report_that_cannot_start_ends_its_trackers(tmp_path):
    closed = []
    (tmp_path / "start.txt").mkdir()
    config = load_config(CONFIG, [f"run.dir={tmp_path}"], models=MODELS)
    start = partial(Report, config, rank=0, num_steps=1, devices=["cpu"], sections={})
    with pytest.raises(IsADirectoryError):
        start(resumed=(1, 0), trackers=lambda step: [Closing(closed), Closing(closed)])
    assert closed == ["FAILED", "FAILED"]


@pytest.mark.parametrize("resumed_step", [None, 1])
def test_a_run_of_mlflow_ends_if_it_cannot_be_filled(monkeypatch, resumed_step):
    class Down(Exception):
        pass

    def fail(*_, **__):
        raise Down("the server is down")

    info = SimpleNamespace(run_id="7")
    known = SimpleNamespace(info=info, data=SimpleNamespace(metrics={"step/loss": 0.5}))
    ended = []
    mlflow = SimpleNamespace(
        exceptions=SimpleNamespace(MlflowException=Down),
        search_runs=lambda **_: [known],
        start_run=lambda *_, **__: known,
        log_params=fail,
        MlflowClient=lambda: SimpleNamespace(get_metric_history=fail),
        end_run=ended.append,
    )
    monkeypatch.setattr(trackers, "import_module", lambda name: mlflow)
    config = load_config(CONFIG, ["train.trackers=[mlflow]"], models=MODELS)
    with pytest.raises(ConfigError, match=r"mlflow cannot start \(the server is down"):
        trackers.open_trackers(config, "run", resumed_step)
    assert ended == ["FAILED"]


def test_metrics_of_mlflow_have_only_characters_that_it_accepts(monkeypatch):
    def get_tracking_uri():
        return "sqlite:///"

    info = SimpleNamespace(run_id="7")
    logged = []
    mlflow = SimpleNamespace(
        exceptions=SimpleNamespace(MlflowException=ValueError),
        start_run=lambda *_, **__: SimpleNamespace(info=info),
        log_params=lambda *_, **__: None,
        log_metrics=lambda values, step, run_id: logged.append((values, step, run_id)),
        get_tracking_uri=get_tracking_uri,
    )
    monkeypatch.setattr(trackers, "import_module", lambda name: mlflow)
    config = load_config(CONFIG, ["train.trackers=[mlflow]"], models=MODELS)
    [tracker] = trackers.open_trackers(config, "run", None)
    tracker.log(3, {"valid/auc": 0.75, "valid/auc device=a+b": 0.5})
    assert logged == [({"valid/auc": 0.75, "valid/auc device_a_b": 0.5}, 3, "7")]


def test_without_trackers_no_package_is_imported(synth_set, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "import_module", None)
    assert run(synth_set, tmp_path, "train.max_steps=1") == 0
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "FINISHED"),
        (ValueError, "FAILED"),
        (KeyboardInterrupt, "KILLED"),
        (SystemExit, "KILLED"),
        (PeerStoppedError, "KILLED"),
    ],
)
def test_the_report_shows_how_a_run_ended(error, status):
    assert trackers.status_of(error) == status


def test_tensorboard_has_each_step_once_after_interruptions(synth_set, tmp_path, monkeypatch):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for at in (7, 18):
        interrupted(synth_set, tmp_path, monkeypatch, at, "train.trackers=[tensorboard]")
    assert run(synth_set, tmp_path, "train.trackers=[tensorboard]") == 0
    board = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = board.Scalars("step/loss")
    assert [scalar.step for scalar in shown] == list(range(1, 21))
    losses = [event["loss"] for event in events(tmp_path, "step")]
    assert [scalar.value for scalar in shown] == pytest.approx(losses)
    (final,) = events(tmp_path, "final")
    assert board.Scalars("final/auc")[0].value == pytest.approx(final["auc"])


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """Return the URI of a database that tests share, because MLflow takes seconds to create it."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def client(database, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return mlflow.MlflowClient(database)


def runs_named(client, name):
    (default,) = client.search_experiments()
    return client.search_runs([default.experiment_id], f"attributes.run_name = '{name}'")


@needs_mlflow
def test_mlflow_has_one_run_with_each_step_once_after_interruptions(
    client, synth_set, tmp_path, monkeypatch
):
    folder, more = tmp_path / "clicks", "train.trackers=[mlflow]"
    statuses = []
    for at in (7, 18):
        interrupted(synth_set, folder, monkeypatch, at, more)
        statuses += [each.info.status for each in runs_named(client, "clicks")]
    assert run(synth_set, folder, more, "train.log_every=2") == 0
    (logged,) = runs_named(client, "clicks")
    assert [*statuses, logged.info.status] == ["FAILED", "FAILED", "FINISHED"]
    saved = json.loads((folder / "checkpoints" / "run.json").read_text())["content"]["run"]
    assert logged.data.tags["sbpflow.run"] == saved

    history = client.get_metric_history(logged.info.run_id, "step/loss")
    first = {event["step"]: event["loss"] for event in events(folder, "step")}
    assert len(history) == len({metric.step for metric in history})
    losses = {metric.step: metric.value for metric in history}
    assert set(losses) > set(first)  # earlier starts logged more steps
    assert {step: losses[step] for step in first} == first
    scores = {e["step"]: e["auc"] for e in events(folder, "eval") if e["split"] == "val"}
    shown = client.get_metric_history(logged.info.run_id, "val/auc")
    assert {metric.step: metric.value for metric in shown} == scores
    assert len(shown) == len(scores)
    (final,) = events(folder, "final")
    for name in ("auc", "logloss", "val_auc", "samples_per_s"):
        assert logged.data.metrics[f"final/{name}"] == final[name]

    config = load_config(CONFIG, words(synth_set, folder, more), models=MODELS)
    assert logged.data.params["train.log_every"] == "1"  # the value logged before the restart
    assert logged.data.params == {
        key.replace("(", "_").replace(")", "_").replace("*", "_"): text
        for key, text in config_facts(config).items()
    }


@needs_mlflow
def test_runs_in_one_folder_are_separate_children_of_the_parent_run(client, synth_set, tmp_path):
    import mlflow

    folder = tmp_path / "twice"
    with mlflow.start_run() as parent:
        for steps in (1, 2):
            words = f"train.max_steps={steps}", "train.trackers=[mlflow]"
            assert run(synth_set, folder, *words, "train.log_every=1") == 0
            assert mlflow.active_run().info.run_id == parent.info.run_id
    runs = runs_named(client, "twice")
    assert {each.data.params["train.max_steps"] for each in runs} == {"1", "2"}
    assert {each.data.tags["mlflow.parentRunId"] for each in runs} == {parent.info.run_id}


@needs_mlflow
def test_a_failure_of_mlflow_during_training_is_only_logged(
    client, synth_set, tmp_path, monkeypatch, capsys
):
    import mlflow

    def fail(*args, **kwargs):
        raise mlflow.exceptions.MlflowException("the server is down")

    monkeypatch.setattr(mlflow, "log_metrics", fail)
    more = "train.max_steps=2", "train.trackers=[mlflow]"
    assert run(synth_set, tmp_path / "lost", *more) == 0
    assert "MLflow did not save the values of step 2: the server is down" in capsys.readouterr().err
    assert events(tmp_path / "lost", "final")


@needs_mlflow
def test_a_server_that_cannot_be_used_is_rejected(client, synth_set, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nosuch://server")
    with pytest.raises(ConfigError, match=r"train\.trackers: mlflow cannot start .*TRACKING_URI"):
        run(synth_set, tmp_path, "train.trackers=[mlflow]")


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
def test_wandb_in_offline_mode_has_the_values(synth_set, tmp_path, monkeypatch):
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    assert run(synth_set, tmp_path, "train.max_steps=3", "train.trackers=[wandb]") == 0
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    losses, names = {}, set()
    for data in leveldb_records(file.read_bytes()):
        record = Record.FromString(data)
        names.add(record.run.display_name)
        values = {
            item.key or item.nested_key[0]: json.loads(item.value_json)
            for item in record.history.item
        }
        if "step/loss" in values:
            losses[values["step"]] = values["step/loss"]
    assert losses == {event["step"]: event["loss"] for event in events(tmp_path, "step")}
    assert tmp_path.name in names


def leveldb_records(data):
    """Yield the records of a W&B file: a LevelDB log after a header of 7 bytes.

    Each part of a record has a header of 7 bytes and does not cross blocks of 32 KiB.
    """
    position, record = 7, b""
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""

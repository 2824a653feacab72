"""Tests that interrupted runs resume with identical results, and that other runs are refused or
moved aside.
"""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from sbpflow.checkpoint.folder import list_checkpoints
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.run_file import read_run
from sbpflow.commands import train
from sbpflow.data.__main__ import main as data_main
from sbpflow.data.format.metadata import check_metadata_folder
from sbpflow.errors import ConfigError
from sbpflow.runtime.files.remote_path import any_path
from sbpflow.runtime.files.run_folder import RunLock
from sbpflow.training.trainer import Trainer

CONFIG = str(Path(__file__).parents[2] / "configs/scheme3.yaml")


class Interrupted(Exception):
    """Simulates a kill: no code of the run executes afterwards."""


def words(synth_set, folder, *more):
    return [
        f"data.path={synth_set}",
        f"run.dir={folder}",
        "model.hidden=[16]",
        "model.dropout=0.4",
        "data.batch_size=500",  # 4,800 rows: ten steps an epoch, the last step with 300 rows
        "data.loader=memmap",
        "optimizer.sparse.name=lazy_adam",
        "optimizer.schedule.warmup_steps=15",
        "train.epochs=2",
        "train.eval_every=6",
        "train.log_every=1",
        "train.plateau={metric: logloss, patience: 1, factor: 0.5}",
        "checkpoint.every=4",
        # The run is not really killed, so a background save would continue.
        "checkpoint.background=false",
        *more,
    ]


def run(synth_set, folder, *more):
    return train.main(["--config", CONFIG, *words(synth_set, folder, *more)])


def interrupt(monkeypatch, step):
    """Raise after ``step`` steps, so that steps since the last checkpoint are lost."""
    real = Trainer.step

    def until(self, batches):
        if self.num_steps == step:
            raise Interrupted
        return real(self, batches)

    monkeypatch.setattr(Trainer, "step", until)


def events(folder):
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("event", "step", "loss", "auc", "logloss", "epoch", "split", "lr_sparse", "val_auc")
    return [{key: event[key] for key in kept if key in event} for event in logged]


@pytest.fixture(scope="module")
def whole(synth_set, tmp_path_factory):
    """Return the uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(synth_set, folder) == 0
    return folder


def test_interrupted_runs_resume_bit_for_bit(synth_set, whole, tmp_path, monkeypatch):
    expected = events(whole)
    assert [e["step"] for e in expected if e["event"] == "step"] == list(range(1, 21))
    for at in (2, 7, 11, 18):  # kills before the first checkpoint, and then in both epochs
        interrupted(synth_set, tmp_path, monkeypatch, at)
    assert [e["step"] for e in events(tmp_path)][-1] == 18
    assert run(synth_set, tmp_path) == 0
    assert events(tmp_path) == expected
    assert [path.name for path in tmp_path.iterdir() if "previous" in path.name] == ["previous-1"]
    one, two = (open_checkpoint(folder / "checkpoints" / "step-20") for folder in (whole, tmp_path))
    assert one.tensors.keys() == two.tensors.keys()
    for name in one.tensors:
        assert one.tensor(name).equal(two.tensor(name)), name
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-20", "step-16", "step-12"]
    assert read_run(tmp_path / "checkpoints").status == "finished"
    assert (tmp_path / "checkpoints" / "data" / "manifest.json").is_file()


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("checkpoint.background=true",), marks=pytest.mark.slow),
        ("parallel.storage={'deep.*': {kind: file, cache: '40%'}}",),
    ],
)
def test_a_run_with_deltas_resumes_bit_for_bit(synth_set, whole, tmp_path, monkeypatch, more):
    deltas = ("checkpoint.every=2", "checkpoint.deltas=3", "checkpoint.keep=2", *more)
    for at in (3, 7, 13):
        interrupted(synth_set, tmp_path, monkeypatch, at, *deltas)
    assert run(synth_set, tmp_path, *deltas) == 0
    assert events(tmp_path) == events(whole)
    # Chains of deltas continue after interruptions: 2 is full, 4 to 8 are deltas, 10 is full, and
    # so on.
    folder = tmp_path / "checkpoints"
    assert [path.name for path in list_checkpoints(folder)] == ["step-20", "step-18"]
    one, two = (open_checkpoint(path / "checkpoints" / "step-20") for path in (whole, tmp_path))
    assert two.chain_length == 2
    for name in one.tensors:
        assert one.tensor(name).equal(two.tensor(name)), name


def interrupted(synth_set, folder, monkeypatch, at=9, *more):
    with monkeypatch.context() as patch:
        interrupt(patch, at)
        with pytest.raises(Interrupted):
            run(synth_set, folder, *more)


@pytest.mark.few(1)
@pytest.mark.parametrize("lookaheads", [(16, 0), (0, 4)])
def test_resuming_with_another_lookahead_is_bit_equal(
    synth_set, whole, tmp_path, monkeypatch, lookaheads
):
    """The lookahead window spans evaluations and the end of the epoch (step 10)."""
    before, after = (f"train.lookahead={number}" for number in lookaheads)
    interrupted(synth_set, tmp_path, monkeypatch, 9, before)
    assert run(synth_set, tmp_path, after) == 0
    assert events(tmp_path) == events(whole)
    one, two = (open_checkpoint(folder / "checkpoints" / "step-20") for folder in (whole, tmp_path))
    for name in one.tensors:
        assert one.tensor(name).equal(two.tensor(name)), name


def test_damaged_checkpoints_fall_back_to_the_previous_one(
    synth_set, whole, tmp_path, monkeypatch, capfd
):
    interrupted(synth_set, tmp_path, monkeypatch)
    file = tmp_path / "checkpoints" / "step-8" / "rank-0.bin"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 16
    file.write_bytes(raw)
    assert run(synth_set, tmp_path) == 0
    messages = capfd.readouterr().err
    assert "step-8/rank-0.bin: damaged at bytes" in messages
    assert "resuming after step 4" in messages
    assert events(tmp_path) == events(whole)


def test_resuming_without_a_good_checkpoint_is_refused(synth_set, tmp_path, monkeypatch):
    interrupted(synth_set, tmp_path, monkeypatch, 6)
    (tmp_path / "checkpoints" / "step-4" / "index.json").unlink()
    with pytest.raises(ConfigError, match=r"resume=never"):
        run(synth_set, tmp_path)


def test_damaged_run_files_explain_how_to_recover(synth_set, tmp_path, monkeypatch):
    interrupted(synth_set, tmp_path, monkeypatch, 6)
    file = tmp_path / "checkpoints" / "run.json"
    file.write_text(file.read_text().replace('"training"', '"trainind"'))
    with pytest.raises(ConfigError, match=r"run\.json cannot be used .*resume=never.* or "):
        run(synth_set, tmp_path, "train.max_steps=6")
    assert not (tmp_path / "previous-1").exists()
    ways = [(tmp_path, "never"), (tmp_path / "b", str(tmp_path / "previous-1" / "checkpoints"))]
    # the second run resumes from the checkpoints that the first run moved aside
    for folder, resume in ways:
        assert run(synth_set, folder, f"checkpoint.resume={resume}", "train.max_steps=6") == 0


def test_checkpoints_without_their_run_file_are_not_moved_aside(synth_set, tmp_path, monkeypatch):
    interrupted(synth_set, tmp_path, monkeypatch, 6)
    folder = tmp_path / "checkpoints"
    (folder / "run.json").unlink()
    step = folder / "step-4"
    with pytest.raises(ConfigError) as caught:
        run(synth_set, tmp_path, "train.max_steps=6")
    message = str(caught.value)
    del caught  # frees the run's lock, which the traceback keeps alive
    assert "run.json" in message
    assert f"checkpoint.resume={step}" in message
    assert "checkpoint.resume=never" in message
    assert step.is_dir()
    assert not (tmp_path / "previous-1").exists()
    assert run(synth_set, tmp_path, "train.max_steps=6", "checkpoint.resume=never") == 0


def test_changed_results_keys_are_refused_on_resume(synth_set, tmp_path, monkeypatch):
    interrupted(synth_set, tmp_path, monkeypatch, 6)
    with pytest.raises(ConfigError) as caught:
        run(synth_set, tmp_path, "run.seed=8", "optimizer.sparse.lr=0.5", "train.log_every=3")
    messages = str(caught.value)
    del caught  # frees the run's lock, which the traceback keeps alive
    assert "run.seed was 7 and is now 8" in messages
    assert "optimizer.sparse.lr was 0.001 and is now 0.5" in messages
    assert "log_every" not in messages
    assert "checkpoint.resume=never" in messages
    # Settings that do not affect losses may change; the plan file keeps its kernels.
    kernels = kernels_of(tmp_path)
    assert kernels != {"torch"} or not find_spec("numba")
    with monkeypatch.context() as patch:
        interrupt(patch, 5)
        with pytest.raises(Interrupted):
            run(synth_set, tmp_path)
    assert kernels_of(tmp_path) == kernels, "those there were, unless others are asked for"
    assert run(synth_set, tmp_path, "train.max_steps=6", "parallel.kernel=torch") == 0
    assert kernels_of(tmp_path) == {"torch"}
    assert [e["step"] for e in events(tmp_path) if e["event"] == "step"] == [1, 2, 3, 4, 5, 6]


def kernels_of(folder):
    """Return the kernels in the plan that the run used."""
    plan = json.loads((folder / "plan.json").read_text())["plan"]
    return {choice["name"] for _, choice in plan["kernels"]["map"]}


def test_the_best_checkpoint_survives_an_interruption(synth_set, tmp_path, monkeypatch):
    more = ["checkpoint.keep_best=true", "checkpoint.keep=1", "train.eval_every=3"]
    more += ["optimizer.sparse.lr=0.05", "checkpoint.every=4"]
    with monkeypatch.context() as patch:
        interrupt(patch, 15)
        with pytest.raises(Interrupted):
            run(synth_set, tmp_path, *more)
    assert run(synth_set, tmp_path, *more) == 0
    val = [e for e in events(tmp_path) if e["event"] == "eval" and e["split"] == "val"]
    scores = {e["step"]: e["auc"] for e in val}
    best = max(scores, key=lambda step: scores[step])
    assert best < 18, "or keeping the newest would do"
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-20", f"step-{best}"]


def test_never_and_finished_runs_move_checkpoints_aside(synth_set, tmp_path, monkeypatch):
    interrupted(synth_set, tmp_path, monkeypatch, 6)
    # a killed save would leave this folder
    (tmp_path / "checkpoints" / ".step-6.partial-0123456789").mkdir()
    assert run(synth_set, tmp_path, "checkpoint.resume=never", "train.max_steps=5") == 0
    assert (tmp_path / "previous-1" / "checkpoints" / "step-4" / "index.json").is_file()
    assert not list(tmp_path.rglob(".step-*"))
    assert run(synth_set, tmp_path, "train.max_steps=5") == 0
    assert (tmp_path / "previous-2" / "checkpoints" / "step-5" / "index.json").is_file()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [
        "step-5",
        "step-4",
    ]


def test_explicit_paths_resume_from_any_run(synth_set, whole, tmp_path, capfd):
    shutil.copytree(whole / "checkpoints", tmp_path / "from")
    for path in list_checkpoints(tmp_path / "from")[:2]:
        shutil.rmtree(path)
    elsewhere = f"checkpoint.dir={tmp_path / 'own'}"
    resume = f"checkpoint.resume={tmp_path / 'from'}"
    assert run(synth_set, tmp_path / "b", resume, elsewhere) == 0
    found = [e for e in events(tmp_path / "b") if e["event"] == "step"]
    assert found == [e for e in events(whole) if e["event"] == "step" and e["step"] > 12]
    assert "nothing is left to train" not in capfd.readouterr().err
    assert run(synth_set, tmp_path / "d", f"checkpoint.resume={tmp_path / 'own'}") == 0
    assert "weights are those of step 20, and the run ends at step 20" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"is in checkpoint\.dir"):
        run(synth_set, tmp_path / "b", elsewhere, f"checkpoint.resume={tmp_path / 'own/step-20'}")
    (tmp_path / "from").rename(tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match=r"step-12 is in run\.dir, .* run\.dir=\S+-2"):
        run(synth_set, tmp_path, elsewhere, f"checkpoint.resume={tmp_path / 'checkpoints'}")
    (tmp_path / "checkpoints").rename(tmp_path / "from")
    with pytest.raises(ConfigError, match=r"tables/deep\.C1 was saved with shape .*, but has"):
        run(synth_set, tmp_path / "c", resume, "model.embedding_dim=8")
    with pytest.raises(ConfigError, match=r"lacks tables/deep.C1/sum,.* it has tables/deep.C1/exp"):
        run(synth_set, tmp_path / "c", resume, "optimizer.sparse.name=rowwise_adagrad")
    with pytest.raises(ConfigError, match="does not exist; give the folder of a checkpoint"):
        run(synth_set, tmp_path / "c", f"checkpoint.resume={tmp_path / 'nowhere'}")


@pytest.mark.parametrize("at_url", [False, True])
def test_a_folder_data_of_the_user_is_not_moved_or_replaced(synth_set, tmp_path, at_url):
    folder = any_path("memory://users/clicks" if at_url else tmp_path / "own")
    rows = folder / "data" / "train-000000.npy"
    rows.parent.mkdir(parents=True)
    rows.write_bytes(b"rows")
    for more in ("checkpoint.resume=auto", "checkpoint.resume=never"):
        with pytest.raises(ConfigError, match=r"^checkpoint\.dir: .*/data contains train-000000"):
            run(synth_set, tmp_path / "b", f"checkpoint.dir={folder}", more)
    assert rows.read_bytes() == b"rows"
    assert not (rows.parent / "manifest.json").exists()
    rows.unlink()
    (rows.parent / ".DS_Store").write_bytes(b"of a file manager")
    check_metadata_folder("checkpoint.dir", rows.parent)


def test_another_runs_checkpoints_are_locked_before_they_are_changed(synth_set, tmp_path):
    folder = tmp_path / "shared"
    partial = folder / ".step-6.partial-0123456789"
    partial.mkdir(parents=True)
    lock = RunLock(folder, rank=0, key="checkpoint.dir")
    for more in ("checkpoint.every=4", "checkpoint.every=0", "checkpoint.resume=never"):
        with pytest.raises(ConfigError, match=r"^checkpoint\.dir: .* is in use by another run"):
            run(synth_set, tmp_path / "b", f"checkpoint.dir={folder}", more)
    assert partial.is_dir()
    lock.close()


def test_checkpoint_dir_may_be_the_default_folder(synth_set, tmp_path, monkeypatch):
    """The folder is moved with the other files of an earlier run, but the new one is locked."""
    folder, real, steps = tmp_path / "checkpoints", Trainer.step, []

    def step(self, batches):
        steps.append(self.num_steps)
        with pytest.raises(ConfigError, match="is in use by another run"):
            RunLock(folder, rank=0)
        return real(self, batches)

    monkeypatch.setattr(Trainer, "step", step)
    for number in range(2):
        words = (f"checkpoint.dir={folder}", "train.max_steps=5")
        assert run(synth_set, tmp_path, *words) == 0
        assert len(list(tmp_path.glob("previous-*"))) == number
    assert steps == [0, 1, 2, 3, 4] * 2
    assert (tmp_path / "previous-1" / "checkpoints" / "step-5").is_dir()
    assert list_checkpoints(folder)[0].name == "step-5"
    for place in (tmp_path, folder / "own"):
        with pytest.raises(ConfigError, match=r"^checkpoint\.dir: .* must not be run\.dir itself"):
            run(synth_set, tmp_path, f"checkpoint.dir={place}")


def test_a_run_from_another_checkpoint_resumes_if_its_command_is_repeated(
    synth_set, whole, tmp_path, monkeypatch
):
    given = tmp_path / "from" / "checkpoints" / "step-12"
    shutil.copytree(whole / "checkpoints" / "step-12", given)
    resume = f"checkpoint.resume={tmp_path / 'from'}"
    assert run(synth_set, tmp_path / "a", resume) == 0
    folder, often = tmp_path / "b", "checkpoint.every=2"
    for at, words in ((15, resume), (17, "checkpoint.resume=auto"), (19, resume)):
        interrupted(synth_set, folder, monkeypatch, at, often, words)
    assert run(synth_set, folder, often, resume) == 0
    assert events(folder) == events(tmp_path / "a")
    assert not list(folder.glob("previous-*"))
    # Otherwise, the run starts again from the given checkpoint: after its end, with other settings,
    # and from another checkpoint.
    interrupted(synth_set, folder, monkeypatch, 17, resume)
    interrupted(synth_set, folder, monkeypatch, 17, resume, "optimizer.dense.lr=0.5")
    other = f"checkpoint.resume={whole / 'checkpoints' / 'step-16'}"
    assert run(synth_set, folder, other, "optimizer.dense.lr=0.5", "train.max_steps=18") == 0
    assert [e["step"] for e in events(folder) if e["event"] == "step"] == [17, 18]
    assert len(list(folder.glob("previous-*/checkpoints/step-16"))) == 3


def test_never_starts_from_scratch_even_if_the_command_is_repeated(
    synth_set, tmp_path, monkeypatch
):
    for _ in range(2):
        interrupted(synth_set, tmp_path, monkeypatch, 6, "checkpoint.resume=never")
    assert (tmp_path / "previous-1" / "checkpoints" / "step-4").is_dir()


def test_an_interrupted_replacement_is_restored_before_the_run_starts(
    synth_set, tmp_path, monkeypatch, capfd
):
    interrupted(synth_set, tmp_path, monkeypatch, 6)
    folder = tmp_path / "checkpoints"
    for target, resume in (
        (tmp_path, "auto"), (tmp_path / "b", tmp_path), (tmp_path / "c", folder / "step-4"),
    ):  # fmt: skip
        for path in list_checkpoints(folder)[:-1]:
            shutil.rmtree(path)
        (folder / "step-4").rename(folder / ".replaced-step-4")
        words = (f"checkpoint.resume={resume}", "train.max_steps=6")
        assert run(synth_set, target, *words) == 0
        assert f"resuming after step 4 from {folder}" in capfd.readouterr().err
    assert not (tmp_path / "previous-1").exists()


def test_a_trace_before_the_resumed_step_causes_a_warning(synth_set, tmp_path, monkeypatch, capfd):
    words = ("train.profile=[1,4]", "train.max_steps=6")
    interrupted(synth_set, tmp_path, monkeypatch, 5, *words)
    message = "train.profile has no effect: it ends at step 4, but the run resumes after step 4"
    assert message not in capfd.readouterr().err
    assert run(synth_set, tmp_path, *words) == 0
    assert message in capfd.readouterr().err


def last_step(folder):
    (final,) = [
        event
        for event in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if event["event"] == "final"
    ]
    newest = list_checkpoints(folder / "checkpoints")[0].name
    assert newest == f"step-{final['steps']}"
    return final["steps"]


def test_a_new_run_from_a_stopped_one_has_its_own_patience(synth_set, tmp_path):
    patience = ["train.eval_every=1", "train.stop={metric: auc, patience: 1, min_delta: 0.9}"]
    assert run(synth_set, tmp_path / "a", *patience) == 0
    assert last_step(tmp_path / "a") == 2  # the first score, and one that is not much better
    resume = f"checkpoint.resume={tmp_path / 'a/checkpoints'}"
    assert run(synth_set, tmp_path / "b", *patience, resume) == 0
    assert last_step(tmp_path / "b") == 4


def test_a_new_run_may_have_other_batches_and_another_order(synth_set, whole, tmp_path):
    resume = f"checkpoint.resume={whole / 'checkpoints/step-12'}"
    assert run(synth_set, tmp_path / "b", resume, "data.batch_size=250") == 0
    assert last_step(tmp_path / "b") == 12 + 16  # the 3,800 rows that are left of epoch 2
    assert run(synth_set, tmp_path / "c", resume, "run.seed=8") == 0
    assert last_step(tmp_path / "c") == 12 + 20  # the other order starts at its first row


def test_a_set_with_other_constants_of_dense_columns_is_refused(tmp_path):
    """Hashed ids and keys mean the same in all sets, but constants are fitted to the rows."""
    schema = tmp_path / "schema.yaml"
    columns = "dense: {price: standardise}\nsparse: {shop: integer}\n"
    schema.write_text(f"header: true\nseparator: ','\nlabel: click\n{columns}")

    def prepared(name, power, *options):
        rows = "\n".join(f"{row % 2},{row**power},{row % 7}" for row in range(100))
        (tmp_path / f"{name}.csv").write_text(f"click,price,shop\n{rows}\n")
        given = ["--input", tmp_path / f"{name}.csv", "--output", tmp_path / name, *options]
        assert data_main(["prepare", *map(str, given), "--workers", "1"]) == 0
        return tmp_path / name

    def start(path, name, *more):
        model = "model.wide={columns: [shop], crosses: []}"
        return run(path, tmp_path / name, model, "data.batch_size=20", "train.max_steps=1", *more)

    own = ("--schema", schema, "--hash-size", "20")
    monday = prepared("monday", 1, *own)
    assert start(monday, "a") == 0
    resume = f"checkpoint.resume={tmp_path / 'a'}"
    with pytest.raises(ConfigError, match=rf"other transforms .* prepare --like {monday}`"):
        start(prepared("tuesday", 2, *own), "b", resume)
    assert start(prepared("like", 2, "--like", monday), "b", resume) == 0


def test_a_batch_size_that_leaves_one_row_for_batch_norm_is_refused(synth_set, tmp_path):
    norm = "model.norm=batch"
    assert run(synth_set, tmp_path / "old", norm, "train.max_steps=1") == 0
    more = ["data.batch_size=1433", f"checkpoint.resume={tmp_path / 'old'}"]
    with pytest.raises(ConfigError, match=r"1433 leaves a last batch of one row \(4,300 rows"):
        run(synth_set, tmp_path / "new", norm, *more)


def test_a_run_without_checkpoints_does_not_move_an_unfinished_run(
    synth_set, tmp_path, monkeypatch
):
    interrupted(synth_set, tmp_path, monkeypatch, 6)
    with pytest.raises(ConfigError, match=r"checkpoints of an unfinished run, .*resume=never"):
        run(synth_set, tmp_path, "checkpoint.every=0")
    words = ("checkpoint.every=0", "checkpoint.resume=never", "train.max_steps=2")
    assert run(synth_set, tmp_path, *words) == 0
    assert (tmp_path / "previous-1/checkpoints/step-4/index.json").is_file()


@pytest.mark.parametrize("at", [3, None])
def test_a_run_that_saves_nothing_may_name_a_url_with_checkpoints(
    synth_set, tmp_path, monkeypatch, at
):
    """Its own files cannot replace the checkpoints there, of a finished or an unfinished run."""
    pytest.importorskip("fsspec")
    folder = any_path(f"memory://unsaved/{at}")
    more = (f"checkpoint.dir={folder}", "checkpoint.every=2", "train.max_steps=4")
    if at is None:
        assert run(synth_set, tmp_path / "a", *more) == 0
    else:
        interrupted(synth_set, tmp_path / "a", monkeypatch, at, *more)
    before = folder.sizes()
    assert run(synth_set, tmp_path / "b", *more, "checkpoint.every=0") == 0
    assert folder.sizes() == before
    with pytest.raises(ConfigError, match="sbpflow cannot rename them at a URL"):
        run(synth_set, tmp_path / "b", *more, "checkpoint.resume=never")


def test_signals_do_not_save_if_configured(synth_set, tmp_path):
    assert run(synth_set, tmp_path, "checkpoint.every=0", "train.max_steps=2") == 0
    assert not (tmp_path / "checkpoints").exists()

"""Tests that bundles with deltas contain the same values as the run's checkpoints."""

import errno
import io
import os
import re
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.commands import follow, train
from sbpflow.commands.export import export, export_model, export_to
from sbpflow.commands.follow import LOCK_FILE, exports_in
from sbpflow.data.prepare.workspace import only_run
from sbpflow.errors import CheckpointError, ConfigError, DataError, StoreError
from sbpflow.models.registry import MODELS
from sbpflow.run.export import chain
from sbpflow.run.export.chain import export_next
from sbpflow.run.saved.saved_model import saved_config
from sbpflow.runtime.files.file_lock import hold, sign
from sbpflow.runtime.files.remote_path import RemotePath
from sbpflow.serving.deltas import bundles_in, delta_folder, digest_of, newest_bundle, read_delta
from sbpflow.serving.scorer import Tensors, load
from tests import deadlines
from tests.quick import quick
from tests.training.test_resume import CONFIG, words

ROOT = Path(__file__).parents[2]
OPTIONS = ("checkpoint.every=2", "checkpoint.deltas=4", "checkpoint.keep=50")


@pytest.fixture(scope="module")
def run(synth_set, tmp_path_factory) -> Path:
    """Return a run with full checkpoints of steps 2 and 12, and deltas of 4 to 10 and 14 to 20."""
    folder = tmp_path_factory.mktemp("followed")
    assert train.main(["--config", CONFIG, *words(synth_set, folder, *OPTIONS)]) == 0
    return folder / "checkpoints"


def writer(rows: str):
    def write_base(checkpoint, target):
        config = saved_config(checkpoint, [], models=MODELS, own_model=None)
        export_model(checkpoint, config, target, rows=rows, measured=False)

    return write_base


def values_of(bundle: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a bundle with all its deltas applied."""
    stored = Tensors(bundle / "model.safetensors")
    values = {name: stored.tensor(name).clone() for name in stored.entries}
    base = previous = digest_of(bundle)
    number = 0
    while delta_folder(bundle, number + 1).exists():
        number += 1
        delta = read_delta(bundle, number, base=base, previous=previous)
        previous = delta.digest
        for table, (rows, parts) in delta.tables.items():
            for suffix, part in parts.items():
                values[f"tables/{table}{suffix}"][rows] = part
        for name, value in delta.dense.items():
            values[f"dense/{name}"] = value
    return values


def test_a_delta_whose_row_does_not_fit_the_format_names_the_row(run, tmp_path, monkeypatch):
    wrong = []

    def with_a_large_value(members, name, changed):
        wrong.append((name.removeprefix("tables/"), int(changed[-1])))
        values = torch.zeros(len(changed), *members[-1].saved(name).shape[1:])
        values[-1, 0] = 1e6
        return values

    assert export_next(open_checkpoint(run / "step-2"), tmp_path, 9, writer("float16"))
    monkeypatch.setattr(chain, "_changed_values", with_a_large_value)
    with pytest.raises(DataError) as caught:
        export_next(open_checkpoint(run / "step-4"), tmp_path, 9, writer("float16"))
    table, row = wrong[-1]
    assert f"table {table}: 1000000.0 in row {row} cannot be represented" in str(caught.value)


@pytest.mark.parametrize("rows", quick(["as_trained", "int8"], lambda n: n == 1))
def test_a_bundle_with_deltas_equals_a_bundle_of_the_same_step(run, tmp_path, rows):
    def follow(step: int, num_deltas: int = 24) -> str | None:
        checkpoint = open_checkpoint(run / f"step-{step}")
        written = export_next(checkpoint, tmp_path / "out", num_deltas, writer(rows))
        return written and str(written.relative_to(tmp_path / "out"))

    (tmp_path / "out").mkdir()
    assert follow(2) == "step-2"
    assert follow(2) is None
    assert follow(4) == "step-2/deltas/000001"
    assert follow(10) == "step-2/deltas/000002", "it has the changes of three checkpoints"
    writer(rows)(open_checkpoint(run / "step-10"), tmp_path / "fresh")
    found, wanted = values_of(tmp_path / "out" / "step-2"), values_of(tmp_path / "fresh")
    before = values_of_base(tmp_path / "out" / "step-2")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    changed = [name for name in wanted if not torch.equal(before[name], wanted[name])]
    assert {name.split("/")[0] for name in changed} == {"tables", "dense"}
    # A full checkpoint, or too many deltas, starts a new chain.
    assert follow(12) == "step-12"
    assert [path.name for path in bundles_in(tmp_path / "out")] == ["step-12"]
    assert follow(14) == "step-12/deltas/000001"
    assert follow(16, num_deltas=1) == "step-16"
    assert newest_bundle(tmp_path / "out").name == "step-16"
    load(tmp_path / "out" / "step-16")
    # So does a checkpoint that does not continue the exported one: of an earlier step or another
    # run.
    assert follow(4) == "step-4"
    assert [path.name for path in bundles_in(tmp_path / "out")] == ["step-4"]


def test_a_bundle_is_served_until_its_replacement_is_complete(run, tmp_path):
    """A restarted run may export a step for which the folder has a bundle."""
    checkpoint, out = open_checkpoint(run / "step-12"), tmp_path / "out"
    for name in ("step-12/deltas", ".new", ".old", "step-12.old"):  # of an interrupted export
        (out / name).mkdir(parents=True)
    (out / "step-12" / "model.json").write_text('{"checkpoint": "earlier"}')

    def write_base(checkpoint, target, fails=False):
        assert (newest_bundle(out) / "model.json").read_text() == '{"checkpoint": "earlier"}'
        target.mkdir()
        (target / "model.json").write_text('{"checkpoint": "later"}')
        if fails:
            raise CheckpointError("removed")

    with pytest.raises(CheckpointError):
        export_next(checkpoint, out, 0, partial(write_base, fails=True))
    assert (newest_bundle(out) / "model.json").read_text() == '{"checkpoint": "earlier"}'
    assert export_next(checkpoint, out, 0, write_base) == out / "step-12"
    assert (out / "step-12" / "model.json").read_text() == '{"checkpoint": "later"}'
    assert [path.name for path in out.rglob("*")] == ["step-12", "model.json"]


def test_an_export_killed_while_it_replaces_a_bundle_leaves_one(run, tmp_path, monkeypatch):
    renames = iter([Path.rename])  # killed before the second
    checkpoint = open_checkpoint(run / "step-12")

    def write_base(checkpoint, target, text='{"checkpoint": "later"}'):
        target.mkdir(parents=True)
        (target / "model.json").write_text(text)

    def rename(path, target):
        next(renames)(path, target)

    write_base(checkpoint, tmp_path / "step-12", '{"checkpoint": "earlier"}')
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(StopIteration):
            export_next(checkpoint, tmp_path, 0, write_base)
    assert (newest_bundle(tmp_path) / "model.json").read_text() == '{"checkpoint": "earlier"}'
    assert export_next(checkpoint, tmp_path, 0, write_base) == tmp_path / "step-12"
    assert (newest_bundle(tmp_path) / "model.json").read_text() == '{"checkpoint": "later"}'
    assert [path.name for path in tmp_path.iterdir()] == ["step-12"]


@pytest.mark.parametrize("next_step", [12, 14])
def test_an_export_killed_before_it_removed_the_old_bundle_is_completed(run, tmp_path, next_step):
    new, old = tmp_path / "step-12", tmp_path / "step-12.old"
    assert export_next(open_checkpoint(run / "step-12"), tmp_path, 5, writer("as_trained")) == new
    shutil.copytree(new, old)
    assert bundles_in(tmp_path) == [old, new]
    written = export_next(open_checkpoint(run / f"step-{next_step}"), tmp_path, 5, writer("int8"))
    assert written == (None if next_step == 12 else delta_folder(new, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-12"]


def test_old_bundles_that_cannot_be_removed_do_not_end_the_export(
    run, tmp_path, monkeypatch, caplog
):
    """On NFS, the folder of open files cannot be removed before they are closed."""

    def remove(path, ignore_errors=False):
        if path.exists() and not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    def write_base(checkpoint, target):
        target.mkdir()
        (target / "model.json").write_text("{}")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove)
        for _ in range(3):
            target = export_next(open_checkpoint(run / "step-12"), tmp_path, 0, write_base)
            assert bundles_in(tmp_path) == [target]
    assert caplog.text.count("Directory not empty") == 2
    export_next(open_checkpoint(run / "step-12"), tmp_path, 0, write_base)
    assert [path.name for path in tmp_path.iterdir()] == ["step-12"]


def test_a_bundle_of_a_higher_step_is_removed_at_once(run, tmp_path, monkeypatch):
    def write_base(checkpoint, target):
        target.mkdir(parents=True)
        (target / "model.json").write_text("{}")

    def killed(path, ignore_errors=False):
        if path.exists():
            (path / "model.json").unlink()
            raise KeyboardInterrupt

    write_base(None, tmp_path / "step-20")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            export_next(open_checkpoint(run / "step-12"), tmp_path, 0, write_base)
    assert newest_bundle(tmp_path).name == "step-12"


def values_of_base(bundle: Path) -> dict[str, torch.Tensor]:
    stored = Tensors(bundle / "model.safetensors")
    return {name: stored.tensor(name) for name in stored.entries}


def test_follow_ends_after_the_last_checkpoint_of_a_finished_run(run, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    words = ["--follow", str(run.parent), "--output", str(out), "--deltas", "5"]
    assert export(words) == 0
    assert "step-20 has the weights of step 20" in capsys.readouterr().out
    assert bundles_in(out) == [out / "step-20"]
    assert export(words) == 0
    assert capsys.readouterr().out == ""
    for wrong, text in (
        (["--checkpoint", str(run), *words], "use either --checkpoint DIR or --follow RUN"),
        ([*words, "--deltas", "-1"], "--deltas must be 0 or more, got 10.0 and -1"),
        ([*words, "--best"], "--best has no effect with --follow, .* remove --best"),
        ([*words, "--last"], "--last has no effect with --follow"),
        ([*words, "--score", "set"], "--score has no effect with --follow"),
        ([*words, "--split", "test"], "--split has no effect with --follow"),
    ):
        with pytest.raises(ConfigError, match=text):
            export(wrong)
    for option in ("--every-seconds", "--deltas"):
        given = ["--checkpoint", str(run), "--output", str(tmp_path / "model"), option, "10"]
        with pytest.raises(ConfigError, match=f"{option} has no effect with --checkpoint"):
            export(given)


def test_follow_fails_if_the_last_checkpoint_of_a_finished_run_is_not_usable(run, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    shutil.copy(run / "run.json", folder)
    words = ["--follow", str(tmp_path), "--output", str(tmp_path / "out")]
    with pytest.raises(CheckpointError, match="/checkpoints contains no usable checkpoint"):
        export(words)
    shutil.copytree(run / "step-12", folder / "step-12")
    with pytest.raises(CheckpointError, match=r"step-12: the folder \S+/data, .* does not exist"):
        export(words)


def test_two_exports_to_one_folder_do_not_run_at_once(run, tmp_path, monkeypatch, capsys):
    """The second one would remove the bundle of the first one, even while it is written."""
    out, opened = tmp_path / "out", ExitStack()
    words = ["--follow", str(run), "--output", str(out), "--deltas", "5"]
    out.mkdir()
    sign(opened.enter_context(hold(out / LOCK_FILE)))
    with pytest.raises(ConfigError, match=r"another export \(process .*\) is writing .*/out; wait"):
        export(words)
    assert [path.name for path in out.iterdir()] == [LOCK_FILE]
    # The exporter of a run waits, for example for the exporter of a killed start.
    monkeypatch.setattr(follow, "time", Mock(wraps=time, sleep=lambda _: opened.close()))
    monkeypatch.setattr("sbpflow.commands.follow._is_over", partial(next, iter([False, True])))
    assert export([*words, "--parent", str(os.getppid())]) == 0
    assert "waiting: --output: another export" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [LOCK_FILE, "step-20"]


def test_two_exports_of_the_same_bundle_do_not_run_at_once(run, tmp_path):
    """The second one would remove the unfinished files of the first one."""
    words = ["--checkpoint", str(run), "--output", str(tmp_path / "model")]
    with only_run(tmp_path / "model"):
        before = list(tmp_path.iterdir())
        with pytest.raises(ConfigError, match=r"another run \(process .*\) is writing .*/model;"):
            export(words)
        assert list(tmp_path.iterdir()) == before


def test_follow_tries_again_after_a_full_disk(run, tmp_path, monkeypatch, caplog):
    full, uploads = OSError(errno.ENOSPC, "No space left on device"), []
    exports, states = iter([full, None]), iter([False] * 3 + [True])
    real = chain.export_next

    def export_next(*args):
        if (error := next(exports, None)) is not None:
            raise error
        return real(*args)

    @contextmanager
    def to_store(output):
        yield tmp_path / "out", publish

    def publish():
        uploads.append(newest_bundle(tmp_path / "out"))
        if len(uploads) == 1:
            raise StoreError("the store cannot be reached")

    monkeypatch.setattr(chain, "export_next", export_next)
    monkeypatch.setattr(follow, "exports_in", to_store)
    monkeypatch.setattr(follow, "_is_over", lambda run: next(states))
    monkeypatch.setattr(follow, "time", Mock(wraps=time, sleep=lambda seconds: None))
    words = ["--follow", str(run), "--output", str(tmp_path / "out"), "--every-seconds", "0"]
    assert export(words) == 0
    assert uploads == [tmp_path / "out" / "step-20"] * 2
    assert [text in caplog.text for text in ("No space left", "cannot be reached")] == [True] * 2
    exports = iter([full])
    shutil.rmtree(tmp_path / "out")
    states = iter([True])
    with pytest.raises(OSError, match="No space left on device"):
        export(words)


def test_follow_ends_if_nobody_reads_its_output(run, tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(follow, "_is_over", lambda run: False)
    sleep = Mock(side_effect=AssertionError("the export does not end"))
    monkeypatch.setattr(follow, "time", Mock(wraps=time, sleep=sleep))
    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        export(["--follow", str(run), "--output", str(tmp_path / "out")])


def test_follow_prints_that_it_waits_for_a_folder(tmp_path, monkeypatch, capsys):
    sleep = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(follow, "time", Mock(wraps=time, sleep=sleep))
    missing = tmp_path / "typo"
    with pytest.raises(InterruptedError):
        export(["--follow", str(missing), "--output", str(tmp_path / "out")])
    assert capsys.readouterr().out == f"waiting for {missing}, which does not exist yet\n"


def test_only_files_of_a_rewritten_bundle_are_uploaded_again(monkeypatch):
    uploaded = []
    real = RemotePath.upload

    def upload(self, file):
        uploaded.append(self.name)
        real(self, file)

    monkeypatch.setattr(RemotePath, "upload", upload)
    url = RemotePath("memory://rewritten-bundles")
    kept = ("mine/step-1/model.json", "step-1-notes", "notes", "step-9/rank-0.a1.bin")
    for name in (*kept, "step-1/model.json", "step-1.old/deltas/000001/delta.json"):
        (url / name).write_bytes(b"earlier")
    with exports_in(url) as (folder, publish):
        for number, content in enumerate((b"old", b"new"), 1):
            shutil.rmtree(folder / "step-2", ignore_errors=True)
            (folder / "step-2").mkdir()
            for name in ("model.json", "sample.json"):
                (folder / "step-2" / name).write_bytes(content)
                os.utime(folder / "step-2" / name, (number, number))
            publish()
            publish()
            assert (url / "step-2/model.json").read_bytes() == content
            assert (url / "step-2/sample.json").read_bytes() == content
            assert uploaded == ["sample.json", "model.json"] * number
            assert set(url.sizes()) == {*kept, "step-2/model.json", "step-2/sample.json"}
    url.remove_tree()


def test_the_old_bundle_at_a_url_stays_until_the_new_one_is_complete(monkeypatch):
    real, complete = RemotePath.upload, []

    def upload(self, file):
        complete.append({name for name in url.sizes() if name.endswith("model.json")})
        real(self, file)

    monkeypatch.setattr(RemotePath, "upload", upload)
    url = RemotePath("memory://always-a-bundle")
    for name in ("step-5/model.json", "step-5/sample.json"):
        (url / name).write_bytes(b"of an earlier start")
    with exports_in(url) as (folder, publish):
        for step in ("step-6", "step-12"):
            for old in folder.iterdir():
                shutil.rmtree(old)
            (folder / step).mkdir()
            for name in ("model.json", "sample.json"):
                (folder / step / name).write_bytes(b"{}")
            publish()
            assert set(url.sizes()) == {f"{step}/model.json", f"{step}/sample.json"}
    assert complete == [{"step-5/model.json"}] * 2 + [{"step-6/model.json"}] * 2
    url.remove_tree()


def test_exports_into_a_bundle_or_checkpoints_are_refused(run, synth_set, tmp_path):
    bundle = tmp_path / "model"
    bundle.mkdir()
    (bundle / "model.json").touch()
    with pytest.raises(ConfigError, match=rf"--output: {bundle} .* such as {bundle}-live"):
        export(["--follow", str(run), "--output", str(bundle)])
    options = words(synth_set, tmp_path / "run", *OPTIONS, f"export={{dir: {bundle}}}")
    with pytest.raises(ConfigError, match=rf"export\.dir: {bundle} .* such as {bundle}-live"):
        train.main(["--config", CONFIG, *options])
    options = words(synth_set, tmp_path / "run", *OPTIONS, f"export={{dir: {tmp_path}/run}}")
    with pytest.raises(ConfigError, match=r"export\.dir: \S+/run is the run folder, .*/run/live"):
        train.main(["--config", CONFIG, *options])
    for given in (run.parent, run):
        with pytest.raises(ConfigError, match=r"--output: \S+ is the run folder"):
            export(["--follow", str(given), "--output", str(run.parent)])
    options = words(synth_set, tmp_path / "new", *OPTIONS, f"export={{dir: {tmp_path}/new/x}}")
    options += [f"checkpoint.dir={tmp_path}/new/x"]
    with pytest.raises(ConfigError, match=r"export\.dir: \S+/new/x is a folder of checkpoints"):
        train.main(["--config", CONFIG, *options])


def test_a_place_that_cannot_be_written_to_is_refused_at_the_start(
    run, synth_set, tmp_path, monkeypatch
):
    """A run's exporter could only log this, and the run would end without any export."""

    def fail(self, data):
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", str(self))

    monkeypatch.setattr(RemotePath, "write_bytes", fail)
    (tmp_path / "file").touch()
    for place, text in (
        ("memory://no-bucket/out", r"no such file or folder: .*no-bucket/out.*; use a URL"),
        (tmp_path / "file" / "out", r"\S+/file/out is not writable \(not a directory\)"),
    ):
        with pytest.raises(ConfigError, match=rf"--output: .*{text}"):
            export(["--follow", str(run), "--output", str(place)])
        options = words(synth_set, tmp_path / "run", *OPTIONS, f"export={{dir: {place}}}")
        with pytest.raises(ConfigError, match=rf"export\.dir: .*{text}"):
            train.main(["--config", CONFIG, *options])


def test_exports_do_not_replace_checkpoints(run, tmp_path):
    folder = tmp_path / "run/checkpoints"
    shutil.copytree(run, folder)
    for given in (folder.parent, folder):
        with pytest.raises(ConfigError, match=rf"--output: {folder} is a folder of checkpoints"):
            export(["--follow", str(given), "--output", str(folder)])
    other = RemotePath("memory://other-run")
    for name in ("run.json", "step-6/index.json", "step-6/rank-0.a1.bin"):
        (other / name).write_bytes(b"{}")
    with pytest.raises(ConfigError, match=rf"--output: {other} is a folder of checkpoints"):
        export(["--follow", str(run), "--output", str(other)])

    def write_base(checkpoint, target):
        target.mkdir()
        (target / "model.json").write_text("{}")

    export_next(open_checkpoint(run / "step-12"), folder, 0, write_base)
    assert open_checkpoint(folder / "step-2").step == 2


def test_other_files_at_a_url_are_not_removed(tmp_path):
    url = RemotePath("memory://other-exports")
    (url / "v1/model.json").write_bytes(b"{}")
    with pytest.raises(ConfigError, match=rf"--output {url} already contains .* v1/model\.json"):
        export_to(url, None, None)
    assert list(url.sizes()) == ["v1/model.json"]


@pytest.mark.slow
def test_a_training_run_exports_while_it_trains(synth_set, tmp_path):
    more = [f"export={{dir: {tmp_path / 'out'}, every_seconds: 0, deltas: 4}}"]
    command = [sys.executable, "-m", "sbpflow", "train", "--config", CONFIG]
    done = deadlines.run(
        [*command, *words(synth_set, tmp_path / "run", *OPTIONS, *more)],
        90,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    log = (tmp_path / "run" / "export.log").read_text()
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(\d\d:\d\d:\d\d \S+ has the weights of step \d+\n)+", log), log
    assert log.endswith("weights of step 20\n")
    bundle = newest_bundle(tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-20")
    writer("as_trained")(checkpoint, tmp_path / "fresh")
    found, wanted = values_of(bundle), values_of(tmp_path / "fresh")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_export_in_a_run_needs_checkpoints_with_deltas(synth_set, tmp_path):
    for more, text in (
        ("checkpoint.every=0", "because checkpoint.every is 0"),
        (
            "checkpoint.deltas=0",
            "use checkpoint.deltas: 24, or, to write only bundles, export.deltas: 0",
        ),
    ):
        options = words(synth_set, tmp_path, "export={dir: out}", more)
        with pytest.raises(ConfigError, match=text):
            train.main(["--config", CONFIG, *options])

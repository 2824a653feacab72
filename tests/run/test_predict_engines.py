"""Tests predictions that run as tasks on engines: the files do not depend on workers, kills, or the
engine.
"""

import os
import shutil
import signal
import time
from dataclasses import replace

import pytest

from sbpflow.commands.predict import predict
from sbpflow.data.engine import Engine
from sbpflow.data.engine_backends import ENGINES, Threads
from sbpflow.errors import ConfigError
from sbpflow.training.trainer import Trainer
from tests.data.engine_runs import workers
from tests.data.rows import folder_bytes
from tests.run import test_predict
from tests.run.test_predict import words
from tests.run.test_score_blocks import BLOCK, check_equal, folder, joined, run

__all__ = ["folder", "run"]  # fixtures


def _train_again(world, folder, run):
    """Train other weights, whose checkpoint has the same path."""
    real = test_predict.config_of

    def config_of(*args):
        config = real(*args)
        return replace(config, run=replace(config.run, seed=8))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_predict, "config_of", config_of)
        test_predict._train(world, folder, run)


def kill_one_scoring(engine, monkeypatch):
    """Kill a worker after the first scored block; return a list of the killed processes."""
    real, killed = Engine.run, []

    def run_and_kill(self, function, items):
        for result in real(self, function, items):
            if function.func.__name__ == "_score" and not killed:
                killed.append(workers(engine)[-1])
                os.kill(killed[0], signal.SIGKILL)
            yield result

    monkeypatch.setattr(Engine, "run", run_and_kill)
    return killed


def test_tasks_write_the_scores_of_ranks(run, folder, tmp_path):
    more = (*BLOCK, "--engine", "processes", "--workers", "1")
    assert predict(words(run, folder / "new", tmp_path / "tasks", *more)) == 0
    assert predict(words(run, folder / "new", tmp_path / "ranks", *BLOCK)) == 0
    check_equal(joined(tmp_path / "tasks"), joined(tmp_path / "ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "ray", "dask"])
def test_the_files_do_not_depend_on_workers_and_kills(run, folder, tmp_path, monkeypatch, engine):
    if engine != "processes":
        pytest.importorskip({"ray": "ray", "dask": "distributed"}[engine])
    more = (*BLOCK, "--wait", "3", "--engine")
    one = words(run, folder / "new", tmp_path / "one", *more, "processes", "--workers", "1")
    assert predict(one) == 0
    killed = kill_one_scoring(engine, monkeypatch)
    two = words(run, folder / "new", tmp_path / "two", *more, engine, "--workers", "2")
    assert predict(two) == 0
    assert len(killed) == 1
    assert folder_bytes(tmp_path / "two") == folder_bytes(tmp_path / "one")


def test_workers_that_scored_with_earlier_weights_load_the_new_weights(
    run, folder, tmp_path, monkeypatch, ranks
):
    """The workers of a Dask cluster outlive the command, like the threads of this process."""
    monkeypatch.setitem(ENGINES, "processes", Threads)
    trained = shutil.copytree(run, tmp_path / "run")
    more = (*BLOCK, "--engine", "processes", "--overwrite")
    assert predict(words(trained, folder / "set", tmp_path / "scores", *more)) == 0
    earlier = joined(tmp_path / "scores")
    shutil.rmtree(trained)
    ranks(1, _train_again, folder, trained)
    assert predict(words(trained, folder / "set", tmp_path / "scores", *more)) == 0
    assert predict(words(trained, folder / "set", tmp_path / "expected", *BLOCK)) == 0
    check_equal(joined(tmp_path / "scores"), joined(tmp_path / "expected"))
    assert not joined(tmp_path / "scores").equals(earlier)


def test_threads_of_a_worker_take_turns(run, folder, tmp_path, monkeypatch):
    """The threads of a Dask worker share a model and a loader, like the threads of this process."""
    real = Trainer.predict

    def slowly(self, batch):
        time.sleep(0.02)
        return real(self, batch)

    monkeypatch.setitem(ENGINES, "processes", Threads)
    more = (*BLOCK, "--engine", "processes", "data.batch_size=10")
    assert predict(words(run, folder / "set", tmp_path / "one", *more, "--workers", "1")) == 0
    monkeypatch.setattr(Trainer, "predict", slowly)
    assert predict(words(run, folder / "set", tmp_path / "many", *more, "--workers", "4")) == 0
    assert folder_bytes(tmp_path / "many") == folder_bytes(tmp_path / "one")


def test_an_output_file_is_refused_because_engines_write_folders(run, folder, tmp_path):
    with pytest.raises(
        ConfigError, match=r"must be a folder .* got .*s\.parquet; .* --output .*/s$"
    ):
        predict(words(run, folder / "new", tmp_path / "s.parquet", "--engine", "processes"))

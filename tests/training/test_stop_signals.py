"""Tests Ctrl-C and SIGTERM: the run saves, if configured, and ends; a second signal ends it at
once.
"""

import os
import signal
import threading
import time

import pytest

from sbpflow.checkpoint.folder import list_checkpoints
from sbpflow.runtime.processes import graceful_shutdown, launch
from sbpflow.training.trainer import Trainer
from tests.deadlines import Deadline
from tests.training.test_resume import events, run

ENDS = {signal.SIGTERM: launch.Terminated, signal.SIGINT: KeyboardInterrupt}


@pytest.fixture
def watched():
    """Install the handlers of ``run_main``, without its thread, and restore the old handlers at the
    end."""
    before = {number: signal.getsignal(number) for number in ENDS}
    signal.signal(signal.SIGTERM, launch._raise_terminated)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def signal_in_step(monkeypatch, step, *numbers):
    """Send these signals during the step."""
    real = Trainer.step

    def signalled(self, batches):
        loss = real(self, batches)
        if self.num_steps == step:
            for number in numbers:
                signal.raise_signal(number)
        return loss

    monkeypatch.setattr(Trainer, "step", signalled)


def saved(folder):
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_saves_the_current_step_and_ends_the_run(
    synth_set, tmp_path, monkeypatch, watched, number
):
    with monkeypatch.context() as patch:
        signal_in_step(patch, 6, number)
        with pytest.raises(ENDS[number]) as stopped:
            run(synth_set, tmp_path)
    assert saved(tmp_path) == ["step-6", "step-4"]
    path = tmp_path / "checkpoints" / "step-6"
    assert str(stopped.value) == (
        f"step 6 is saved in {path}; the same command resumes the run from it"
    )
    assert signal.getsignal(signal.SIGTERM) is launch._raise_terminated, "handed back"
    assert run(synth_set, tmp_path, "train.max_steps=9") == 0
    assert [e["step"] for e in events(tmp_path) if e["event"] == "step"] == list(range(1, 10))


def test_the_message_says_what_resumes_a_run_that_never_resumes(
    synth_set, tmp_path, monkeypatch, watched
):
    never = "checkpoint.resume=never"
    with monkeypatch.context() as patch:
        signal_in_step(patch, 2, signal.SIGTERM)
        with pytest.raises(launch.Terminated) as stopped:
            run(synth_set, tmp_path, never)
    assert str(stopped.value).endswith(
        "; with checkpoint.resume=auto (now never), the same command resumes the run from it"
    )
    overrides = (never, "checkpoint.resume=auto", "train.max_steps=3")
    assert run(synth_set, tmp_path, *overrides) == 0
    assert [e["step"] for e in events(tmp_path) if e["event"] == "step"] == [1, 2, 3]


def test_the_window_is_drained_before_the_run_ends(synth_set, tmp_path, monkeypatch, watched):
    drained = []
    real = Trainer.drain

    def drain(self):
        drained.append((self.num_steps, self.num_announced))
        real(self)

    with monkeypatch.context() as patch:
        signal_in_step(patch, 6, signal.SIGTERM)
        patch.setattr(Trainer, "drain", drain)
        with pytest.raises(launch.Terminated):
            run(synth_set, tmp_path, "train.lookahead=4")
    assert drained == [(6, 4)]
    assert saved(tmp_path)[0] == "step-6"


def test_a_second_signal_ends_the_run_without_a_save(synth_set, tmp_path, monkeypatch, watched):
    monkeypatch.setattr(graceful_shutdown, "REPEAT_S", 0.0)
    signal_in_step(monkeypatch, 6, signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(launch.Terminated):
        run(synth_set, tmp_path)
    assert saved(tmp_path) == ["step-4"]


def test_sigterm_soon_after_ctrl_c_ends_the_run_without_a_save(
    synth_set, tmp_path, monkeypatch, watched
):
    """For a second Ctrl-C, torch's launcher sends SIGTERM to the ranks."""
    signal_in_step(monkeypatch, 6, signal.SIGINT, signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(synth_set, tmp_path)
    assert saved(tmp_path) == ["step-4"]


def test_a_repeated_sigterm_counts_as_the_same_request(synth_set, tmp_path, monkeypatch, watched):
    """Under Slurm, a rank gets SIGTERM twice: from Slurm and from torchrun."""
    signal_in_step(monkeypatch, 6, signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(launch.Terminated, match="step 6 is saved"):
        run(synth_set, tmp_path)
    assert saved(tmp_path) == ["step-6", "step-4"]


def test_signals_end_the_run_at_once_if_configured(synth_set, tmp_path, monkeypatch, watched):
    signal_in_step(monkeypatch, 6, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(synth_set, tmp_path, "checkpoint.on_signal=end")
    assert saved(tmp_path) == ["step-4"]


def test_a_run_without_a_signal_leaves_no_thread_and_no_file(watched):
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        shutdown = graceful_shutdown.watch_signals()
        assert isinstance(shutdown, graceful_shutdown.GracefulShutdown)
        shutdown.end()
    deadline = Deadline(10)
    while threading.active_count() > threads and not deadline.over():
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files

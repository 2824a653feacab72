"""Tests the messages and exit codes of errors, without processes."""

import resource
import threading
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore

from sbpflow.errors import (
    AbsentError,
    ConfigError,
    DataError,
    PeerLostError,
    ReplicaError,
    SbpError,
    TrainingError,
)
from sbpflow.runtime.processes import exit_messages
from sbpflow.runtime.processes.exit_messages import Meeting, Reason, compose
from sbpflow.runtime.processes.launch import _MAKE_ROOM, _NEED_LESS, ArgumentParser, classify
from sbpflow.runtime.processes.store import TimedStore, first_line
from sbpflow.runtime.ranks.world import broken, refused

MISTAKE, LOST = Reason("mistake", "a: no", 1), Reason("lost_peer", "closed by peer", 2)
ABSENT = Reason("absent", "rank 2 did not join")
CRASH = Reason("crash", "Traceback\nValueError: b\n", 1)
TERMINATED, INTERRUPT = Reason("terminated", order=1), Reason("interrupt", order=1)
TERMINATED_LATER = Reason("terminated", order=3)


@pytest.mark.parametrize(
    ("posts", "message"),
    [
        ([MISTAKE, MISTAKE], "error: a: no"),
        ([MISTAKE, LOST], "error: a: no [rank 0]"),
        ([MISTAKE, None], "error: a: no [rank 0]"),
        ([MISTAKE, Reason("mistake", "b")], "error: a: no [rank 0]\nerror: b [rank 1]"),
        ([CRASH, LOST], "Traceback\nValueError: b\n[rank 0]"),
        ([LOST, CRASH, CRASH], "Traceback\nValueError: b\n[rank 1]"),
        ([CRASH, MISTAKE], "Traceback\nValueError: b\n[rank 0]\nerror: a: no [rank 1]"),
        ([Reason("crash", "T\nc", 2), CRASH], "Traceback\nValueError: b\n[rank 1]\nc [rank 0]"),
        ([Reason("crash"), LOST], ""),
        ([INTERRUPT, TERMINATED], "stopped by Ctrl-C"),
        ([INTERRUPT, LOST], "stopped by Ctrl-C"),
        ([TERMINATED, TERMINATED], "stopped by SIGTERM"),
        ([TERMINATED, LOST], "stopped by SIGTERM"),
        ([Reason("interrupt", "step 6 is saved"), LOST], "stopped by Ctrl-C; step 6 is saved"),
        ([TERMINATED, Reason("terminated", "a")], "stopped by SIGTERM; a"),
        ([TERMINATED, None], "error: rank 1 died or stopped responding; "),
        ([LOST, None], "error: rank 1 died or stopped responding; "),
        ([LOST, None, None], "error: ranks 1, 2 died or stopped responding; "),
        ([ABSENT, ABSENT, None], "error: rank 2 did not join"),
        ([MISTAKE, ABSENT, None], "error: a: no [rank 0]"),
        ([CRASH, ABSENT, None], "Traceback\nValueError: b\n[rank 0]"),
        (
            [LOST, TERMINATED_LATER],
            "error: a connection between ranks broke even though all ranks are ",
        ),
    ],
)
def test_posted_reasons_become_one_message(posts, message):
    found = {rank: reason for rank, reason in enumerate(posts) if reason is not None}
    text = compose(found, len(posts))
    assert text.startswith(message) if message.endswith((" ", "; ")) else text == message


@pytest.mark.parametrize(
    ("posts", "message"),
    [
        ([TERMINATED, TERMINATED, LOST, None], "stopped by SIGTERM, sent to ranks 0, 1 on a"),
        ([TERMINATED, TERMINATED, None, None], "stopped by SIGTERM, sent to ranks 0, 1 on a"),
        ([TERMINATED] * 4, "stopped by SIGTERM"),
        ([LOST, LOST, INTERRUPT, INTERRUPT], "stopped by Ctrl-C, sent to ranks 2, 3 on b"),
        ([INTERRUPT] * 4, "stopped by Ctrl-C"),
        ([TERMINATED, None, LOST, LOST], "error: rank 1 on a died or stopped responding; "),
        ([LOST, TERMINATED_LATER, None, LOST], "error: rank 2 on b died or stopped responding; "),
        ([None, None, LOST, None], "error: ranks 0, 1 on a and rank 3 on b died or "),
    ],
)
def test_posted_reasons_of_two_machines_become_one_message(posts, message):
    found = {rank: reason for rank, reason in enumerate(posts) if reason is not None}
    assert compose(found, 4, {0: "a", 1: "a", 2: "b", 3: "b"}).startswith(message)


def test_without_the_store_ranks_of_this_machine_are_not_blamed():
    machines = {0: "a", 1: "a", 2: "b", 3: "b"}
    text = compose({2: LOST}, 4, machines, alive=[2, 3], store_lost="the store at a:1 is silent")
    assert text.startswith("error: ranks 0, 1 on a died or stopped responding; ")
    assert text.endswith("(closed by peer; the store at a:1 is silent)")


OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize(
    ("error", "kind", "text", "code"),
    [
        (ConfigError("a: no"), "mistake", "a: no", 2),
        (DataError("row 7"), "mistake", "row 7", 2),
        (TrainingError("loss is NaN"), "mistake", "loss is NaN", 2),
        (FileNotFoundError(2, "No such file", "x.npy"), "mistake", "x.npy: no such file", 2),
        (PeerLostError("loss, all_reduce: closed"), "lost_peer", "loss, all_reduce: closed", 3),
        (AbsentError("rank 1 did not join"), "absent", "rank 1 did not join", 3),
        (DistNetworkError("connection reset"), "lost_peer", "connection reset", 3),
        (
            OSError(28, "No space left on device"),
            "mistake",
            f"no space left on device: {_MAKE_ROOM}",
            2,
        ),
        (
            OSError("No space left on device (os error 28)"),  # as Polars raises it
            "mistake",
            f"no space left on device: {_MAKE_ROOM}",
            2,
        ),
        (
            MemoryError(),
            "mistake",
            f"out of memory: the system has no more memory; {_NEED_LESS}",
            2,
        ),
        (
            RuntimeError("[gloo/transport/tcp/socket.cc:24] socket: Too many open files"),
            "mistake",
            f"too many open files: a process may open {OPEN_FILES}; raise this limit (ulimit -n)",
            2,
        ),
        (torch.OutOfMemoryError("3 GiB\n!"), "mistake", f"out of memory: 3 GiB; {_NEED_LESS}", 2),
    ],
)
def test_errors_are_classified_by_type(error, kind, text, code):
    reason, found = classify(error)
    assert (reason.kind, reason.text, found) == (kind, text, code)


@pytest.mark.parametrize(
    "error",
    [
        SbpError("matmul: no common dim"),
        ReplicaError("mlp.0.bias: the copies on ranks [0, 1] differ"),
        RuntimeError("Timed out waiting for my own queue"),
        RuntimeError("Connection closed by peer"),
        RuntimeError("EADDRINUSE, says a user's own server"),
        ValueError("a bug"),
        OSError("no file named"),
    ],
)
def test_a_program_error_keeps_its_traceback_regardless_of_its_text(error):
    reason, code = classify(error)
    assert (reason.kind, code) == ("crash", 1)
    assert reason.text.endswith(f"{type(error).__name__}: {error}\n")


GLOO = (
    "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:2467. This is typically caused by a remote worker crashing."
)


def test_only_a_collective_that_fails_in_flight_has_lost_a_peer():
    lost = broken(RuntimeError(GLOO), "deep/fwd/0", "all_to_all")
    assert isinstance(lost, PeerLostError)
    assert first_line(lost) == "deep/fwd/0, all_to_all: Connection closed by peer [127.0.0.1]:2467"
    for error in (
        refused(RuntimeError("invalid tensor size (expected (6, 0))"), "deep/fwd/0", "all_gather"),
        broken(RuntimeError("[enforce fail at cpu.cc] 8 vs 4"), "deep/fwd/0", "all_gather"),
    ):
        assert not isinstance(error, PeerLostError)
        assert str(error).startswith("deep/fwd/0, all_gather: ")
    assert isinstance(refused(DistNetworkError("reset"), "a/fwd/0", "all_gather"), PeerLostError)


def test_a_run_waits_for_its_listener_even_if_the_store_is_gone():
    listener = threading.Timer(0.2, lambda: None)
    listener.start()
    store = Mock()
    store.set.side_effect = PeerLostError("connection reset")
    Meeting(1, 2, store, _listener=listener).over()
    assert not listener.is_alive()


def test_rank_0_of_torchrun_waits_at_its_end_for_ranks_that_are_still_starting(monkeypatch):
    store = TimedStore(HashStore(), "here")
    meeting = Meeting(0, 2, store)
    meeting._listener = Mock()
    waits = []

    def second_rank_registers(ready, limit_s):
        waits.append(ready())
        store.set_all({"machine/0": "here", "machine/1": "here"})
        assert ready()

    monkeypatch.setattr(exit_messages, "_wait", second_rank_registers)
    meeting.over()
    assert waits == [False]


def test_one_rank_prints_the_message_without_the_store_even_if_names_are_long(monkeypatch, capsys):
    monkeypatch.setattr(exit_messages, "machine_name", lambda: "host." * 12 + "org (node 1)")
    monkeypatch.setattr(exit_messages, "_GRACE_S", 0.1)
    store = Mock()
    store.add.side_effect = PeerLostError("connection reset")
    ranks = [Meeting(rank, 3, store, name=f"sbpflow/{'clicks-' * 5}/1234") for rank in (1, 2)]
    threads = [threading.Thread(target=meeting.leave, args=[LOST]) for meeting in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capsys.readouterr().err.count("died or stopped responding") == 1


def test_first_line_is_ascii_and_short():
    assert first_line(RuntimeError("bad \U0001f3d6\nframe #1")) == "bad ?"
    assert first_line(KeyError()) == "KeyError"


def test_usage_mistakes_are_config_errors():
    parser = ArgumentParser(prog="train_wdl.py")
    parser.add_argument("--config", required=True)
    with pytest.raises(ConfigError, match=r"required: --config; usage: train_wdl.py"):
        parser.parse_args([])

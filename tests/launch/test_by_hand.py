"""Tests ranks started without torchrun, and parts of the launcher that need no other process."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from sbpflow.errors import (
    AbsentError,
    ConfigError,
)
from sbpflow.runtime.compute import devices
from sbpflow.runtime.processes import store as run_store
from sbpflow.runtime.processes.exit_messages import Meeting
from sbpflow.runtime.processes.launch import classify
from sbpflow.runtime.processes.store import no_store
from sbpflow.runtime.ranks.rendezvous import device_type_of
from sbpflow.runtime.ranks.world import World
from tests.deadlines import Deadline, load_per_core, output_of

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ROOT / "tests" / "launch" / "entry.py"
LIMIT_S = 120


def start(mode: str, folder: Path, **env: object) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    given = {name: str(value) for name, value in env.items()}
    return subprocess.Popen(
        [sys.executable, str(ENTRY), mode, str(folder)],
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_one_process_prints_a_mistake_once(tmp_path):
    process = start("mistake_on_all", tmp_path)
    output = output_of(process, LIMIT_S)
    assert process.returncode == 2
    expected = "\nerror: data.batch_size: 1 is too small; for example data.batch_size: 2\n"
    assert output == expected


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        ("sys.exit(7)", 7, "sys.exit(7)"),
        ("exit(-1)", 255, "sys.exit(-1)"),
        ("sys.exit('no more rows')", 1, "sys.exit('no more rows')"),
        ("sys.exit(256)", 1, "sys.exit(256)"),
        ("sys.exit(10**30)", 1, "sys.exit(1000000000000000000000000000000)"),
    ],
)
def test_sys_exit_of_the_program_is_reported_with_its_line(tmp_path, call, code, message):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom sbpflow.runtime.processes.launch import run_main\n\n\n"
        f"def main():\n    {call}\n\n\nrun_main(main)\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    expected = f"the program exited with code {code}: {message} at {program}:6, in main"
    assert (done.returncode, done.stderr) == (code, f"\n{expected}\n[rank 0]\n")


def test_a_port_in_use_is_reported_with_a_remedy(tmp_path, taken_port):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken_port}
    process = start("ok", tmp_path, RANK=0, WORLD_SIZE=2, **address)
    output = output_of(process, LIMIT_S)
    assert process.returncode == 2
    assert output.count(f"port {taken_port} is in use") == 1
    assert "--standalone" in output
    assert "--master-port" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_single_rank_needs_no_rendezvous_address(tmp_path):
    address = {"MASTER_ADDR": "nope", "MASTER_PORT": "abc"}
    process = start("world", tmp_path, RANK=0, WORLD_SIZE=1, TIMEOUT_S=5, **address)
    output = output_of(process, LIMIT_S)
    assert (process.returncode, output) == (0, "")


@pytest.mark.parametrize(
    ("cuda", "driver", "message"),
    [
        (None, False, ""),
        (None, True, r"torch \S+ is a CPU build although an NVIDIA driver is installed; install"),
        ("13.0", True, r"torch \S+ cannot use CUDA: driver too old$"),
        ("13.0", False, r"torch \S+ cannot use CUDA: driver too old; no NVIDIA driver is loaded$"),
    ],
)
def test_device_auto_logs_why_it_uses_the_cpu(monkeypatch, tmp_path, caplog, cuda, driver, message):
    def fail() -> None:
        raise RuntimeError("driver too old.\nmore")

    (tmp_path / "version").touch()
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / ("version" if driver else "none"))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with World.start("auto") as world:
        assert world.device.type == "cpu"
    warnings = [text for text in caplog.messages if text.startswith("device auto: using the CPU")]
    assert len(warnings) == bool(message)
    assert all(re.search(message, text) for text in warnings)
    caplog.clear()
    with World.start("cpu"):
        assert not caplog.messages, "an explicit choice of the CPU is not explained"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"memory.max": "8000000\n"}, 8_000_000),
        ("0::/", {"memory.max": "max\n"}, None),
        ("0::/job/step", {"job/memory.max": "5000000", "job/step/memory.max": "max"}, 5_000_000),
        ("0::/job/step", {"job/memory.max": "5", "job/step/memory.max": "4"}, 4),
        ("5:cpu:/\n4:memory:/pod\n0::/", {"memory/pod/memory.limit_in_bytes": "70"}, 70),
        ("4:memory:/path/of/the/host", {"memory/memory.limit_in_bytes": "60"}, 60),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("4:cpu,cpuacct:/", {"memory/memory.limit_in_bytes": "60"}, None),
        ("0::/../other", {"memory.max": "50"}, 50),
        (None, {"memory.max": "50"}, None),
    ],
)
def test_the_memory_of_a_rank_is_limited_by_its_control_groups(
    monkeypatch, tmp_path, groups, files, expected
):
    process, root = tmp_path / "cgroup", tmp_path / "root"
    if groups is not None:
        process.write_text(groups + "\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(devices, "_CGROUPS", root)
    monkeypatch.setattr(devices, "_CGROUPS_OF_PROCESS", process)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert devices.memory_bytes("cpu") == (physical if expected is None else expected)


def test_a_negative_local_rank_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "-5")
    with pytest.raises(
        ConfigError, match=r"LOCAL_RANK in the environment must be 0 or more, .* got -5"
    ):
        device_type_of("cpu")


def test_more_ranks_than_devices_are_refused_before_nccl_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_type_of("auto") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"has 2 CUDA device\(s\).*--nproc-per-node 2"):
        device_type_of("auto")
    assert device_type_of("cpu") == "cpu"


@pytest.mark.slow
def test_ranks_started_by_hand_print_one_message(tmp_path):
    """Rank 0 serves the store, so it must not exit before the other ranks have read from the
    store.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2}
    ranks = [start("mistakes_differ", tmp_path, RANK=rank, **address) for rank in range(2)]
    outputs = [output_of(process, LIMIT_S) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    both = "".join(outputs)
    for rank in range(2):
        assert both.count(f"error: shard {rank}: row 7 is cut short [rank {rank}]") == 1
    assert "" in outputs, "one rank prints for both"


def start_some(folder: Path, size: int, here: dict[int, float], mode: str = "world"):
    """Start the ranks in ``here``, which maps ranks to timeouts in seconds; return their outputs
    and exit codes.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": size}
    ranks = [
        start(mode, folder, RANK=rank, TIMEOUT_S=timeout_s, **address)
        for rank, timeout_s in here.items()
    ]
    outputs = [output_of(process, LIMIT_S) for process in ranks]
    return outputs, [process.returncode for process in ranks]


@pytest.mark.slow
@pytest.mark.parametrize(
    "patience",
    [
        pytest.param((10, 10), marks=pytest.mark.slow),
        pytest.param((10, 60), marks=pytest.mark.slow),
        (60, 10),
    ],
)
def test_each_rank_that_started_names_the_ranks_that_did_not(tmp_path, patience):
    """The other started rank may time out before rank 0 or wait much longer."""
    patience = [round(seconds * load_per_core()) for seconds in patience]
    outputs, codes = start_some(tmp_path, 3, {0: patience[0], 2: patience[1]})
    assert codes == [3, 3]
    for output in outputs:
        (line,) = [line for line in output.splitlines() if line]
        assert line.startswith(
            f"error: rank 1 did not join: 2 of 3 ranks joined within {min(patience)} s; read"
        )
        assert "MASTER_ADDR" in line
        assert "parallel.timeout_s" in line


def test_rank_0_names_all_ranks_that_did_not_join(tmp_path):
    (output,), codes = start_some(tmp_path, 4, {0: 2})
    assert codes == [3]
    assert output.count("error: ranks 1, 2, 3 did not join: 1 of 4 ranks joined") == 1
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_rank_number_used_by_two_processes_is_refused(tmp_path):
    """If a duplicate rank number were not reported, the third process would wait for the missing
    number."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 3}
    ranks = [start("world", tmp_path, RANK=rank, TIMEOUT_S=40, **address) for rank in (0, 1, 1)]
    outputs = [output_of(process, LIMIT_S) for process in ranks]
    codes = [process.returncode for process in ranks]
    assert 2 in codes[1:]
    assert set(codes) <= {2, 3}, "no rank hangs or starts"
    message = "".join(outputs)
    assert "error: RANK=1 is used by both process " in message
    assert "give each process a different number" in message


@pytest.mark.slow
def test_ranks_start_when_all_have_joined(tmp_path):
    outputs, codes = start_some(tmp_path, 3, {2: 60, 1: 60, 0: 60})
    assert codes == [0, 0, 0], outputs
    assert "error" not in "".join(outputs)
    assert len(list(tmp_path.glob("rank*"))) == 3


def test_a_rank_0_that_does_not_answer_counts_as_absent():
    error = no_store("10.0.0.1", 29500, False, TimeoutError("no answer"))
    words, code = classify(error)
    assert (words.kind, code) == ("absent", 3)
    assert words.text.startswith(
        "rank 0 did not answer at MASTER_ADDR, MASTER_PORT 10.0.0.1:29500 within 60 s (no answer)"
    )
    mistake = no_store("10.0.0.1", 80, True, RuntimeError("permission denied"))
    assert classify(mistake)[1] == 2
    assert "cannot listen on 10.0.0.1:80 (permission denied)" in str(mistake)


@pytest.fixture
def impatient(monkeypatch):
    """Make this process rank 1 of 2; return a function that sets the port and the timeout."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def wait_for(port: int, connect_s: float) -> None:
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setattr(run_store, "CONNECT_S", connect_s)
        monkeypatch.setattr(run_store, "_GREET_S", 0.5)

    return wait_for


def test_a_rank_0_that_was_not_started_is_reported_without_a_torch_log(impatient, capfd):
    port = free_port()
    impatient(port, 0.5)
    with pytest.raises(AbsentError) as caught:
        Meeting.connect()
    assert str(caught.value).startswith(
        f"rank 0 did not answer at MASTER_ADDR, MASTER_PORT 127.0.0.1:{port} within 0.5 s (no "
        "process listens there: connection refused); read the output of rank 0"
    )
    assert capfd.readouterr() == ("", ""), "torch's own log would contain C++ stack frames"


def test_a_silent_listener_is_reported_within_the_time_limit(impatient, taken_port):
    impatient(taken_port, 1.0)
    deadline = Deadline(3)
    with pytest.raises(
        AbsentError, match=r"within 1 s \(the process listening there is not a rank"
    ):
        Meeting.connect()
    assert not deadline.over()


def test_ranks_wait_for_a_late_rank_0(impatient):
    """Another thread of this process runs the store of rank 0."""
    from torch.distributed import TCPStore

    port = free_port()
    impatient(port, 20.0)
    kept: list[TCPStore] = []
    late = threading.Timer(
        0.7, lambda: kept.append(TCPStore("127.0.0.1", port, None, True, wait_for_workers=False))
    )
    late.start()
    store = Meeting.connect().store
    late.join()
    assert store is not None
    store.set("word", "here")
    assert kept[0].get("sbpflow/by-hand/word") == b"here"
    assert store.torch_store.timeout.total_seconds() == 20


def test_an_address_that_does_not_resolve_is_reported_at_once(impatient, monkeypatch):
    impatient(free_port(), 60.0)
    for name in ("no-such-machine.invalid", "two..dots"):
        monkeypatch.setenv("MASTER_ADDR", name)
        deadline = Deadline(30)
        with pytest.raises(ConfigError, match=rf"MASTER_ADDR='{name}': .* not resolve .*127\.0\."):
            Meeting.connect()
        assert not deadline.over()


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        ("2", "2", r"RANK=2 .* WORLD_SIZE=2.* 0 to 1; .*for example, RANK=1$"),
        ("-1", "2", r"RANK=-1 .* WORLD_SIZE=2.* 0 to 1; .*for example, RANK=0$"),
        ("1", "1", r"RANK=1 .* WORLD_SIZE=1.* 0 to 0; .*for example, RANK=0$"),
        ("0", "0", r"WORLD_SIZE=0: a run needs at least 1 rank; use, for example, WORLD_SIZE=1"),
        ("0", "-4", r"WORLD_SIZE=-4: a run needs at least 1 rank; use, for example, WORLD_SIZE=1"),
        (
            None,
            "2",
            r"RANK is not set, but WORLD_SIZE=2 is; .* 0 to 1 in each process .for example, RANK=0",
        ),
    ],
)
@pytest.mark.parametrize("call", [Meeting.connect, lambda: World.start("cpu")])
def test_an_invalid_rank_or_world_size_is_refused_before_connecting(
    monkeypatch, rank, size, message, call
):
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)  # RANK is checked before the store
    with pytest.raises(ConfigError, match=f"^{message}"):
        call()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_an_environment_variable_that_is_not_a_number_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "two")
    with pytest.raises(ConfigError, match=f"^{name} .*, got 'two'"):
        Meeting.connect()


def test_an_environment_without_a_rendezvous_address_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=''.*MASTER_ADDR=127\.0\.0\.1"):
        Meeting.connect()


@pytest.mark.slow
def test_ctrl_c_in_one_process_is_quiet(tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    process = start("busy", tmp_path, RANK=0, WORLD_SIZE=1, **address)
    while not (tmp_path / "rank0").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output = output_of(process, LIMIT_S)
    assert (output, process.returncode) == ("\nstopped by Ctrl-C\n", 130)

"""Tests runs with tables on embedding servers: equal losses and checkpoints, and lost servers."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.config.storage_rules import StorageRule
from sbpflow.errors import ConfigError
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.ranks.world import World
from tests.deadlines import output_of
from tests.embedding.test_servers import SECRET, running
from tests.launch.machines import Machine, needs_namespaces, two_machines
from tests.training.test_cached_runs import check_equal
from tests.training.test_resume import CONFIG, run, words
from tests.training.test_stores import (
    FIELDS,
    SAVED_AT,
    STEPS,
    Case,
    check_checkpoints,
    saver_of,
    train,
    train_and_save,
)

ROOT = Path(__file__).resolve().parents[2]


def job_of(world: World, case: Case, addresses: list[str], secret: Path) -> Job:
    """Make a job as ``sbpflow train`` does; without addresses, all rows are on the device."""
    config = case.config()
    if addresses:
        rule = StorageRule(
            kind="servers", cache="8%", addresses=tuple(addresses), secret_file=secret
        )
        config = replace(config, parallel=replace(config.parallel, storage={"deep.*": rule}))
    spec, plan = plan_run(config, FIELDS, world_size=world.size, device_type="cpu")
    return build_job(config, spec, plan, Boxing(world))


def train_both_ways(
    world: World, case: Case, addresses: list[str], secret: Path, folder: Path
) -> list[dict[str, Any]]:
    """Train and save with rows on the device and with rows on servers; resume each from the other's
    checkpoint, without the first server if there are several.
    """
    found: list[dict[str, Any]] = []
    places = {"device": [], "servers": addresses}
    for name, servers in places.items():
        job = job_of(world, case, servers, secret)
        losses, _ = train_and_save(job, case, folder / name)
        job.trainer.drain()
        counts = job.embeddings.cache_counts()
        found.append({"losses": losses, "written": counts.written if counts else 0})
        world.barrier()
    for name, other in (("device", "servers"), ("servers", "device")):
        job = job_of(world, case, places[name][1:] or places[name], secret)
        job.restore(open_checkpoint(folder / other / f"step-{SAVED_AT}"))
        losses = train(job, SAVED_AT + 1, STEPS, case.lookahead)
        saver_of(job, folder / f"{name}-resumed").save(STEPS, {})
        job.trainer.drain()
        found.append({"losses": losses})
        world.barrier()
    return found


QUICK = {(2, 3)}


@pytest.mark.parametrize(
    ("size", "count"),
    [
        pytest.param(size, count, marks=[pytest.mark.slow] * ((size, count) not in QUICK))
        for size, count in itertools.product((1, 2, 4), (1, 2, 3))
    ],
)
def test_rows_on_servers_equal_rows_on_the_device(ranks, tmp_path, size, count):
    (tmp_path / "secret").write_bytes(SECRET)
    kinds = {1: ("2", "numba", "lazy_adam"), 2: ("3", "torch", "rowwise_adagrad"),
             4: ("3", "numba", "adagrad")}  # fmt: skip
    case = Case(*kinds[size], lookahead=count + 1)
    with running(count) as servers:
        addresses = [f"{host}:{port}" for host, port in servers.addresses]
        found = ranks(size, train_both_ways, case, addresses, tmp_path / "secret", tmp_path)
    for device, served, *resumed in found:
        assert served["losses"] == device["losses"]
        for one in resumed:
            assert one["losses"] == device["losses"][-len(one["losses"]) :]
    assert sum(served["written"] for _, served, *_ in found) > 20
    check_checkpoints(tmp_path, "servers")


def refusal(world: World, case: Case, addresses: list[str], secret: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        job_of(world, case, addresses, secret)
    return str(refused.value)


def test_all_ranks_report_that_the_rows_do_not_fit_on_the_servers(ranks, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    case = Case("3", "numba", "adagrad", lookahead=2)
    with running(2, memory=50_000) as servers:
        addresses = [f"{host}:{port}" for host, port in servers.addresses]
        found = ranks(2, refusal, case, addresses, tmp_path / "secret")
    assert found[0] == found[1]
    assert "embedding server 0 of 2 at 127.0.0.1:" in found[0]
    assert "refused: the rows need 0.00 GB, but this server's limit is 0.00 GB" in found[0]


COMMON = ("parallel.kernel=numba", "train.epochs=6", "train.eval_every=20", "checkpoint.every=5")
STORAGE = "parallel.storage.deep.*={kind: servers, cache: 18%}"


def command(synth_set: Path, folder: Path, *more: str) -> list[str]:
    given = words(synth_set, folder, *COMMON, "parallel.device=cpu", *more)
    return [sys.executable, "-m", "sbpflow", "train", "--config", CONFIG, *given]


def start(words: list[str], prefix: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*prefix, *words], cwd=ROOT, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    """Return the output of a process up to the first line that contains ``text``."""
    assert process.stdout is not None
    found = ""
    for line in process.stdout:
        found += line
        if text in line:
            return found
    raise AssertionError(found)


def servers_of(folder: Path) -> dict[str, int]:
    """Return the process IDs of a run's local servers, by index."""
    found: dict[str, int] = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            args = path.read_bytes().decode().split("\0")
        except OSError:  # the process has exited
            continue
        if "embedding-server" in args and f"run.dir={folder}" in args:
            found[args[args.index("--index") + 1]] = int(path.parent.name)
    return found


def lose_a_server(synth_set: Path, folder: Path, count: int) -> str:
    """Train with ``count`` servers and kill server 1; return the message of the run."""
    process = start([*command(synth_set, folder, STORAGE), "--servers", str(count)])
    shown = read_until(process, " step 10/")
    servers = servers_of(folder)
    assert sorted(servers) == [f"{index}/{count}" for index in range(count)]
    os.kill(servers[f"1/{count}"], signal.SIGKILL)
    shown += output_of(process, 60)
    assert process.returncode == 3, shown
    (message,) = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert not servers_of(folder)
    return message


@pytest.mark.slow
def test_a_run_ends_after_its_server_was_killed(synth_set, tmp_path):
    message = lose_a_server(synth_set, tmp_path / "run", 2)
    assert message.startswith("error: embedding server 1 of 2 at 127.0.0.1:")
    assert "died or cannot be reached" in message


@pytest.mark.slow
def test_a_run_continues_after_its_server_was_killed_with_other_servers(synth_set, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert run(synth_set, whole, *COMMON) == 0
    message = lose_a_server(synth_set, folder, 3)
    assert message.startswith("error: embedding server 1 of 3 at 127.0.0.1:")
    assert "died or cannot be reached" in message
    process = start([*command(synth_set, folder, STORAGE), "--servers", "1"])
    shown = output_of(process, 120)
    assert process.returncode == 0, shown
    assert "resuming after step" in shown
    check_equal(folder, whole)
    assert not servers_of(folder)


@contextmanager
def two_servers(
    machine: Machine, words: list[str], folder: Path, code: str = "", secret: str = "secret"
) -> "Iterator[list[subprocess.Popen[str]]]":
    """Start the servers of a run on a machine; server 1 runs ``code`` first and has ``secret``."""
    prefix = ("ip", "netns", "exec", machine.name)
    entry = folder / "entry.py"
    entry.write_text(f"{code}\nfrom sbpflow.__main__ import entry\nentry()\n")
    found: list[subprocess.Popen[str]] = []
    try:
        for index in range(2):
            given = [str(entry) if index else "-m", *([] if index else ["sbpflow"])]
            given += ["embedding-server", "--index", f"{index}/2", *words]
            if index:
                given += [f"parallel.storage.deep.*.secret_file={folder / secret}"]
            found.append(start([sys.executable, *given], prefix))
        for server in found:
            read_until(server, "listens on 10.77.0.2:")
        yield found
    finally:
        for server in found:
            server.kill()
            server.communicate()


FAULTS = {
    "stop": (3, r"embedding server 1 of 2 at 10.77.0.2:7001 does not answer within 6 s"),
    "cut": (3, r"embedding server [01] of 2 at 10.77.0.2:700[01] does not answer within 6 s"),
    "kill": (3, r"embedding server 1 of 2 at 10.77.0.2:7001 died or cannot be reached"),
    "secret": (2, r"secret_file: embedding server 1 of 2 at 10.77.0.2:7001 has a different secret"),
    "version": (
        2,
        r"embedding server 1 of 2 at 10.77.0.2:7001 is not an embedding server of this ",
    ),
}


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_or_wrong_server_is_named_within_the_timeout(synth_set, tmp_path, fault):
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "other").write_bytes(SECRET[::-1])
    rule = "kind: servers, cache: 18%, addresses: ['10.77.0.2:7000', '10.77.0.2:7001']"
    storage = f"parallel.storage.deep.*={{{rule}, secret_file: {tmp_path / 'secret'}}}"
    given = command(
        synth_set, tmp_path / "run", storage, "parallel.timeout_s=10", "train.epochs=2000"
    )
    code = "import sbpflow.embedding.cache.server_protocol as p; p.PROTOCOL = 7"
    with two_machines() as (here, there):
        with two_servers(
            there, given[4:], tmp_path, code if fault == "version" else "",
            "other" if fault == "secret" else "secret",
        ) as servers:  # fmt: skip
            process = start([*given, "-n", "2"], ("ip", "netns", "exec", here.name))
            begin = time.monotonic()
            if fault in ("stop", "cut", "kill"):
                read_until(process, " step 20/")
                begin = time.monotonic()
                if fault == "cut":
                    there.pull_cable()
                else:
                    servers[1].send_signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
            shown = output_of(process, 60)
            took = time.monotonic() - begin
    exit_code, message = FAULTS[fault]
    assert process.returncode == exit_code, shown
    assert len(re.findall(rf"^error: .*{message}", shown, re.M)) == 1, shown
    if exit_code == 3:
        assert took < 20, took  # includes the timeout and the end of the ranks

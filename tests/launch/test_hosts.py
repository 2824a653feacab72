"""Tests how the hosts of ranks are discovered by a handshake or read from a file."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from sbpflow.config.topology_file import read_topology
from sbpflow.errors import AbsentError, ConfigError, PlanError
from sbpflow.run.execution import start
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe, format_plan
from sbpflow.run.planning.plan_file import plan_from_json, plan_to_json
from sbpflow.runtime.files.json_file import json_digest
from sbpflow.runtime.processes.store import TimedStore
from sbpflow.runtime.ranks import hosts
from sbpflow.runtime.ranks.hosts import find_topology
from sbpflow.runtime.ranks.topology import Link, Topology
from tests.deadlines import output_of
from tests.launch.machines import PORT, Machine, needs_namespaces, two_machines
from tests.launch.test_by_hand import free_port
from tests.quick import quick
from tests.training.wdl_case import FIELDS, make_config

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90
PROGRAM = """
import json, os, platform, signal, sys, time
from pathlib import Path
from sbpflow.runtime.ranks import hosts
from sbpflow.runtime.processes.exit_messages import Meeting

meeting, mode, gather = Meeting.connect(), os.environ["MODE"], hosts.gather
rank, size, store = meeting.rank, meeting.world_size, meeting.store
sent = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}

def faulty(*args):
    if rank == 1 and mode in sent:  # it leads its host before the others know it
        store.set("leads", "yes")
        os.kill(os.getpid(), sent[mode])
    return gather(*args)

hosts.gather = faulty
while rank == 0 and mode in sent and not store.check(["leads"]):
    time.sleep(0.01)
try:
    start = time.perf_counter()
    found = hosts.find_topology(store, rank, size, "cpu", float(os.environ["TIMEOUT_S"]))
    seconds = time.perf_counter() - start
    again = hosts.find_topology(store, rank, size, "cpu", 5.0)
    store.add("found", 1)
    while store.add("found", 0) < size:
        time.sleep(0.01)
    facts = {"hosts": found.hosts, "source": found.hosts_source, "same": again == found,
            "memory": found.memory_bytes, "machine": platform.node(),
            "sockets": Path("/proc/net/unix").read_text().count(store.get("host secret")[:16])}
except Exception as error:
    facts = {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - start
facts["seconds"] = seconds
Path(sys.argv[1], str(rank)).write_text(json.dumps(facts))
store.add("done", 1)
while rank == 0 and mode == "ok" and store.add("done", 0) < size:  # rank 0 serves the store
    time.sleep(0.01)
"""


def started(folder: Path, rank: int, size: int, prefix: tuple[str, ...] = (), **env: object):
    given = {"RANK": rank, "WORLD_SIZE": size, "MODE": "ok", "TIMEOUT_S": 60, **env}
    clean = {key: value for key, value in os.environ.items() if key != "LOCAL_WORLD_SIZE"}
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", PROGRAM, str(folder)],
        cwd=ROOT,
        env=clean | {"OMP_NUM_THREADS": "1"} | {key: str(value) for key, value in given.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def facts_of(processes: list[subprocess.Popen[str]], folder: Path) -> list[dict]:
    """Return the facts that the ranks wrote, by rank."""
    texts = [output_of(process, LIMIT_S) for process in processes]
    files = [folder / str(rank) for rank in range(len(processes))]
    assert all(file.exists() for file in files), texts
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("size", quick([2, 4], lambda n: n == 0))
def test_ranks_of_one_machine_discover_that_they_share_a_host(tmp_path, size):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    facts = facts_of([started(tmp_path, rank, size, **where) for rank in range(size)], tmp_path)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for one in facts:
        assert one["hosts"] == [list(range(size))]
        assert one["source"] == "handshake"
        assert one["same"], "a second call returns the same"
        assert one["memory"] == [total // size] * size
        assert one["sockets"] == 0, "the socket is gone"


@pytest.mark.slow
@needs_namespaces
def test_network_namespaces_are_hosts_even_with_equal_host_names(tmp_path):
    """Ranks alternate between hosts, so the ranks of a host are not consecutive."""
    with two_machines() as machines:
        inside = [("ip", "netns", "exec", machine.name) for machine in machines]
        where = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": PORT}
        ranks = [started(tmp_path, rank, 4, inside[rank % 2], **where) for rank in range(4)]
        facts = facts_of(ranks, tmp_path)
    assert len({one["machine"] for one in facts}) == 1
    for one in facts:
        assert one["hosts"] == [[0, 2], [1, 3]]
        assert one["source"] == "handshake"


WORLD = """
import os, sys
from pathlib import Path
from unittest import mock
from sbpflow.boxing import pairs
from sbpflow.boxing.executor import Boxing
from sbpflow.runtime.ranks.world import World
from tests.sbp.test_world import _log
with World.start("cpu", timeout_s=60) as world, mock.patch.object(
    pairs, "pass_messages", side_effect=pairs.pass_messages
) as messages:
    _log(world)  # conversions of two ranks
    found = [str(world.topology.hosts), os.environ.get("GLOO_SOCKET_IFNAME", "")]
    Path(sys.argv[1], str(world.rank)).write_text(" ".join([*found, str(messages.called)]))
    world.barrier()
"""


@needs_namespaces
def test_a_world_on_two_hosts_uses_pairwise_messages_automatically(tmp_path):
    """The environment does not contain the number of ranks per host."""

    def start(machine: Machine, rank: int) -> subprocess.Popen[str]:
        where = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT), "WORLD_SIZE": "2"}
        clean = {key: value for key, value in os.environ.items() if key != "LOCAL_WORLD_SIZE"}
        return subprocess.Popen(
            ["ip", "netns", "exec", machine.name, sys.executable, "-c", WORLD, str(tmp_path)],
            cwd=ROOT,
            env=clean | where | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": machine.interface},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    with two_machines() as machines:
        processes = [start(one, rank) for rank, one in enumerate(machines)]
        message = [output_of(process, LIMIT_S) for process in processes]
        assert not any(process.returncode for process in processes), message
        for rank, machine in enumerate(machines):
            found = (tmp_path / str(rank)).read_text()
            assert found == f"((0,), (1,)) {machine.interface} True"


ONE_HOST = """
from sbpflow.runtime.processes.launch import run_main
from sbpflow.runtime.ranks.topology import Topology
from sbpflow.runtime.ranks.world import World
run_main(lambda: World.start("cpu", timeout_s=60, topology=Topology.one_host(2)) and None)
"""


@pytest.mark.slow
@needs_namespaces
def test_a_world_refuses_a_host_with_ranks_of_two_namespaces():
    where = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT), "WORLD_SIZE": "2"}
    with two_machines() as machines:
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", machine.name, sys.executable, "-c", ONE_HOST],
                cwd=ROOT,
                env=os.environ | where | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, machine in enumerate(machines)
        ]
        output = "".join(output_of(process, LIMIT_S) for process in processes)
    assert [process.returncode for process in processes] == [2, 2], output
    assert output.count("error: parallel.topology: ranks [0, 1] are listed as one host") == 1


def test_tables_too_large_for_one_host_are_planned_for_all_hosts(monkeypatch):
    """Before the ranks join, each host plans as if it had all of them."""
    one, two = Topology.one_host(4), Topology(hosts=((0, 1), (2, 3)))
    config = SimpleNamespace(parallel=SimpleNamespace(topology=None, timeout_s=1.0))

    def make(topology):
        if len(topology.hosts) == 1:
            raise PlanError(f"no plan fits on {len(topology.hosts)} host")
        return topology.hosts, "rest"

    monkeypatch.setattr(start, "world_size_of_environment", lambda: 4)
    monkeypatch.setattr(start, "Meeting", SimpleNamespace(connect=Mock()))
    monkeypatch.setattr(start, "assumed_topology", lambda size, device: one)
    for found, all_here in ((two, False), (one, False), (one, True)):
        monkeypatch.setattr(start, "all_ranks_here", lambda here=all_here: here)
        find = Mock(return_value=replace(found, hosts_source="handshake"))
        monkeypatch.setattr(start, "find_topology", find)
        if found is two:
            assert start.plan_for_ranks(config, "cpu", make) == (two.hosts, "rest")
        else:
            with pytest.raises(PlanError, match="no plan fits on 1 host"):
                start.plan_for_ranks(config, "cpu", make)
        # Ranks that are all on one host do not wait for each other to report the error.
        assert find.called == (not all_here)


def _topology(world):
    return world.topology


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_world_without_a_launcher_discovers_its_hosts(ranks, size):
    for result in ranks(size, _topology):
        assert result.hosts == (tuple(range(size)),)
        assert result.hosts_source == ("handshake" if size > 1 else "assumed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "message"),
    quick(
        [
            ("killed", "AbsentError: rank 1 did not join: 1 of 2 ranks joined within 4 s; "),
            ("stopped", "the first rank on this host does not answer on its Unix"),
        ],
        lambda n: n == 0,
    ),
)
def test_a_rank_that_dies_or_hangs_in_the_handshake_is_an_error_within_the_limit(
    tmp_path, mode, message
):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = [started(tmp_path, n, 2, MODE=mode, TIMEOUT_S=4, **where) for n in range(2)]
    try:
        output = output_of(processes[0], LIMIT_S)
        assert (tmp_path / "0").exists(), output
        record = json.loads((tmp_path / "0").read_text())
        assert message in record["error"]
        assert 3.9 < record["seconds"] < 15
    finally:
        processes[1].kill()
        processes[1].communicate()


def find_all(
    size: int, store: dist.Store, timeout_s: float = 30.0, given: Topology | None = None
) -> list[Topology]:
    """Find the topology of all ranks, with one thread per rank."""
    with ThreadPoolExecutor(size) as pool:
        stores = [TimedStore(store, "here") for _ in range(size)]
        ranks = [
            pool.submit(find_topology, stores[rank], rank, size, "cpu", timeout_s, given)
            for rank in range(size)
        ]
        return [rank.result() for rank in ranks]


def test_many_ranks_query_one_leader():
    topologies = find_all(40, dist.HashStore())
    assert all(one == topologies[0] for one in topologies)
    assert topologies[0].hosts == (tuple(range(40)),)


def test_a_socket_without_the_token_is_not_trusted(monkeypatch):
    store = dist.HashStore()
    store.set("host secret", "0123456789abcdef" * 2)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind("\0sbpflow/0123456789abcdef")
        stranger.listen()

        def answer() -> None:
            while True:
                try:
                    peer, _ = stranger.accept()
                except OSError:
                    return
                peer.sendall(b"fedcba9876543210 0")
                peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(AbsentError, match="does not answer on its Unix socket"):
            find_all(2, store, timeout_s=1.0)
        stranger.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_without_abstract_sockets_the_launcher_is_trusted_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(hosts, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.7")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for topology in find_all(4, dist.HashStore()):
        assert topology.hosts == ((0, 1), (2, 3))
        assert topology.hosts_source == "assumed"
    warning = "ranks 2..3 are assumed to share a host because of LOCAL_WORLD_SIZE or MASTER_ADDR"
    assert sum(warning in message for message in caplog.messages) == 1
    given = Topology.one_host(4)
    assert find_all(4, dist.HashStore(), given=given) == [given] * 4
    for value, shown in (("3", "3"), (None, "unset")):
        if value is None:
            monkeypatch.delenv("LOCAL_WORLD_SIZE")
        else:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
        with pytest.raises(ConfigError, match=f"LOCAL_WORLD_SIZE={shown} .*which of the 4 ranks"):
            find_all(4, dist.HashStore(), timeout_s=1.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert find_all(4, dist.HashStore())[0].hosts == ((0, 1, 2, 3),)


def test_ranks_of_a_given_host_must_share_a_namespace(monkeypatch):
    @contextmanager
    def leader(secret: str, rank: int, end: float) -> Iterator[int]:
        yield rank - rank % 2  # two ranks in each of two namespaces

    monkeypatch.setattr(hosts, "_leader", leader)
    for listed in (((0, 1), (2, 3)), ((0,), (1,), (2, 3))):
        given = Topology(hosts=listed)
        assert find_all(4, dist.HashStore(), given=given) == [given] * 4
    message = r"ranks \[0, 1, 2, 3\] are listed as one host, but \[0, 1\] and \[2, 3\] are in"
    with pytest.raises(ConfigError, match=message):
        find_all(4, dist.HashStore(), given=Topology.one_host(4))


def test_a_topology_knows_the_hosts_of_ranks():
    slow = Link(gb_per_s=0.1, source="measured")
    one = Topology(hosts=((3, 1), (0, 2, 4)), network_link=slow)
    assert one.hosts == ((0, 2, 4), (1, 3))
    assert (one.size, one.ranks_per_host, one.most_ranks_per_host) == (5, None, 3)
    assert [one.host_of(rank) for rank in range(5)] == [0, 1, 0, 1, 0]
    assert one.same_host(1, 3)
    assert one.same_host(4)
    assert not one.same_host(0, 2, 3)
    assert one.link((0, 4)) == Link()
    assert one.link((0, 1)) == slow
    assert replace(one, network_link=Link(gb_per_s=9.0)).link((0, 1)) == Link()
    assert one.with_link(0.5).network_link == Link(gb_per_s=0.5, source="given")
    assert Topology.one_host(3).with_link(0.5).host_link == Link(gb_per_s=0.5, source="given")
    assert Topology(hosts=((0, 1), (2, 3))).ranks_per_host == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hosts": ()}, r"each host needs at least one rank.* got \[\]"),
        ({"hosts": ((0,), ())}, r"each host needs .* got \[\[0\], \[\]\]"),
        ({"hosts": ((0, 1), (1,))}, "must be on exactly one host"),
        ({"hosts": ((0, 2),)}, "must be on exactly one host"),
        (
            {"memory_bytes": (1,)},
            r"memory must have a number above 0 for each of the 2 .* got \[1\]",
        ),
        (
            {"speeds": (1.0, 0.0)},
            r"speed must have a number from 0.001 to 1000 .* got \[1.0, 0.0\]",
        ),
        (
            {"network_link": Link(gb_per_s=0.0)},
            "network_link.gb_per_s must be above 0 .* got 0.0 and 0.25",
        ),
    ],
)
def test_an_invalid_topology_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Topology(**{"hosts": ((0, 1),), **wrong})


DESCRIBED = """
hosts: 2
ranks_per_host: 2
memory_gb: [64, 64, 32, 32]
speed: 1.5
host_link: {gb_per_s: 8, source: measured}
network_link: {gb_per_s: 0.125, latency_ms: 0.4}
"""


def test_a_file_describes_other_machines(tmp_path):
    file = tmp_path / "hosts.yaml"
    file.write_text(DESCRIBED)
    topology = read_topology(file, world_size=4)
    assert topology == Topology(
        hosts=((0, 1), (2, 3)),
        hosts_source="given",
        memory_bytes=(64 * 10**9, 64 * 10**9, 32 * 10**9, 32 * 10**9),
        memory_source="given",
        speeds=(1.5,) * 4,
        host_link=Link(gb_per_s=8.0, source="measured"),
        network_link=Link(gb_per_s=0.125, latency_ms=0.4, source="given"),
    )
    file.write_text("hosts: [[0, 2], [1, 3]]")
    assert read_topology(file, world_size=4).hosts == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts is not given; use, for example, hosts:"),
        ("hosts: 2", "hosts and ranks_per_host: give either lists of ranks, such as"),
        ("{hosts: 0, ranks_per_host: 2}", "hosts and ranks_per_host: give either lists of ranks"),
        ("{hosts: [[0, 1]], ranks_per_host: 2}", "hosts and ranks_per_host: give either lists"),
        ("{hosts: 1000000000000, ranks_per_host: 9}", "describes 9000000000000 ranks, but this"),
        ("hosts: [[0, 1, 2]]", "describes 3 ranks, but this run has 4; describe 4 ranks, or"),
        ("hosts: [[0, 1], [1, 2]]", "must be on exactly one host"),
        (
            "{hosts: [[0, 1, 2, 3]], memory_gb: [1, 2]}",
            r"memory_gb must .* for each of the 4 ranks .*, got \[1.0, 2.0\]",
        ),
        ("{hosts: [[0, 1, 2, 3]], memory_gb: 1e300}", "memory_gb must be > 0 and <= 1e\\+06"),
        ("{hosts: [[0, 1, 2, 3]], memory_gb: [1, 0, 1, 1]}", "memory_gb.* must be > 0 and"),
        ("{hosts: [[0, 1, 2, 3]], speed: 0}", "speed must have a number from 0.001 to 1000"),
        ("{hosts: [[0, 1, 2, 3]], network_link: {}}", "network_link.gb_per_s is not given"),
        ("{hosts: [[0, 1, 2, 3]], link: 1}", "link: unknown key; did you mean"),
        ("{hosts: [[0, 1, 2, 3]], host_link: {gb_per_s: 1, source: guess}}",
         "host_link.source: 'guess' is not one of measured, given, assumed"),
    ],
)  # fmt: skip
def test_an_invalid_topology_file_is_refused_by_its_key(tmp_path, text, message):
    file = tmp_path / "hosts.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"^parallel\.topology: .*hosts\.yaml: .*{message}"):
        read_topology(file, world_size=4)


def test_explain_shows_hosts_and_which_values_are_assumed(tmp_path):
    file = tmp_path / "hosts.yaml"
    file.write_text(DESCRIBED)
    config = make_config("auto", "rowwise_adagrad", dtype="float32", dim=8)
    _, usual = plan_run(config, FIELDS, world_size=4, device_type="cpu")
    lines = format_plan(usual).splitlines()
    assert lines[1:3] == [
        "1 host of 4 ranks (assumed): [0, 1, 2, 3]",
        "links: on a host 2 GB/s, 0.25 ms per call (assumed)",
    ]
    assert lines[3].endswith("GB (measured); relative speed of each rank: 1 (assumed)")
    config = replace(config, parallel=replace(config.parallel, topology=file))
    _, plan = plan_run(config, FIELDS, world_size=4, device_type="cpu")
    assert format_plan(plan).splitlines()[1:4] == [
        "2 hosts of 2 ranks (given): [0, 1] [2, 3]",
        "links: on a host 8 GB/s, 0.25 ms per call (measured); between hosts 0.125 GB/s, 0.4 ms "
        "per call (given)",
        "memory of each rank: 64, 64, 32, 32 GB (given); relative speed of each rank: 1.5 (given)",
    ]
    assert describe(plan)["topology"]["hosts"] == ((0, 1), (2, 3))
    assert plan_from_json(plan_to_json(plan)) == plan
    file.write_text(DESCRIBED.replace("speed: 1.5", "speed: 1"))
    _, slower = plan_run(config, FIELDS, world_size=4, device_type="cpu")
    assert slower.priced[0].ms > max(plan.priced[0].ms, usual.priced[0].ms)
    faster = replace(config, parallel=replace(config.parallel, link_gb_per_s=1.0))
    _, plan = plan_run(faster, FIELDS, world_size=4, device_type="cpu")
    assert plan.topology.network_link == Link(gb_per_s=1.0, latency_ms=0.4, source="given")


def test_a_plan_file_without_a_topology_is_read(tmp_path):
    config = make_config("1", "sgd")
    _, plan = plan_run(config, FIELDS, world_size=2, device_type="cpu")
    content = json.loads(plan_to_json(plan))
    del content["plan"]["topology"]
    content["sha256"] = json_digest(content["plan"])
    assert plan_from_json(json.dumps(content)) == replace(plan, topology=Topology.one_host(2))

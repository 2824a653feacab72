"""Tests machines whose own name resolves to a loopback address, as in Debian's /etc/hosts."""

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbpflow.errors import ConfigError
from sbpflow.runtime.processes import store
from sbpflow.runtime.ranks import interfaces
from sbpflow.runtime.ranks.topology import Topology
from tests.launch.machines import Machine, ip, needs_namespaces, two_machines, wait_for_ranks


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines that map their own name to 127.0.1.1, without GLOO_SOCKET_IFNAME."""
    with two_machines() as both:
        folders = [Path("/etc/netns") / machine.name for machine in both]
        for folder in folders:  # `ip netns exec` mounts these files
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"
            )
        try:
            yield both
        finally:
            for folder in folders:
                shutil.rmtree(folder)


@needs_namespaces
@pytest.mark.slow
def test_gloo_uses_the_interface_that_leads_to_the_other_machine(machines, tmp_path):
    for machine in machines:
        machine.interface_for_gloo = ""
        machine.start("train", tmp_path, TIMEOUT_S="20")
    assert len(wait_for_ranks(tmp_path)) == 2
    machines[0].terminate()
    text = "".join(machine.output(60) for machine in machines)
    assert "stopped by SIGTERM" in text, "the ranks had connected"


@needs_namespaces
@pytest.mark.slow
def test_a_published_name_that_resolves_to_this_machine_is_explained(machines, tmp_path):
    for machine in machines:
        machine.interface_for_gloo, machine.local_addr = "", False
        machine.start("train", tmp_path, TIMEOUT_S="20")
    text = "".join(machine.output(120) for machine in machines)
    assert "torchrun on rank 0's machine published the name" in text
    assert "start torchrun on every machine with --local-addr" in text


def test_a_loopback_name_is_explained_only_away_from_rank_0(monkeypatch):
    monkeypatch.setenv("GROUP_RANK", "1")
    assert "published the name localhost" in store._misled("localhost", 29400)
    assert store._misled("10.0.0.1", 29400) == ""
    monkeypatch.setenv("GROUP_RANK", "0")
    assert store._misled("localhost", 29400) == ""


class Texts:
    """Stands in for a store; ``addresses`` has the address of every rank."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses


@pytest.fixture
def two_hosts(monkeypatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(interfaces, "gather", lambda store, *words: store.addresses)
    monkeypatch.setattr(interfaces, "own_addresses", lambda: ["127.0.1.1"])
    routes = {"head": "", "10.7.0.2": "10.7.0.1"}
    monkeypatch.setattr(interfaces, "source_address", lambda target: routes[target])
    monkeypatch.setattr(interfaces, "interface_of", {"": "", "10.7.0.1": "eth7"}.get)
    yield monkeypatch
    os.environ.pop("GLOO_SOCKET_IFNAME", None)


TWO = Topology(hosts=((0,), (1,)), hosts_source="handshake", memory_bytes=None)


def test_rank_0s_machine_uses_the_route_to_another_host(two_hosts):
    interfaces.choose_interface(Texts(["", "10.7.0.2"]), 0, TWO, 5.0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_valid_name_and_a_given_interface_are_not_changed(two_hosts):
    two_hosts.setattr(interfaces, "own_addresses", lambda: ["10.7.0.1"])
    interfaces.choose_interface(Texts(["", "10.7.0.2"]), 0, TWO, 5.0)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    two_hosts.setenv("GLOO_SOCKET_IFNAME", "eth1")
    two_hosts.setattr(interfaces, "own_addresses", list)
    interfaces.choose_interface(Texts(["", "10.7.0.2"]), 0, TWO, 5.0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


def test_without_a_route_the_message_says_what_to_set(two_hosts):
    with pytest.raises(ConfigError, match=r"resolves to 127\.0\.1\.1.*GLOO_SOCKET_IFNAME=eth0"):
        interfaces.choose_interface(Texts(["", ""]), 0, TWO, 5.0)


def test_a_file_may_describe_several_hosts_for_ranks_of_one_machine(two_hosts):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        two_hosts.setenv(name, "2")
    interfaces.choose_interface(Texts(["", ""]), 0, TWO, 5.0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == socket.if_indextoname(1)


def test_interfaces_are_found_by_address():
    name = socket.if_indextoname(1)
    assert interfaces.interface_of("127.0.0.1") == name
    assert interfaces.interface_of("192.0.2.1") == ""
    assert interfaces.mtu_of(name) == int(Path(f"/sys/class/net/{name}/mtu").read_text())
    assert interfaces.mtu_of("none") is None
    assert interfaces.source_address("127.0.0.1") == ""


@needs_namespaces
@pytest.mark.slow
def test_doctor_names_what_differs_between_machines(machines, tmp_path):
    ip("-n", machines[1].name, "link", "set", machines[1].interface, "mtu", "1400")
    machines[1].slow_down("20mbit")  # limits only what the second machine sends
    for machine in machines:
        machine.interface_for_gloo = ""
        machine.run(["-m", "sbpflow", "doctor", "--dir", str(tmp_path)])
    outputs = [machine.output(200) for machine in machines]
    text = "".join(outputs)
    names = [f"{socket.gethostname()} (node {number})" for number in range(2)]
    lines = [line for line in text.splitlines() if line.startswith("ODD")]
    by_check = dict(line.removeprefix("ODD").split(maxsplit=1) for line in lines)
    assert {"names", "mtu", "link"} <= set(by_check), text
    assert sum(f"{name} resolves its own name" in by_check["names"] for name in names) == 2
    assert "1400" in by_check["mtu"]
    assert "1500" in by_check["mtu"]
    assert " is slow: it has 0.00" in by_check["link"], "about 0.0025 GB/s"
    assert "ok     pair" in text
    assert "nothing is broken" in text

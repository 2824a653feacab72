"""Tests how the doctor compares machines and links: each problem is reported with its machine."""

import itertools
import time
from dataclasses import replace

import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.run.execution import link_checks, node_checks
from sbpflow.run.execution.link_checks import Measured, rounds_between, rounds_within, slow_findings

FACTS = {
    "versions": "python 3.11.7; torch 2.13.0",
    "own name": "m",
    "own addresses": "10.0.0.1",
    "main addresses": "10.0.0.9",
    "interface": "eth0",
    "mtu": "1500",
    "rate": "100.0",
}


def facts(**changes):
    """Return facts about 4 ranks on the machines a and b, with changes for b."""
    return [
        {**FACTS, **(changes if host == "b" else {}), "host": host} for host in ("a", "a", "b", "b")
    ]


def links(slow=None, *, hosts="abcd", directed=False):
    """Return links of 1 GB/s, except for slower links of the host or pair ``slow``."""
    pairs = [(x, y) for x in hosts for y in hosts if x != y]
    is_slow = (lambda pair: pair == slow) if directed else (lambda pair: slow in pair)
    return {pair: Measured(0.1 if slow and is_slow(pair) else 1.0, 1e-4) for pair in pairs}


def test_rounds_cover_every_pair_of_hosts_once_in_each_direction():
    for count in range(2, 9):
        leaders = [3 * number for number in range(count)]
        rounds = list(rounds_between(leaders))
        pairs = [pair for each in rounds for pair in each]
        assert sorted(pairs) == sorted((a, b) for a in leaders for b in leaders if a != b)
        assert all(
            len({rank for pair in each for rank in pair}) == 2 * len(each) for each in rounds
        )
    within = list(rounds_within([(0, 2, 4), (1,), (3, 5)]))
    assert within == [[(0, 2), (3, 5)], [(2, 4), (5, 3)], [(4, 0)]]


def test_a_slow_host_is_named_once_and_not_all_of_its_links():
    assert slow_findings(links()) == []
    (found,) = slow_findings(links("c"))
    assert found.state == "odd"
    assert found.text.startswith(
        "c is slow: at most 0.100 GB/s to or from it, but usually 1.000 GB/s between other machines"
    )


def test_a_slow_direction_of_a_link_is_named():
    (found,) = slow_findings(links(("b", "d"), directed=True))
    assert found.text.startswith(
        "the link from b to d is slow: it has 0.100 GB/s, while other links have 1.000 GB/s"
    )
    (found,) = slow_findings(links(("a", "b"), hosts="ab", directed=True))
    assert found.text.startswith(
        "the link from a to b is slow: it has 0.100 GB/s, while other links have 1.000 GB/s"
    )


@pytest.mark.parametrize(("end", "direction"), [(0, "from"), (1, "to")])
def test_a_host_that_is_slow_in_one_direction_is_named_once(end, direction):
    for hosts in ("abc", "abcd"):
        measured = {
            pair: replace(link, gb_per_s=0.1) if pair[end] == "b" else link
            for pair, link in links(hosts=hosts).items()
        }
        (found,) = slow_findings(measured)
        assert found.text.startswith(
            f"b is slow: at most 0.100 GB/s {direction} it, but usually 1.000 GB/s between"
        )


def test_a_host_that_answers_late_is_named():
    measured = {
        pair: replace(link, latency_s=5e-3 if "d" in pair else 1e-4)
        for pair, link in links().items()
    }
    (found,) = slow_findings(measured)
    assert found.text.startswith(
        "d has a high latency: at least 5.00 ms for 4 KiB, but usually 0.10 ms between"
    )


def test_equal_machines_are_ok():
    same = facts()
    checks = [
        node_checks.versions_finding(same),
        node_checks.names_finding(same, "main"),
        node_checks.mtu_finding(same),
        node_checks.clocks_finding(same, [0.0, 0.0, 0.002, 0.002]),
        node_checks.compute_finding(same),
    ]
    assert [check.state for check in checks] == ["ok"] * 5, checks
    assert checks[3].text == "within 2.0 ms of each other"


def test_each_difference_names_the_machine():
    found = node_checks.versions_finding(facts(versions="python 3.12.1; torch 2.13.0"))
    assert found.text == "b has python 3.12.1; other machines have python 3.11.7"
    found = node_checks.mtu_finding(facts(mtu="9000"))
    assert found.text.startswith("b has 9000 on eth0, but other machines have 1500; ")
    found = node_checks.clocks_finding(facts(), [0.0, 0.0, 42.0, 42.0])
    assert found.text.startswith("b is 42.0 s ahead; ")
    found = node_checks.compute_finding(facts(rate="50.0"))
    assert found.text.startswith("rank 2 on b (50.0 GFLOP/s), rank 3 on b (50.0 GFLOP/s), usual ")
    three = [*facts(), {**FACTS, "host": "c", "rate": "20.0"}]
    found = node_checks.compute_finding(three)
    assert found.text.startswith("rank 4 on c (20.0 GFLOP/s), usual rate 100.0 GFLOP/s; ")


def _with_a_cpu_limit(world):
    """Return the findings if rank 1 is stopped before every fourth product, each time for 8 times
    as long as it has run since the last stop, so the busiest test machine cannot hide the limit.
    """
    product, calls, resumed = torch.mm, itertools.count(), time.perf_counter()

    def limited(*matrices):
        nonlocal resumed
        if world.rank == 1 and next(calls) % 4 == 0:
            time.sleep(8 * (time.perf_counter() - resumed))
            resumed = time.perf_counter()
        return product(*matrices)

    torch.mm = limited
    try:
        return node_checks.node_findings(Boxing(world))
    finally:
        torch.mm = product


def test_a_rank_that_a_cpu_limit_stops_for_short_times_is_slow(ranks):
    found, *_ = ranks(3, _with_a_cpu_limit)
    (compute,) = [each for each in found if each.name == "compute"]
    assert compute.text.startswith("rank 1 on "), compute.text


def test_names_that_lead_to_another_address_are_named():
    found = node_checks.names_finding(facts(**{"own addresses": "127.0.1.1"}), "main")
    assert found.state == "odd"
    assert found.text.startswith("b resolves its own name m to 127.0.1.1, so sbpflow uses the")
    found = node_checks.names_finding(facts(**{"main addresses": "10.9.9.9"}), "main")
    assert "MASTER_ADDR main is 10.0.0.9 on a, 10.9.9.9 on b" in found.text
    # a loopback address is normal on rank 0's own machine
    found = node_checks.names_finding(facts(**{"main addresses": "127.0.1.1"}), "main")
    assert found.state == "ok"


def _two_hosts(world):
    """Measure the ranks of one machine as if they were on two hosts."""
    real = world.topology
    world.topology = replace(real, hosts=((0, 1), (2, 3)))
    try:
        names = ["a", "a", "b", "b"]
        found = link_checks.link_findings(Boxing(world), names, sizes=(1 << 10, 1 << 14))
        return found, node_checks.node_findings(Boxing(world))
    finally:
        world.topology = real


def test_all_ranks_measure_the_links_of_two_hosts_and_agree(ranks):
    (found, facts_found), *others = ranks(4, _two_hosts)
    assert [other[0] for other in others] == [found] * 3
    assert found[0].text.startswith("4 ranks on 2 machines: ")
    pair = found[1]
    assert (pair.name, pair.text.count(" GB/s, ")) == ("pair", 2)
    assert pair.text.startswith("a to b: ")
    assert {"versions", "compute", "names", "mtu", "clocks"} == {each.name for each in facts_found}


def _one_host(world):
    return link_checks.link_findings(Boxing(world), ["m"] * world.size, sizes=(1 << 10, 1 << 14))


def test_the_ranks_of_one_host_are_measured_in_a_ring(ranks):
    ((found,), (other,)) = ranks(2, _one_host)
    assert found == other
    assert found.text.startswith("2 ranks on 1 machine: ")
    assert float(found.text.split(" GB/s")[0].split()[-1]) > 0
    ((alone,),) = ranks(1, _one_host)
    assert alone.state == "absent"
    assert "torchrun" in alone.text

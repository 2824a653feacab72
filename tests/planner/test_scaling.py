"""Tests profiles of other machines: link costs as ranks are added, and which figures are reported
as assumed.
"""

import json

import numpy as np
import pytest

from sbpflow.costs.counts import INDEX
from sbpflow.errors import ConfigError
from sbpflow.planner.__main__ import main
from sbpflow.planner.clusters import MACHINES, crowded, described, link_of, with_link
from sbpflow.planner.costs.profile import Link, Profile
from sbpflow.planner.plan_command import clusters

TABLES = {
    "batch_size": 4096,
    "tables": [
        {"name": f"C{n}", "rows": 10_000 * (n + 1), "dim": 64, "ids_per_sample": 1 + 9 * (n == 2),
         "zipf": {"s": 1.1, "q": 2.0}}
        for n in range(5)
    ],
}  # fmt: skip


@pytest.fixture
def tables(tmp_path):
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(TABLES))
    return str(path)


def rows_of(text):
    return [line.split() for line in text.splitlines() if line.split()[0].isdigit()]


def test_the_share_of_communication_grows_with_nodes(tables):
    text = clusters(
        ["--tables", tables, "--profile", "h100-dgx", "--ranks", "32", "8", "--planner", "dim"]
    )
    eight, many = rows_of(text)
    assert (eight[0], many[0]) == ("8", "32")
    assert 0 < int(eight[3].rstrip("%")) < int(many[3].rstrip("%")) < 100
    assert "transfers: assumed" in text
    assert "data sheets" in text


def test_weak_scaling_keeps_the_samples_of_each_rank(tables):
    words = ["--tables", tables, "--profile", "h100-dgx", "--ranks", "8", "32", "--planner", "dim"]
    strong, weak = (rows_of(clusters([*words, *more])) for more in ([], ["--weak"]))
    assert strong[0] == weak[0]
    assert float(weak[1][1]) > float(strong[1][1])


def test_bytes_to_other_nodes_cost_their_share_of_the_slower_link():
    link = Link(
        ranks_per_node=4,
        within_gb_per_s=100.0,
        between_gb_per_s=10.0,
        within_call_ms=0.01,
        between_call_ms=0.02,
    )
    assert link.byte_ms(4) == pytest.approx(1e-8)
    # 4 of the 7 other ranks are on another node
    assert link.byte_ms(8) == pytest.approx(1e-7 * 4 / 7)
    assert link.call_ms(4) == pytest.approx(0.03)
    assert link.call_ms(8) == pytest.approx(0.14)


def measured(**changes):
    given = {"work_ms": {"step_rows": 1e-4, "always": 1.0}, "world_size": 2, "backend": "gloo"}
    link = Link(within_gb_per_s=2.0, within_call_ms=0.5)
    return Profile(**{"link": link, "sources": {"work": "measured"}, **given, **changes})


def test_another_link_changes_only_transfers_and_is_reported_as_assumed():
    link = MACHINES["h100-dgx"].link
    moved = with_link(measured(), link, "links of h100-dgx")
    prices = moved.prices(16)
    assert prices[INDEX["step_rows"], 0] == 1e-4
    assert prices[INDEX["vector_bytes"], 2] == pytest.approx(link.byte_ms(16))
    assert moved.sources == {"work": "measured", "transfers": "assumed: links of h100-dgx"}
    assert described("a100-dgx").sources["work"].startswith("assumed, nothing measured")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks must be 1 or more, got 0"),
        (["--link", "token-ring"], "--link must be one of h100-dgx"),
        (["--ranks-per-node", "0", "--link", "1gbit"], "--ranks-per-node must be 1 or more, got 0"),
        (["--ranks-per-node", "4"], "--ranks-per-node 4 .*--link 25gbit"),
        (["--ranks-per-node", "4", "--link", "a100-dgx"], "a node of a100-dgx has 8 ranks"),
        (["--link", "0gbit"], "--link must be one of h100-dgx.* got '0gbit'"),
        (["--planner", "nobody"], "nobody"),
    ],
)
def test_a_wrong_argument_of_clusters_is_named(tables, words, message):
    with pytest.raises(ConfigError, match=message):
        clusters(["--tables", tables, "--profile", "h100-dgx", *words])


def test_an_unknown_command_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["planner", "guess"])
    with pytest.raises(ConfigError, match="unknown command 'guess'; use one of calibrate, "):
        main()


def test_ethernet_is_shared_by_the_ranks_of_a_node():
    alone, source = link_of("25gbit")
    assert "25gbit" in source
    # All of the 1 MB leaves the node, at 94 % of 25 Gbit/s.
    assert alone.byte_ms(4) * 1e6 == pytest.approx(8e-3 / 25 / 0.94 * 1e3)
    shared, _ = link_of("25gbit", 4)
    assert link_of("25000mbit")[0] == alone
    assert shared.between_gb_per_s == pytest.approx(alone.between_gb_per_s / 4)
    with pytest.raises(ConfigError, match="--link must be one of h100-dgx, a100-dgx, or"):
        link_of("infiniband")


def test_ranks_beyond_the_cores_take_turns(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    profile = measured()
    assert crowded(profile, 2) is profile
    assert crowded(profile, 1) is profile
    np.testing.assert_allclose(crowded(profile, 6).prices(2), 3 * profile.prices(2))
    many = measured(world_size=8, about={"ranks on a machine": "4"})
    np.testing.assert_allclose(crowded(many, 2).prices(2), profile.prices(2) / 2)
    cuda = measured(backend="nccl")
    assert crowded(cuda, 6) is cuda

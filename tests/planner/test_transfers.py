"""Transfers alone: timed with the bytes that travel, kept, and used by a fit."""

import json
from dataclasses import asdict, replace

import pytest

from sbpflow.boxing.executor import Boxing
from sbpflow.costs.counts import INDEX
from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.calibrate import Journal
from sbpflow.planner.calibration.fit import fit
from sbpflow.planner.calibration.records import empty_profile
from sbpflow.planner.calibration.time_transfers import time_transfers
from sbpflow.planner.costs.profile import load
from sbpflow.planner.costs.simulate import PHASE, REST
from sbpflow.planner.costs.transfers import (
    EVEN,
    ONE_RECEIVES,
    ONE_SENDS,
    ROWS,
    SKEWS,
    Transfer,
    as_lines,
    examples,
    ms_per_byte,
    transfer_of,
)
from tests.planner.test_calibrate import made_records

SIZES = (4096, 16384)
NUM_SKEWS = sum(len(skews) for skews in SKEWS.values())


def timed(world, seconds, turns):
    """What was found, and {(transfer, bytes this rank sent)} as the log of the world has it."""
    world.log.clear()
    found = time_transfers(Boxing(world), seconds=seconds, sizes=SIZES, turns=turns)
    sent = {(r.step_id, r.bytes_sent) for r in world.log.records if "planner/" in r.step_id}
    world.log.clear()
    return found, sent, world.on_wait is None


def test_every_transfer_is_timed_alone_and_its_bytes_are_those_that_travel(ranks):
    results = ranks(2, timed, 60.0, 2)
    found = results[0][0]
    assert results[1][0] == found
    assert len(found) == len(SIZES) * NUM_SKEWS
    assert {(one.name, one.skew) for one in found} == {
        (name, skew) for name, skews in SKEWS.items() for skew in skews
    }
    for rank, (_, sent, let_go) in enumerate(results):
        assert let_go
        for one in found:
            assert (f"planner/{one.name}", one.sent_bytes[rank]) in sent
    for one in found:
        assert one.ms > 0
        assert min(abs(one.most_bytes - size) / size for size in SIZES) < 0.15
        first, other = one.sent_bytes
        if one.skew == ONE_SENDS:
            assert first == one.most_bytes == max(one.received_bytes[1:]) > 3.5 * other
        elif one.skew == ONE_RECEIVES:
            assert other == one.most_bytes == one.received_bytes[0] > 3.5 * first
        else:
            assert first == other == one.most_bytes
            assert one.received_bytes == one.sent_bytes


def test_of_four_ranks_a_half_is_timed_too_and_no_time_means_the_first_size_once(ranks):
    found = ranks(4, timed, 0.0, 7)[2][0]
    halves = [one for one in found if one.ranks == (0, 1)]
    whole = [one for one in found if one.ranks == (0, 1, 2, 3)]
    assert {one.name for one in halves} == {name for name in SKEWS if "->" in name}
    assert len(whole) == NUM_SKEWS
    assert len(found) == len(halves) + len(whole)
    assert all(abs(one.most_bytes / SIZES[0] - 1) < 0.2 for one in found)


def test_one_rank_sends_nothing(ranks):
    assert ranks(1, timed, 60.0, 1)[0][0] == []


def test_a_journal_keeps_transfers_of_the_same_machine(tmp_path):
    path = tmp_path / "measured.jsonl"
    Journal(path, {"cpu": "one"}).add_transfers([made(ROWS, EVEN, 100)])
    assert Journal(path, {"cpu": "one"}).transfers == [made(ROWS, EVEN, 100)]
    assert not Journal(path, {"cpu": "one"}).entries
    assert Journal(path, {"cpu": "other"}).transfers is None
    (line,) = path.read_text().splitlines()
    tree = json.loads(line)["transfers"][0]
    assert transfer_of(tree) == made(ROWS, EVEN, 100)
    with pytest.raises(ConfigError, match="skew: not given"):
        transfer_of({key: value for key, value in tree.items() if key != "skew"})


CALL_MS, BYTE_MS = 0.2, 3e-6


def made(name, skew, count, ranks=(0, 1)):
    """Of a machine on which a call takes 0.2 ms and a byte 3 ns."""
    return Transfer(
        name=name,
        skew=skew,
        ranks=ranks,
        sent_bytes=(count, *(count // (4 if skew == ONE_SENDS else 1) for _ in ranks[1:])),
        received_bytes=(count,) * len(ranks),
        ms=CALL_MS + BYTE_MS * count,
    )


def test_a_transfer_is_an_example_of_the_phases_that_make_it():
    transfers = [made(ROWS, skew, 800) for skew in SKEWS[ROWS]]
    x, ms = examples(transfers, "vectors", 2)
    assert x.shape == (2, len(INDEX))  # even, and one owner of most rows
    assert x[:, INDEX["num_row_transfers"]].tolist() == [1.0, 1.0]
    assert x[:, INDEX["vector_bytes"]].tolist() == [800.0, 800.0]
    assert ms.tolist() == [transfers[0].ms] * 2
    assert len(examples(transfers, "row gradients", 2)[1]) == 2
    assert len(examples(transfers, "lookup", 2)[1]) == 0
    assert len(examples(transfers, "vectors", 4)[1]) == 0  # of half of the ranks
    # Each of 1000 numbers passes once to add and once to spread, all but a quarter of the time.
    summed = [made("P -> B", EVEN, 6000, (0, 1, 2, 3))]
    row = examples(summed, "dense gradients", 4)[0][0]
    assert row[INDEX["dense_parameters"]] == pytest.approx(1000.0)
    assert row[INDEX["always"]] == 1.0


def test_a_table_tells_the_calls_and_the_speed():
    lines = as_lines([made(ROWS, EVEN, 4096), made(ROWS, EVEN, 2**20)])
    assert len(lines) == 2
    assert lines[1].split() == ["rows", "even", "2", "4.0Ki", "0.212", "1.0Mi", "3.346", "0.313"]
    assert as_lines([]) == []


def test_a_fit_takes_bytes_beyond_those_of_the_plans_from_transfers():
    """The plans carry so little that a fit of them alone takes bytes to be free."""
    records = made_records(0.0, samples=3)
    place, counts = PHASE["vectors"], ("num_dense_groups", "num_summed_groups", "num_row_transfers")
    calls = [INDEX[name] for name in counts]
    for one in records:
        one.totals[:, [INDEX["vector_bytes"], INDEX["vector_in_bytes"]]] *= 1e-4
        one.phases[:, place] = 0.2 * one.totals[:, calls].sum(1)
    names = ("S(1) -> S(0)", "P -> S(0)", ROWS)
    sizes, all_ranks = (2**17, 2**20, 2**23), tuple(range(records[0].totals.shape[0]))
    transfers = [made(name, EVEN, count, all_ranks) for name in names for count in sizes]
    asked = made(ROWS, EVEN, 2**24, all_ranks)

    def error(given):
        profile = fit(records, backend="gloo", transfers=given, judged=False)
        assert profile.transfers == tuple(given)
        x, _ = examples([asked], "vectors", len(all_ranks))
        return float((x @ profile.matrix[:, place])[0]) / asked.ms - 1.0

    assert error([]) < -0.9
    assert abs(error(transfers)) < 0.1


def test_what_steps_take_beyond_their_moves_has_one_price_for_all_bytes():
    records, price = made_records(0.0, samples=3), 4e-7  # ms a byte
    names = ("vector_bytes", "gradient_bytes")
    ids = [INDEX[name] for name in names]
    slower = [
        replace(one, step_ms=one.step_ms + price * float(one.totals.max(0)[ids].sum()))
        for one in records
    ]
    transfers = [made("S(1) -> S(0)", EVEN, 2**20, tuple(range(len(records[0].totals))))]
    assert ms_per_byte(transfers) > 2 * price  # the bound is further away

    def prices(measured):
        profile = fit(measured, backend="gloo", transfers=transfers, judged=False)
        return profile.matrix[ids, PHASE[REST]]

    before, after = prices(records), prices(slower)
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert after[0] - before[0] == pytest.approx(price, rel=0.5)


def test_a_profile_keeps_its_transfers(tmp_path):
    profile = replace(empty_profile(2, "gloo"), transfers=(made(ROWS, ONE_SENDS, 64),))
    profile.save(tmp_path / "profile.json")
    assert load(tmp_path / "profile.json").transfers == profile.transfers
    assert asdict(profile)["transfers"][0]["skew"] == ONE_SENDS


def test_a_profile_of_other_counts_says_which(tmp_path):
    path = tmp_path / "profile.json"
    empty_profile(2, "gloo").save(path)
    path.write_text(path.read_text().replace('"dense_elements"', '"dense_things"'))
    with pytest.raises(ConfigError, match=r"other counts: dense_elements, dense_things.*calibrate"):
        load(path)


def test_a_byte_costs_what_it_does_in_the_usual_large_transfer_of_all_ranks():
    def one(name, ranks, count, ms):
        return Transfer(
            name=name,
            skew="even",
            ranks=ranks,
            sent_bytes=(count,) * len(ranks),
            received_bytes=(count,) * len(ranks),
            ms=ms,
        )

    both = (0, 1)
    timed = [
        one("S(0) -> B", both, 100, 9.0),  # its largest counts
        one("S(0) -> B", both, 1000, 3.0),
        one("P -> B", both, 1000, 2.0),
        one("rows", both, 1000, 50.0),
        one("rows to all", (0,), 1000, 70.0),
    ]
    assert ms_per_byte(timed) == pytest.approx(3e-3)
    assert ms_per_byte([]) == 0.0

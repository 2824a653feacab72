"""Tests transfers alone: timed with the transferred bytes, stored, and used by a fit."""

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
from tests.planner.test_calibrate import synthetic_records

SIZES = (4096, 16384)
NUM_SKEWS = sum(len(skews) for skews in SKEWS.values())


def timed(world, seconds, turns):
    """Return (transfers, logged {(step, bytes this rank sent)}, whether the hook is removed)."""
    world.log.clear()
    transfers = time_transfers(Boxing(world), seconds=seconds, sizes=SIZES, turns=turns)
    sent = {(r.step_id, r.bytes_sent) for r in world.log.records if "planner/" in r.step_id}
    world.log.clear()
    return transfers, sent, world.on_wait is None


def test_every_transfer_is_timed_alone_with_the_bytes_that_travel(ranks):
    results = ranks(2, timed, 60.0, 2)
    transfers = results[0][0]
    assert results[1][0] == transfers
    assert len(transfers) == len(SIZES) * NUM_SKEWS
    assert {(transfer.name, transfer.skew) for transfer in transfers} == {
        (name, skew) for name, skews in SKEWS.items() for skew in skews
    }
    for rank, (_, sent, hook_removed) in enumerate(results):
        assert hook_removed
        for transfer in transfers:
            assert (f"planner/{transfer.name}", transfer.sent_bytes[rank]) in sent
    for transfer in transfers:
        assert transfer.ms > 0
        most = transfer.most_bytes
        assert min(abs(most - size) / size for size in SIZES) < 0.15
        first, other = transfer.sent_bytes
        if transfer.skew == ONE_SENDS:
            assert first == most == max(transfer.received_bytes[1:]) > 3.5 * other
        elif transfer.skew == ONE_RECEIVES:
            assert other == most == transfer.received_bytes[0] > 3.5 * first
        else:
            assert first == other == most
            assert transfer.received_bytes == transfer.sent_bytes


def test_half_of_four_ranks_is_timed_too_and_without_time_only_the_first_size(ranks):
    transfers = ranks(4, timed, 0.0, 7)[2][0]
    halves = [transfer for transfer in transfers if transfer.ranks == (0, 1)]
    whole = [transfer for transfer in transfers if transfer.ranks == (0, 1, 2, 3)]
    assert {transfer.name for transfer in halves} == {name for name in SKEWS if "->" in name}
    assert len(whole) == NUM_SKEWS
    assert len(transfers) == len(halves) + len(whole)
    assert all(abs(transfer.most_bytes / SIZES[0] - 1) < 0.2 for transfer in transfers)


def test_one_rank_has_no_transfers(ranks):
    assert ranks(1, timed, 60.0, 1)[0][0] == []


def test_a_journal_has_only_transfers_of_the_same_machine(tmp_path):
    path = tmp_path / "measured.jsonl"
    Journal(path, {"cpu": "one"}).add_transfers([transfer(ROWS, EVEN, 100)])
    assert Journal(path, {"cpu": "one"}).transfers == [transfer(ROWS, EVEN, 100)]
    assert not Journal(path, {"cpu": "one"}).entries
    assert Journal(path, {"cpu": "other"}).transfers is None
    (line,) = path.read_text().splitlines()
    tree = json.loads(line)["transfers"][0]
    assert transfer_of(tree) == transfer(ROWS, EVEN, 100)
    with pytest.raises(ConfigError, match="skew: not given"):
        transfer_of({key: value for key, value in tree.items() if key != "skew"})


CALL_MS, BYTE_MS = 0.2, 3e-6


def transfer(name, skew, count, ranks=(0, 1)):
    """Return a transfer of a machine on which a call takes 0.2 ms and a byte takes 3 ns."""
    return Transfer(
        name=name,
        skew=skew,
        ranks=ranks,
        sent_bytes=(count, *(count // (4 if skew == ONE_SENDS else 1) for _ in ranks[1:])),
        received_bytes=(count,) * len(ranks),
        ms=CALL_MS + BYTE_MS * count,
    )


def test_a_transfer_is_an_example_of_its_phases():
    transfers = [transfer(ROWS, skew, 800) for skew in SKEWS[ROWS]]
    x, ms = examples(transfers, "vectors", 2)
    assert x.shape == (2, len(INDEX))  # rows are even, or one owner has most of them
    assert x[:, INDEX["num_row_transfers"]].tolist() == [1.0, 1.0]
    assert x[:, INDEX["vector_bytes"]].tolist() == [800.0, 800.0]
    assert ms.tolist() == [transfers[0].ms] * 2
    assert len(examples(transfers, "row gradients", 2)[1]) == 2
    assert len(examples(transfers, "lookup", 2)[1]) == 0
    assert len(examples(transfers, "vectors", 4)[1]) == 0  # this transfer is not between all ranks
    # In a ring of 4, a rank sends 3/4 of 1000 numbers to add, and again to distribute the sums.
    summed = [transfer("P -> B", EVEN, 6000, (0, 1, 2, 3))]
    row = examples(summed, "dense gradients", 4)[0][0]
    assert row[INDEX["dense_parameters"]] == pytest.approx(1000.0)
    assert row[INDEX["always"]] == 1.0


def test_the_table_has_calls_and_speed():
    lines = as_lines([transfer(ROWS, EVEN, 4096), transfer(ROWS, EVEN, 2**20)])
    assert len(lines) == 2
    assert lines[1].split() == ["rows", "even", "2", "4.0Ki", "0.212", "1.0Mi", "3.346", "0.313"]
    assert as_lines([]) == []


def test_a_fit_prices_bytes_by_transfers_alone():
    """The measured plans send so little that a fit to them alone prices bytes at 0."""
    records = synthetic_records(0.0, samples=3)
    place, counts = PHASE["vectors"], ("num_dense_groups", "num_summed_groups", "num_row_transfers")
    calls = [INDEX[name] for name in counts]
    for record in records:
        record.totals[:, [INDEX["vector_bytes"], INDEX["vector_in_bytes"]]] *= 1e-4
        record.phases[:, place] = 0.2 * record.totals[:, calls].sum(1)
    names = ("S(1) -> S(0)", "P -> S(0)", ROWS)
    sizes, all_ranks = (2**17, 2**20, 2**23), tuple(range(records[0].totals.shape[0]))
    transfers = [transfer(name, EVEN, count, all_ranks) for name in names for count in sizes]
    large = transfer(ROWS, EVEN, 2**24, all_ranks)

    def error(given):
        profile = fit(records, backend="gloo", transfers=given, judged=False)
        assert profile.transfers == tuple(given)
        x, _ = examples([large], "vectors", len(all_ranks))
        return float((x @ profile.matrix[:, place])[0]) / large.ms - 1.0

    assert error([]) < -0.9
    assert abs(error(transfers)) < 0.1


def test_the_remainder_of_steps_has_one_price_for_all_bytes():
    records, price = synthetic_records(0.0, samples=3), 4e-7  # ms per byte
    names = ("vector_bytes", "gradient_bytes")
    ids = [INDEX[name] for name in names]
    slower = [
        replace(r, step_ms=r.step_ms + price * float(r.totals.max(0)[ids].sum())) for r in records
    ]
    transfers = [transfer("S(1) -> S(0)", EVEN, 2**20, tuple(range(len(records[0].totals))))]
    assert ms_per_byte(transfers) > 2 * price  # so the bound has no effect

    def prices(measured):
        profile = fit(measured, backend="gloo", transfers=transfers, judged=False)
        return profile.matrix[ids, PHASE[REST]]

    before, after = prices(records), prices(slower)
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert after[0] - before[0] == pytest.approx(price, rel=0.5)


def test_a_profile_is_stored_with_its_transfers(tmp_path):
    profile = replace(empty_profile(2, "gloo"), transfers=(transfer(ROWS, ONE_SENDS, 64),))
    profile.save(tmp_path / "profile.json")
    assert load(tmp_path / "profile.json").transfers == profile.transfers
    assert asdict(profile)["transfers"][0]["skew"] == ONE_SENDS


def test_a_profile_of_other_counts_is_refused_with_their_names(tmp_path):
    path = tmp_path / "profile.json"
    empty_profile(2, "gloo").save(path)
    path.write_text(path.read_text().replace('"dense_elements"', '"dense_things"'))
    with pytest.raises(ConfigError, match=r"other counts: dense_elements, dense_things.*calibrate"):
        load(path)


def test_a_byte_costs_the_median_of_large_transfers_of_all_ranks():
    def even(name, ranks, count, ms):
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
        even("S(0) -> B", both, 100, 9.0),  # only the largest size counts
        even("S(0) -> B", both, 1000, 3.0),
        even("P -> B", both, 1000, 2.0),
        even("rows", both, 1000, 50.0),
        even("rows to all", (0,), 1000, 70.0),
    ]
    assert ms_per_byte(timed) == pytest.approx(3e-3)
    assert ms_per_byte([]) == 0.0

"""Tests dense parts alone: timed with the trainer, stored, and used by a fit."""

import json

import pytest

from sbpflow.boxing.executor import Boxing
from sbpflow.costs.counts import INDEX
from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.calibrate import Journal
from sbpflow.planner.calibration.fit import fit
from sbpflow.planner.calibration.time_dense import (
    DENSE_MOVES,
    DenseTime,
    dense_examples,
    dense_time_of,
    time_dense,
)
from sbpflow.planner.costs.simulate import PHASE
from sbpflow.planner.task import DenseWork, dense_work
from tests.planner.test_calibrate import synthetic_records

NETS = ((8, (4,)), (16, (8, 4)))
CALL_MS, MAC_MS, ELEMENT_MS = 0.5, 2e-8, 5e-7


def timed(world, seconds):
    """Return (times, whether the hook is removed)."""
    times = time_dense(Boxing(world), seconds=seconds, nets=NETS, samples=(4, 8))
    return times, world.on_wait is None


def test_every_net_is_timed_with_every_number_of_samples(ranks):
    (times, hook_removed), (other, _) = ranks(2, timed, 60.0)
    assert hook_removed
    assert times == other, "every rank gets the same"
    sizes = [(time.width, time.hidden, time.samples) for time in times]
    assert sizes == [(*net, samples) for net in NETS for samples in (4, 8)]
    for time in times:
        assert set(time.ms) == set(DENSE_MOVES)
        assert time.ms["forward"] > 0
        assert time.ms["backward"] > 0


def test_without_time_only_the_first_net_is_timed(ranks):
    assert [time.samples for time in ranks(1, timed, 0.0)[0][0]] == [4]


def dense_time(width, hidden, samples):
    """Return the time on a machine with these prices; its backward pass takes twice the forward
    pass.
    """
    shapes = list(zip((width + 1, *hidden), (*hidden, 1), strict=True))
    macs = samples * sum(a * b for a, b in shapes)
    elements = samples * sum(a + b for a, b in shapes)
    ms = CALL_MS + MAC_MS * macs + ELEMENT_MS * elements
    rest = dict.fromkeys(DENSE_MOVES, 0.1)
    return DenseTime(
        width=width, hidden=hidden, samples=samples, ms=rest | {"forward": ms, "backward": 2 * ms}
    )


def test_a_dense_time_is_an_example_of_its_counts():
    x, ms = dense_examples([dense_time(8, (4,), 10)], "forward")
    counts = {name: x[0, INDEX[name]] for name in INDEX if name.startswith("dense")}
    assert counts == {
        "dense_macs": 10 * (9 * 4 + 4 * 1),
        "dense_elements": 10 * (9 + 4 + 4 + 1),
        "dense_parameters": 9 * 4 + 4 + 4 * 1 + 1,
    }
    assert x[0, INDEX["always"]] == 1.0
    assert ms.tolist() == [dense_time(8, (4,), 10).ms["forward"]]
    assert [len(part) for part in dense_examples([dense_time(8, (4,), 10)], "lookup")] == [0, 0]


def test_dense_work_counts_weights_and_biases():
    assert dense_work([(3, 4), (4, 1)]) == DenseWork(
        macs_per_sample=16.0, elements_per_sample=12.0, parameters=16
    )
    assert dense_work([(3, 4), (4, 1)], biases=True).parameters == 21


def test_a_fit_to_narrow_layers_learns_the_cost_of_wide_ones_from_nets_alone():
    """The tasks' layers have width 16, so their multiply-adds and elements are proportional."""
    records = synthetic_records(0.0, samples=3)
    for record in records:
        samples = 100.0 + 40.0 * record.sample
        record.totals[:, INDEX["dense_macs"]] = samples * (65 * 16 + 16)
        record.totals[:, INDEX["dense_elements"]] = samples * (65 + 16 + 16 + 1)
        for name, times in (("forward", 1.0), ("backward", 2.0)):
            ms = dense_time(64, (16,), samples).ms["forward"]
            record.phases[:, PHASE[name]] = times * ms
    shapes = ((64, (64,)), (416, (400, 400)))
    nets = [dense_time(*shape, samples) for shape in shapes for samples in (64, 512)]
    wide = dense_time(512, (1024, 512), 1000)

    def error(given, move):
        profile = fit(records, backend="gloo", dense=given, judged=False)
        x, ms = dense_examples([wide], move)
        return float((x @ profile.matrix[:, PHASE[move]])[0]) / ms[0] - 1.0

    for move in ("forward", "backward"):
        assert abs(error([], move)) > 0.3
        assert abs(error(nets, move)) < 0.05


def test_the_dense_part_has_no_learned_correction():
    """A correction learned from the tasks' narrow layers would also be used for wide layers."""
    records = synthetic_records(0.0)
    for record in records:
        record.totals[:, INDEX["dense_elements"]] = 1e4 * (1 + record.sample)
        record.phases[:, PHASE["backward"]] = (1.0 + record.sample) ** 1.3  # not linear
    profile = fit(records, backend="gloo", judged=False)
    learned = {name for member in profile.members for name in member}
    assert learned, "the update of these records is not linear either"
    assert not learned & set(DENSE_MOVES)


def test_a_journal_has_only_dense_times_of_the_same_machine(tmp_path):
    path = tmp_path / "measured.jsonl"
    Journal(path, {"cpu": "one"}).add_dense([dense_time(8, (4,), 10)])
    assert Journal(path, {"cpu": "one"}).dense == [dense_time(8, (4,), 10)]
    assert not Journal(path, {"cpu": "one"}).entries
    assert Journal(path, {"cpu": "other"}).dense is None
    tree = json.loads(path.read_text())["dense"][0]
    with pytest.raises(ConfigError, match="samples: not given"):
        dense_time_of({key: value for key, value in tree.items() if key != "samples"})

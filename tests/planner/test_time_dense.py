"""Dense parts alone: timed through the trainer, kept, and what they teach a fit of narrow ones."""

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
from tests.planner.test_calibrate import made_records

NETS = ((8, (4,)), (16, (8, 4)))
CALL_MS, MAC_MS, ELEMENT_MS = 0.5, 2e-8, 5e-7


def timed(world, seconds):
    found = time_dense(Boxing(world), seconds=seconds, nets=NETS, samples=(4, 8))
    return found, world.on_wait is None


def test_every_net_is_timed_with_every_number_of_samples(ranks):
    (found, let_go), (other, _) = ranks(2, timed, 60.0)
    assert let_go
    assert found == other, "every rank gets the same"
    sizes = [(one.width, one.hidden, one.samples) for one in found]
    assert sizes == [(*net, samples) for net in NETS for samples in (4, 8)]
    for one in found:
        assert set(one.ms) == set(DENSE_MOVES)
        assert one.ms["forward"] > 0
        assert one.ms["backward"] > 0


def test_no_time_means_the_first_net_once(ranks):
    assert [one.samples for one in ranks(1, timed, 0.0)[0][0]] == [4]


def made(width, hidden, samples):
    """Of a machine with these prices, whose backward pass takes twice as long."""
    shapes = list(zip((width + 1, *hidden), (*hidden, 1), strict=True))
    macs = samples * sum(a * b for a, b in shapes)
    elements = samples * sum(a + b for a, b in shapes)
    ms = CALL_MS + MAC_MS * macs + ELEMENT_MS * elements
    rest = dict.fromkeys(DENSE_MOVES, 0.1)
    return DenseTime(
        width=width, hidden=hidden, samples=samples, ms=rest | {"forward": ms, "backward": 2 * ms}
    )


def test_a_net_is_an_example_of_its_multiply_adds_and_what_its_layers_read():
    x, ms = dense_examples([made(8, (4,), 10)], "forward")
    counts = {name: x[0, INDEX[name]] for name in INDEX if name.startswith("dense")}
    assert counts == {
        "dense_macs": 10 * (9 * 4 + 4 * 1),
        "dense_elements": 10 * (9 + 4 + 4 + 1),
        "dense_parameters": 9 * 4 + 4 + 4 * 1 + 1,
    }
    assert x[0, INDEX["always"]] == 1.0
    assert ms.tolist() == [made(8, (4,), 10).ms["forward"]]
    assert [len(part) for part in dense_examples([made(8, (4,), 10)], "lookup")] == [0, 0]


def test_dense_work_counts_weights_and_biases():
    assert dense_work([(3, 4), (4, 1)]) == DenseWork(
        macs_per_sample=16.0, elements_per_sample=12.0, parameters=16
    )
    assert dense_work([(3, 4), (4, 1)], biases=True).parameters == 21


def test_a_fit_of_narrow_layers_learns_from_nets_alone_what_wide_ones_cost():
    """The tasks' layers are 16 wide, so that a multiply-add and what it reads go together."""
    records = made_records(0.0, samples=3)
    for one in records:
        samples = 100.0 + 40.0 * one.sample
        one.totals[:, INDEX["dense_macs"]] = samples * (65 * 16 + 16)
        one.totals[:, INDEX["dense_elements"]] = samples * (65 + 16 + 16 + 1)
        for name, times in (("forward", 1.0), ("backward", 2.0)):
            ms = made(64, (16,), samples).ms["forward"]
            one.phases[:, PHASE[name]] = times * ms
    shapes = ((64, (64,)), (416, (400, 400)))
    nets = [made(*shape, samples) for shape in shapes for samples in (64, 512)]
    asked = made(512, (1024, 512), 1000)

    def error(given, move):
        profile = fit(records, backend="gloo", dense=given, judged=False)
        x, ms = dense_examples([asked], move)
        return float((x @ profile.matrix[:, PHASE[move]])[0]) / ms[0] - 1.0

    for move in ("forward", "backward"):
        assert abs(error([], move)) > 0.3
        assert abs(error(nets, move)) < 0.05


def test_passes_through_the_dense_part_have_no_learned_correction():
    """It would be of the tasks' narrow layers, and be taken for wide ones."""
    records = made_records(0.0)
    for one in records:
        one.totals[:, INDEX["dense_elements"]] = 1e4 * (1 + one.sample)
        one.phases[:, PHASE["backward"]] = (1.0 + one.sample) ** 1.3  # not linear
    profile = fit(records, backend="gloo", judged=False)
    learned = {name for member in profile.members for name in member}
    assert learned, "the update of these records is not linear either"
    assert not learned & set(DENSE_MOVES)


def test_a_journal_keeps_dense_parts_of_the_same_machine(tmp_path):
    path = tmp_path / "measured.jsonl"
    Journal(path, {"cpu": "one"}).add_dense([made(8, (4,), 10)])
    assert Journal(path, {"cpu": "one"}).dense == [made(8, (4,), 10)]
    assert not Journal(path, {"cpu": "one"}).entries
    assert Journal(path, {"cpu": "other"}).dense is None
    tree = json.loads(path.read_text())["dense"][0]
    with pytest.raises(ConfigError, match="samples: not given"):
        dense_time_of({key: value for key, value in tree.items() if key != "samples"})

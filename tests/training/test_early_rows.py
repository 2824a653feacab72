"""Tests early rows: results stay bit-equal, transfers are as planned, and ``auto`` prices them."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import StorageRule
from sbpflow.config.train_options import ClipConfig
from sbpflow.errors import ConfigError, SbpError
from sbpflow.run.execution.job import build_job
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe, format_plan
from sbpflow.run.planning.plan_file import plan_from_json, plan_to_json
from sbpflow.runtime.ranks.topology import Link, Topology
from sbpflow.runtime.ranks.world import World
from sbpflow.training import step_schedule as moves
from sbpflow.training.step_schedule import OVERLAPPED, SERIAL, StepSchedule, with_early_moves
from tests.quick import diagonal
from tests.training.test_lookahead import NUM, assert_same, outcome, parts
from tests.training.wdl_case import FIELDS, make_config, make_job

EARLY = ("fwd/flags", "fwd/early")
LATE = ("bwd/late flags", "bwd/late")


def early_config(config: Config, value: bool | str = True, **train: Any) -> Config:
    """Return ``config`` with ``train.early_rows`` set to ``value``; False also turns off late
    gradients.
    """
    train = {"late_gradients": value, **train} if value is False else train
    return replace(config, train=replace(config.train, early_rows=value, **train))


def run(world: World, config: Config, lookahead: int, per_step: int, clip: bool = False) -> Any:
    """Train steps of several batches with an evaluation in between; return the results, and the
    bytes that this rank sent in each transfer.
    """
    if clip:
        clipped = replace(config.optimizer, clip=ClipConfig(norm=0.05, rows=True))
        config = replace(config, optimizer=clipped)
    job = make_job(world, config)
    job.trainer.lookahead = lookahead
    batches, losses, announced = parts(world), list[float](), 0
    world.log.records.clear()
    world.log.enabled = True
    for step in range(0, NUM, per_step):
        while announced < min(NUM, step + per_step + lookahead):
            job.trainer.announce(batches[announced])
            announced += 1
        losses.append(float(job.trainer.step(batches[step : step + per_step])))
        if step == 6:
            world.log.enabled = False
            losses += job.trainer.predict(batches[0]).tolist()
            world.log.enabled = True
    world.log.enabled = False
    sent = Counter[str]()
    for record in world.log.records:
        sent[record.step_id] += record.bytes_sent
    world.log.records.clear()
    return {**outcome(job, losses), "sent": sent}


def check(ranks: Any, size: int, config: Config, per_step: int = 1, clip: bool = False) -> None:
    plain = early_config(config, False)
    want = ranks(size, run, plain, 1, per_step, clip)
    late_ones = (False,) if clip or per_step > 1 else (False, True)
    for lookahead, late in product((1, 2, 5), late_ones):
        early = early_config(config, late_gradients=late)
        results = ranks(size, run, early, lookahead, per_step, clip)
        for got, expected in zip(results, want, strict=True):
            assert_same(got, expected)
            for group in ("wide/unique", "deep/unique"):
                for whole, part, is_on in (
                    ("fwd/vectors", "fwd/early", lookahead > 1),
                    ("bwd/vectors", "bwd/late", lookahead > 1 and late),
                ):
                    sent = [got["sent"][f"{group}/{name}"] for name in (whole, part)]
                    assert sum(sent) == expected["sent"][f"{group}/{whole}"]
                    assert (sent[1] > 0) == is_on


@pytest.mark.few(1)
@pytest.mark.parametrize(("per_step", "size"), diagonal([1, 3], [2, 4]))
def test_no_bit_changes_with_evaluations_and_accumulation(ranks, size, per_step):
    check(ranks, size, make_config("3", "lazy_adam", dense="adam"), per_step)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["numba", "fbgemm"])
def test_no_bit_changes_with_other_kernels(ranks, kernel):
    pytest.importorskip({"fbgemm": "fbgemm_gpu"}.get(kernel, kernel))
    rule = "adagrad" if kernel == "fbgemm" else "rowwise_adagrad"
    check(ranks, 2, make_config("3", rule, dtype="float32", dim=8, kernel=kernel))


@pytest.mark.slow
def test_no_bit_changes_with_clipping_and_half_precision(ranks):
    config = make_config("3", "rowwise_adagrad", dtype="float32", dim=8)
    half = replace(config.parallel, table_dtype="bfloat16", comm_dtype="bfloat16")
    check(ranks, 4, replace(config, parallel=half), clip=True)


def switching(world: World, config: Config, lookaheads: list[int], serial: bool) -> Any:
    """Change the lookahead from step to step, use the serial schedule in every third step if
    ``serial`` is true, and drain the window twice.
    """
    job = make_job(world, config)
    early, losses, batches = job.trainer.schedule, list[float](), parts(world)
    for number, batch in enumerate(batches):
        while job.trainer.num_announced < min(6, NUM - number):
            job.trainer.announce(batches[number + job.trainer.num_announced])
        job.trainer.lookahead = lookaheads[number % len(lookaheads)]
        job.trainer.schedule = SERIAL if serial and number % 3 == 2 else early
        losses.append(float(job.trainer.step(batch)))
        if number in (4, 7):
            job.trainer.drain()
    return outcome(job, losses)


@pytest.mark.slow
def test_schedules_lookaheads_and_canceled_batches_change_no_bit(ranks):
    config = make_config("3", "rowwise_adagrad", dense="adam")
    want = ranks(4, switching, early_config(config, False), [0], False)
    for lookaheads, late in (
        ([2], True),
        ([4, 0, 2], True),
        ([3, 1, 5, 2], True),
        ([4, 0, 2], False),
    ):
        for serial in (False, True):
            early = early_config(config, late_gradients=late)
            results = ranks(4, switching, early, lookaheads, serial)
            for got, expected in zip(results, want, strict=True):
                assert_same(got, expected)


def cached(config: Config, folder: Any) -> Config:
    rule = StorageRule(kind="file", cache="100%", path=folder)
    return replace(config, parallel=replace(config.parallel, storage={"deep.*": rule}))


def test_cached_tables_send_early_rows_too(ranks, tmp_path):
    pytest.importorskip("numba")
    config = make_config("3", "rowwise_adagrad", dtype="float32", dim=16, kernel="numba")
    want = ranks(2, run, early_config(config, False), 1, 1)
    for late in (False, True):
        early = early_config(cached(config, tmp_path), late_gradients=late)
        results = ranks(2, run, early, 4, 1)
        for got, expected in zip(results, want, strict=True):
            assert_same(got, expected)
            assert got["sent"]["deep/unique/fwd/early"] > 0
            assert (got["sent"]["deep/unique/bwd/late"] > 0) == late


# Transfers and predictions

CLICKS = Fields.of(("I1",), {"C1": 4000, "C2": 30_000, "C3": 900}, {"C1xC3": 20_000})
ROWS = 6000


def steady(world: World, config: Config) -> Any:
    """Return each transfer's logged bytes per step, the order of the transfers, and the plan's
    description.
    """
    spec, plan = plan_run(config, CLICKS, world_size=world.size, device_type="cpu")
    trainer = build_job(config, spec, plan, Boxing(world)).trainer
    sent, count = Counter[str](), 6
    batches = []
    for number in range(count + 2):
        generator = torch.Generator().manual_seed(100 * number + world.rank)
        each = ROWS // world.size
        draws = torch.rand(each, len(CLICKS.ids), generator=generator) ** 3
        # Spread frequent rows over the table, and thus over the ranks.
        ids = (draws * torch.tensor([one.rows for one in CLICKS.ids])).int()
        ids = torch.stack(
            [(ids[:, n].long() * 7919 % f.rows).int() for n, f in enumerate(CLICKS.ids)], 1
        )
        batches.append(_Rows(torch.ones(each), torch.zeros(each, 1), ids, ROWS))
    for batch in batches:
        trainer.announce(batch)
    for number, batch in enumerate(batches[:count]):
        world.log.enabled = number > 1  # skip the first two batches, which have fewer early rows
        trainer.step(batch)
    world.log.enabled = False
    order = [record.step_id for record in world.log.records]
    for record in world.log.records:
        sent[record.step_id] += record.bytes_sent
    world.log.records.clear()
    trainer.drain()
    return {name: value / (count - 2) for name, value in sent.items()}, order, describe(plan)


class _Rows:
    def __init__(self, labels: Any, dense: Any, ids: Any, batch_size: int) -> None:
        self.labels, self.dense, self.ids, self.batch_size = labels, dense, ids, batch_size


@pytest.mark.parametrize("late", [False, True])
def test_critical_early_and_late_bytes_are_as_planned(ranks, late):
    config = make_config("3", "sgd", dtype="float32", dim=8, batch_size=ROWS)
    config = early_config(config, late_gradients=late)
    config = replace(
        config,
        model=replace(config.model, wide=replace(config.model.wide, crosses=(("C1", "C3"),))),
    )
    results = ranks(2, steady, config)
    facts = results[0][2]
    steps = {step["id"]: step for step in facts["steps"]}
    for sent, _, _ in results:
        assert sent.keys() == {name for name, step in steps.items() if step["groups"]}
        for name, value in sent.items():
            assert value <= max(steps[name]["bytes_per_rank"])
    assert facts["early_rows"]
    for group in facts["early_rows"]:
        assert group["reason"] == ""
        assert (group["late_reason"] == "") == late
        kinds = {"fwd/early": "early_bytes", "fwd/vectors": "critical_bytes"}
        if late:
            kinds |= {"bwd/late": "late_bytes", "bwd/vectors": "urgent_bytes"}
        for name, kind in kinds.items():
            total = sum(sent[f"{group['group']}/{name}"] for sent, _, _ in results)
            assert total == pytest.approx(group[kind], rel=0.03)


# Choice and errors

SLOW = Topology(hosts=((0,), (1,)), network_link=Link(gb_per_s=0.125, source="given"))


def planned(config: Config, topology: Topology | None = None, size: int = 2) -> Any:
    return plan_run(config, FIELDS, world_size=size, device_type="cpu", topology=topology)[1]


def big(value: bool | str, **train: Any) -> Config:
    config = make_config("3", "sgd", dtype="float32", dim=64, batch_size=200_000)
    return early_config(config, value, **train)


def test_auto_depends_on_the_price():
    config = Fields.of(("I1",), {"C1": 10**6, "C2": 10**6}, {})
    wanted = replace(
        big("auto"),
        model=replace(big("auto").model, wide=replace(big("auto").model.wide, crosses=())),
    )
    plans = {
        place: plan_run(wanted, config, world_size=2, device_type="cpu", topology=topology)[1]
        for place, topology in {"hosts": SLOW, "host": Topology.one_host(2)}.items()
    }
    on, off = plans["hosts"], plans["host"]
    assert on.lookahead == 2
    assert off.lookahead == 1
    assert any(not group.reason for group in on.early_rows)
    assert all("would hide" in group.reason for group in off.early_rows)
    assert "is sent one batch ahead" in format_plan(on)
    assert "is sent one batch later" in format_plan(on)
    assert on.transfers() == set(moves.TRANSFERS) - {"ids"}
    assert "early rows of deep/unique: none: the overlap would hide 0.00 ms" in format_plan(off)
    assert plan_from_json(plan_to_json(on)) == on
    assert not any(step.id.endswith(EARLY) for _, step in off.steps())
    assert {step.id for _, step in on.steps() if step.id.endswith((*EARLY, *LATE))} == {
        f"deep/unique/{name}" for name in (*EARLY, *LATE)
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lookahead": 1}, "train.lookahead is 1, but early rows need a lookahead of 2 or more"),
        ({"scheme": "1"}, "no table uses the exchange unique"),
        ({"overlap": False}, "parallel.overlap is false"),
        ({"size": 1}, "a single rank sends no rows"),
    ],
)
def test_early_rows_true_is_refused_if_no_rows_can_be_early(change, message):
    config = make_config(change.get("scheme", "3"), "sgd")
    config = replace(config, parallel=replace(config.parallel, overlap=change.get("overlap", True)))
    train = {"lookahead": change["lookahead"]} if "lookahead" in change else {}
    with pytest.raises(ConfigError, match=f"train.early_rows: true .* because {message}"):
        planned(early_config(config, **train), size=change.get("size", 2))
    auto = planned(
        early_config(config, "auto", **train),
        SLOW if "size" not in change else None,
        size=change.get("size", 2),
    )
    assert not any(group.early_rows for group in auto.embeddings.groups)


def test_no_early_rows_with_false_or_with_auto_for_cached_tables(tmp_path):
    config = make_config("3", "sgd", dtype="float32", dim=16)
    assert {g.reason for g in planned(early_config(config, False), SLOW).early_rows} == {
        "train.early_rows is false"
    }
    deep = next(
        group
        for group in planned(early_config(cached(config, tmp_path), "auto"), SLOW).early_rows
        if group.group == "deep/unique"
    )
    assert "slots for two batches (train.early_rows: true" in deep.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"early_rows": False},
            r"late gradients need early rows, which are off \(train.early_rows is false\)",
        ),
        ({"accumulate": 3}, "train.accumulate is 3, but late gradients need a value of 1"),
        ({"clip": ClipConfig(norm=1.0, rows=True)}, "optimizer.clip.rows is true"),
    ],
)
def test_late_gradients_true_is_refused_if_no_gradient_can_be_late(change, message):
    config, clip = make_config("3", "sgd"), change.pop("clip", None)
    config = replace(config, optimizer=replace(config.optimizer, clip=clip))
    train = {"early_rows": True, **change}
    for late in (True, "auto"):
        wanted = replace(config, train=replace(config.train, late_gradients=late, **train))
        if late == "auto":
            assert not any(group.late_gradients for group in planned(wanted).embeddings.groups)
            continue
        with pytest.raises(ConfigError, match=f"train.late_gradients: true .* because {message}"):
            planned(wanted)


def test_auto_needs_true_to_send_late_gradients_of_cached_tables(tmp_path):
    config = make_config("3", "sgd", dtype="float32", dim=16)
    plan = planned(early_config(cached(config, tmp_path)), SLOW)
    deep = next(group for group in plan.early_rows if group.group == "deep/unique")
    assert deep.reason == ""
    assert "slots for three batches (train.late_gradients: true" in deep.late_reason


def reading(world: World, config: Config) -> Any:
    """Read rows while gradients are late, with and without ``settle``."""
    job = make_job(world, config)
    trainer, batches, refused = job.trainer, parts(world), 0
    for batch in batches:
        trainer.announce(batch)
    trainer.step(batches[0])
    for read in (
        job.embeddings.state,
        lambda: job.embeddings.forward(batches[0].ids, batches[0].batch_size, training=False),
    ):
        try:
            read()
        except RuntimeError as error:
            refused += "late gradients" in str(error)
    trainer.settle()
    state = job.embeddings.state()
    trainer.drain()
    return refused, bool(state)


def test_rows_with_late_gradients_are_not_read(ranks):
    config = early_config(make_config("3", "sgd"), late_gradients=True)
    assert set(ranks(2, reading, config)) == {(2, True)}


def accumulated(world: World, config: Config) -> str:
    """Try two steps of two batches each; return the error messages. After each error, a step of one
    batch must succeed.
    """
    trainer, batches = make_job(world, config).trainer, parts(world)
    for batch in batches[:3]:
        trainer.announce(batch)
    messages = ""
    for pair in (batches[:2], batches[1:3]):
        try:
            trainer.step(pair)
        except SbpError as error:
            messages += str(error)
        trainer.step(pair[0])
    return messages


def test_a_step_of_two_batches_with_late_gradients_is_refused(ranks):
    config = early_config(make_config("3", "sgd"), late_gradients=True)
    for message in ranks(2, accumulated, config):
        assert message.count("has 2 batches; use train.late_gradients: false") == 2


def test_the_schedule_shows_early_rows_and_checks_their_order():
    early = with_early_moves(OVERLAPPED, late=True)
    in_flight = {move.name: flying for move, flying in early.in_flight(lookahead=2)}
    assert "next early vectors" in in_flight["forward"]
    assert "early vectors" in in_flight["lookup"]
    assert "early vectors" not in in_flight["forward"]
    assert "late gradients" in in_flight["backward"]
    assert "late gradients" not in in_flight["update_dense"]
    assert moves.MARK_EARLY not in early.moves(1)
    order = [move for move in early.each_batch if move is not moves.SEND_EARLY]
    with pytest.raises(ValueError, match="send_early must come after mark_early"):
        StepSchedule(each_batch=(moves.SEND_EARLY, *order), each_step=early.each_step)
    each_step = (moves.SEND_EARLY, *OVERLAPPED.each_step)
    moved = [move for move in early.each_batch if move not in moves.OF_THE_NEXT]
    with pytest.raises(ValueError, match="send_grads must come after mark_early"):
        StepSchedule(each_batch=(*moved, *moves.OF_THE_NEXT), each_step=early.each_step)
    with pytest.raises(ValueError, match="send_early is a move of each batch"):
        StepSchedule(each_batch=tuple(order), each_step=each_step)

"""Tests early stopping and plateaus: all ranks make the same decision, and the loop follows it."""

import json
import logging
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sbpflow.boxing.executor import Boxing
from sbpflow.config.checks import check_rows
from sbpflow.config.metrics import METRICS
from sbpflow.config.schema import Config, OptimizerConfig, TrainConfig
from sbpflow.config.train_options import PlateauConfig, StopConfig
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.errors import ConfigError, TrainingError
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.ranks.world import World
from sbpflow.training.health import LossWatch
from sbpflow.training.loop import fit
from sbpflow.training.metrics import Evaluation
from sbpflow.training.stopping import Plateau, Stopper, Watchers
from tests.training.test_health import Split
from tests.training.wdl_case import FIELDS, NoCheckpoints, make_batches, make_config, make_job


def test_an_improvement_is_a_higher_auc_or_lower_loss_by_more_than_min_delta():
    assert METRICS["auc"].is_better(0.75, 0.5, 0.125)
    assert not METRICS["auc"].is_better(0.625, 0.5, 0.125)
    assert METRICS["logloss"].is_better(0.25, 0.5, 0.125)
    assert not METRICS["normalised_entropy"].is_better(0.375, 0.5, 0.125)
    assert not METRICS["auc"].is_better(math.nan, 0.5, 0.0)


def test_patience_counts_evaluations_in_a_row():
    stopper = Stopper(StopConfig(patience=2, min_delta=0.01))
    seen = []
    for step, value in enumerate([0.6, 0.7, 0.705, 0.72, 0.71, 0.72], 1):
        stopper.push(step, value)
        seen.append((stopper.step == step, stopper.stops))
    assert seen == [
        (True, False),
        (True, False),
        (False, False),  # the improvement is less than 0.01
        (True, False),
        (False, False),
        (False, True),
    ]
    assert (stopper.value, stopper.step) == (0.72, 4)
    assert stopper.why(6) == (
        "at step 6, after 2 consecutive evaluations of val in which auc did not improve on 0.72 "
        "(step 4) by more than 0.01"
    )


def test_plateaus_lower_the_rates_to_a_minimum():
    plateau = Plateau(PlateauConfig(metric="logloss", patience=2, factor=0.1, min_factor=0.05))
    factors = []
    for step, value in enumerate([0.5, 0.5, 0.6, 0.4, 0.4, 0.4, 0.4, 0.4], 1):
        plateau.push(step, value)
        factors.append(plateau.factor)
    assert factors == [1.0, 1.0, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05]


def test_state_survives_json():
    values = [0.6, 0.7, 0.69, 0.68, 0.71, 0.7, 0.69]
    config = TrainConfig(stop=StopConfig(patience=3), plateau=PlateauConfig(patience=2))
    for cut in range(len(values)):
        whole, first = Watchers.of(config), Watchers.of(config)
        feed(whole, values, 0)
        feed(first, values[:cut], 0)
        second = Watchers.of(config)
        second.load(json.loads(json.dumps(first.state())))
        feed(second, values[cut:], cut)
        assert second.state() == whole.state()
        assert (second.stops, second.rate_scale) == (whole.stops, whole.rate_scale)
    assert whole.rate_scale == pytest.approx(0.01)


def test_the_best_value_starts_over_if_other_rows_are_scored():
    first = Watchers.of(TrainConfig(eval_rows=500), "auc")
    assert first.best is not None
    first.best.push(4, 0.9)
    state = json.loads(json.dumps(first.state()))
    old = {"best": {key: value for key, value in state["best"].items() if key != "eval_rows"}}
    for saved, eval_rows, step in ((state, 500, 4), (state, 200, 0), (state, None, 0), (old, 9, 4)):
        again = Watchers.of(TrainConfig(eval_rows=eval_rows), "auc")
        again.load(saved)
        assert again.best is not None
        assert again.best.step == step


def feed(watchers: Watchers, values: list[float], start: int) -> None:
    for step, value in enumerate(values, start + 1):
        for watcher in (watchers.stop, watchers.plateau):
            assert watcher is not None
            watcher.push(step, value)


def push_on_rank_0(world: World, metric: str) -> Any:
    """Return this rank's state after an evaluation whose result only rank 0 has."""
    watchers = Watchers.of(TrainConfig(stop=StopConfig(metric=metric)))
    evaluation = Evaluation(9, 0.5, None, "all rows are negative") if world.rank == 0 else None
    try:
        watchers.push(7, evaluation, Boxing(world))
    except TrainingError as error:
        return str(error)
    return watchers.state()


def test_all_ranks_decide_by_the_metrics_of_rank_0(ranks):
    for state in ranks(3, push_on_rank_0, "logloss"):
        assert state == {"stop": {"metric": "logloss", "value": 0.5, "step": 7, "waited": 0}}
    for message in ranks(2, push_on_rank_0, "auc"):
        assert re.match(r"train\.stop\.metric: .*auc at step 7\b.*same class", message)
    for message in ranks(2, push_on_rank_0, "gauc"):
        assert "no group has rows of both classes; use train.stop.metric=logloss" in message


@pytest.mark.parametrize("name", ["stop", "plateau"])
def test_gauc_without_groups_is_refused_at_the_start(name):
    watch = {"stop": StopConfig, "plateau": PlateauConfig}[name](metric="gauc")
    config = replace(make_config("2", "sgd"), train=TrainConfig(**{name: watch}))
    plan_run(config, replace(FIELDS, grouped=True), world_size=1, device_type="cpu")
    wanted = rf"train\.{name}\.metric: gauc needs a group, .*`group: .*train\.{name}\.metric=auc"
    with pytest.raises(ConfigError, match=wanted):
        plan_run(config, FIELDS, world_size=1, device_type="cpu")


class Quiet:
    """A reporter that records its calls."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.scored: list[int] = []

    def step(self, step: int, loss: float, samples_per_s: float, extra: Any) -> None:
        self.rates.append(extra.get("lr_scale", 1.0))

    def advance(self, step: int, loss: float) -> None:
        pass

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        self.scored.append(step)


def run(world: World, config: Config, train: TrainConfig) -> dict[str, Any]:
    """Train on 40 batches, with four other batches as val; return the results and reports."""
    job = make_job(world, config)
    batches = make_batches(40, 30)
    reporter = Quiet()
    result = fit(
        job.trainer,
        {"train": Split(world, batches), "val": Split(world, make_batches(4, 30, seed=9))},
        train,
        boxing=job.boxing,
        watch=LossWatch(job.boxing, FIELDS.dense),
        reporter=reporter,
        checkpoints=NoCheckpoints(),
    )
    lr = job.trainer.optimizer.param_groups[0]["lr"]
    return {"result": result, "rates": reporter.rates, "scored": reporter.scored, "lr": lr}


def test_a_run_stops_early_on_all_ranks(ranks):
    """The logloss never improves by 1, so the run ends two evaluations after the first one."""
    stop = StopConfig(metric="logloss", patience=2, min_delta=1.0)
    train = TrainConfig(epochs=3, eval_every=5, log_every=5, stop=stop)
    for scheme in ("1", "3"):
        first, second = ranks(2, run, make_config(scheme, "sgd"), train)
        assert first["result"].steps == second["result"].steps == 15
        # the last step is scored once, although the end of a run also scores val
        assert first["scored"] == [5, 10, 15]
        assert first["result"].stopped.startswith(
            "at step 15, after 2 consecutive evaluations of val"
        )
        assert first["result"].best.endswith("at 5")
        assert first["result"].loss == second["result"].loss


def test_the_evaluation_at_the_end_may_be_the_best(ranks):
    """The last step is scored even if its number is not a multiple of ``eval_every`` or if
    evaluations use only some rows.
    """
    stop = StopConfig(metric="logloss", patience=1, min_delta=0.0)
    for eval_rows, every in ((None, 2), (30, 2), (30, 3)):
        train = TrainConfig(max_steps=4, eval_every=every, eval_rows=eval_rows, stop=stop)
        (outcome,) = ranks(1, run_learning, train)
        assert outcome["best"].endswith("at 4")
        assert not outcome["stopped"]


def run_learning(world: World, train: TrainConfig) -> dict[str, str]:
    """Train on the batches in val, so that val improves."""
    job = make_job(world, make_config("1", "sgd"))
    split = Split(world, make_batches(2, 30) * 5)
    result = fit(
        job.trainer,
        {"train": split, "val": split},
        train,
        boxing=job.boxing,
        watch=LossWatch(job.boxing, FIELDS.dense),
        reporter=Quiet(),
        checkpoints=NoCheckpoints(),
    )
    return {"best": result.best, "stopped": result.stopped}


def warnings_of(world: World, train: TrainConfig) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("sbpflow.training.loop")
    logger.addHandler(handler)
    try:
        run_learning(world, train)
    finally:
        logger.removeHandler(handler)
    return messages


def test_short_runs_warn_that_stopping_has_no_effect(ranks):
    short = TrainConfig(max_steps=4, eval_every=4, stop=StopConfig())
    ((message,),) = ranks(1, warnings_of, short)
    assert re.match(r"train\.stop .*train\.eval_every is 4, .* 4 steps$", message)
    assert ranks(1, warnings_of, replace(short, eval_every=3)) == [[]]


def test_impossible_settings_for_the_data_are_refused_at_the_start():
    config = make_config("1", "sgd", batch_size=30)
    check_rows(config, {"train": 61, "val": 9}, batch_norm=False)
    with pytest.raises(ConfigError, match=r"^data\.batch_size: 30 leaves a last batch of one row"):
        check_rows(config, {"train": 61, "val": 9}, batch_norm=True)
    dropped = replace(config, data=replace(config.data, tail="drop"))
    single = replace(dropped, data=replace(dropped.data, batch_size=1))
    with pytest.raises(ConfigError, match=r"^data\.batch_size: 1 .*data\.batch_size=2"):
        check_rows(single, {"train": 61, "val": 9}, batch_norm=True)
    check_rows(dropped, {"train": 61, "val": 9}, batch_norm=True)
    # The plan, which a run makes first, must not fail with another message.
    normed = replace(single, model=replace(single.model, norm="batch"))
    plan_run(normed, FIELDS, world_size=1, device_type="cpu")
    split = replace(single, parallel=replace(single.parallel, dense={"*": "S(0)"}))
    _, plan = plan_run(split, FIELDS, world_size=1, device_type="cpu")
    sizes = {c.key[0]: c.key[3] for c in plan.dense_conversions}
    assert sizes["mlp.1.0/fwd"][0] == 1


def test_a_plateau_reaches_the_optimizers(ranks):
    plateau = PlateauConfig(metric="logloss", patience=1, min_delta=1.0, factor=0.5)
    train = TrainConfig(max_steps=20, eval_every=5, log_every=5, plateau=plateau)
    for outcome in ranks(2, run, make_config("1", "sgd"), train):
        assert outcome["lr"] == pytest.approx(0.1 * 0.25)
        assert outcome["rates"][-3:] == [1.0, 0.5, 0.25]


def test_splits_that_cannot_be_watched_are_rejected(ranks):
    with pytest.raises(
        ConfigError, match=r"^train\.stop needs evaluations of val .* eval_every is 0"
    ):
        TrainConfig(eval_every=0, stop=StopConfig())
    with pytest.raises(ConfigError, match=r"^train\.plateau: ftrl accumulates sums"):
        Config(
            model=make_config("dp", "sgd").model,
            optimizer=OptimizerConfig(tables={"wide.*": Ftrl()}),
            train=TrainConfig(plateau=PlateauConfig()),
        )
    (message,) = ranks(1, run_without_val)
    assert message.startswith("train.stop watches the split val")


def test_a_state_of_another_metric_is_not_restored():
    saved = Watchers.of(TrainConfig(), "auc")
    assert saved.best is not None
    saved.best.push(8, 0.7)
    for metric, value in (("auc", 0.7), ("logloss", None)):
        watchers = Watchers.of(TrainConfig(), metric)
        watchers.load(saved.state())
        assert watchers.best is not None
        assert watchers.best.value == value


def run_without_val(world: World) -> str:
    job = make_job(world, make_config("dp", "sgd"))
    loaders = {"train": Split(world, make_batches(2, 30))}
    with pytest.raises(ConfigError) as caught:
        fit(
            job.trainer,
            loaders,
            TrainConfig(stop=StopConfig()),
            boxing=job.boxing,
            watch=LossWatch(job.boxing, FIELDS.dense),
            reporter=Quiet(),
            checkpoints=NoCheckpoints(),
        )
    return str(caught.value)


def test_the_dense_part_and_the_tables_may_have_separate_schedules(ranks):
    from sbpflow.config.train_options import DenseScheduleConfig

    config = make_config("1", "sgd", wide=Ftrl())
    optimizer = OptimizerConfig(
        sparse=config.optimizer.sparse,
        tables=config.optimizer.tables,
        dense=config.optimizer.dense,
        dense_schedule=DenseScheduleConfig(warmup_steps=3),
    )
    assert optimizer.of_tables.changes is False
    warm = Config(
        data=config.data, model=config.model, parallel=config.parallel, optimizer=optimizer
    )
    (outcome,) = ranks(1, first_rates, warm)
    np.testing.assert_allclose(outcome["dense"], [0.025, 0.05, 0.075, 0.1], rtol=1e-12)
    assert outcome["tables"] == [1.0] * 4


def first_rates(world: World, config: Config) -> dict[str, list[float]]:
    job = make_job(world, config)
    outcome: dict[str, list[float]] = {"dense": [], "tables": []}
    scale = job.embeddings.scale_lr

    def noted(factor: float) -> None:
        outcome["tables"].append(factor)
        scale(factor)

    job.embeddings.scale_lr = noted
    for batch in make_batches(6, 30)[:4]:
        job.trainer.step(batch.part(world.rank, world.size))
        outcome["dense"].append(job.trainer.optimizer.param_groups[0]["lr"])
    return outcome

"""Tests the times of moves, and Chrome traces of steps, which show the bytes sent."""

import io
import json
import logging
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sbpflow.config.schema import Config, TrainConfig
from sbpflow.errors import ConfigError
from sbpflow.run.planning.explain import describe
from sbpflow.runtime.ranks.world import World
from sbpflow.training.health import LossWatch
from sbpflow.training.loop import fit
from sbpflow.training.move_times import MoveTimes, StepProfiler, peak_memory_of
from tests.training.test_health import Split
from tests.training.wdl_case import FIELDS, NoCheckpoints, make_batches, make_config, make_job


class Keeping:
    """A reporter that keeps the values of every interval."""

    def __init__(self) -> None:
        self.extra: list[Any] = []

    def step(self, step: int, loss: float, samples_per_s: float, extra: Any) -> None:
        self.extra.append(extra)

    def advance(self, step: int, loss: float) -> None:
        pass

    def evaluation(self, split: str, step: int, evaluation: Any) -> None:
        pass


def traced(world: World, config: Config, folder: str, steps: tuple[int, int], last: int) -> Any:
    job = make_job(world, config)
    kept, profiler = Keeping(), StepProfiler(*steps, Path(folder), world)
    was = world.log.enabled
    fit(
        job.trainer,
        {"train": Split(world, make_batches(last + 2, 30)[:last])},
        TrainConfig(eval_every=0, log_every=2),
        boxing=job.boxing,
        watch=LossWatch(job.boxing, FIELDS.dense),
        reporter=kept,
        checkpoints=NoCheckpoints(),
        profiler=profiler,
    )
    assert world.log.enabled == was
    planned = {
        step["id"]: step["bytes_per_rank"][world.rank] for step in describe(job.plan)["steps"]
    }
    return {"extra": kept.extra, "planned": planned, "peak": peak_memory_of(world.device)}


def test_a_trace_has_every_move_with_its_bytes(ranks, tmp_path):
    config = make_config("1", "sgd")
    results = ranks(2, traced, config, str(tmp_path), (2, 3), 6)
    moves = [move["move"] for move in describe_moves(config)]
    for rank, result in enumerate(results):
        trace = json.loads((tmp_path / f"trace-rank{rank}.json").read_text())
        assert (trace["rank"], trace["world_size"]) == (rank, 2)
        timed = [event for event in trace["traceEvents"] if "transfers" in event.get("args", {})]
        timed.sort(key=lambda event: event["ts"])
        assert [
            e["name"] for e in timed
        ] == moves * 2  # covers steps 2 and 3, which have no short batches
        assert [e["args"]["step"] for e in timed] == [2] * len(moves) + [3] * len(moves)
        for event in timed:
            args = event["args"]
            assert args["bytes_sent"] == sum(
                transfer["bytes_sent"] for transfer in args["transfers"]
            )
            for transfer in args["transfers"]:
                assert transfer["bytes_sent"] == result["planned"][transfer["id"]]
        sent = {one["id"] for event in timed for one in event["args"]["transfers"]}
        assert sent == set(result["planned"])
        assert any(event["name"].startswith("aten::") for event in trace["traceEvents"])
        # Events of moves lie inside the event of their step.
        step = next(e for e in trace["traceEvents"] if e.get("name") == "step 2")
        assert all(step["ts"] <= e["ts"] <= step["ts"] + step["dur"] for e in timed[: len(moves)])
        assert result["peak"] > 1 << 20


def traced_on_a_full_disk(world: World, folder: str) -> str:
    def fails(_: Any, path: str) -> None:  # torch only logs errors
        Path(f"{path}.tmp").write_text("a part")

    text = io.StringIO()
    logging.getLogger("sbpflow").addHandler(handler := logging.StreamHandler(text))
    with mock.patch.object(torch.profiler.profile, "export_chrome_trace", fails):
        traced(world, make_config("dp", "sgd"), folder, (3, 4), 6)
    logging.getLogger("sbpflow").removeHandler(handler)
    return text.getvalue()


def test_a_trace_that_cannot_be_written_is_reported(ranks, tmp_path):
    path = tmp_path / "trace-rank0.json"
    path.write_text('{"traceEvents": []}')  # of an earlier start of the run
    (message,) = ranks(1, traced_on_a_full_disk, str(tmp_path))
    assert f"train.profile: torch could not write {path}; is its disk full?" in message
    assert list(tmp_path.glob("trace*")) == []


def traced_slowly(world: World, folder: str) -> list[float]:
    def late(method: Any) -> Any:
        return lambda profiler: [time.sleep(1.0), method(profiler)]

    start, close = late(StepProfiler.start), late(StepProfiler.close)
    with mock.patch.multiple(StepProfiler, start=start, close=close):
        extra = traced(world, make_config("dp", "sgd"), folder, (3, 4), 6)["extra"]
    return [figures["step_ms"] for figures in extra]


def test_step_times_exclude_the_start_and_the_writing_of_a_trace(ranks, tmp_path):
    (step_ms,) = ranks(1, traced_slowly, str(tmp_path))
    assert max(step_ms) < 900
    assert (tmp_path / "trace-rank0.json").exists()


def describe_moves(config: Config) -> Any:
    from sbpflow.run.planning.build_plan import plan_run

    _, plan = plan_run(config, FIELDS, world_size=2, device_type="cpu")
    return describe(plan)["schedule"]


def test_the_moves_of_an_interval_add_up_to_less_than_its_steps(ranks, tmp_path):
    extra = ranks(2, traced, make_config("3", "sgd"), str(tmp_path), (1, 1), 20)[0]["extra"]
    for figures in extra[-3:]:
        parts = [value for name, value in figures.items() if name.startswith("move_")]
        assert len(parts) == 13
        assert 0.5 * figures["step_ms"] < sum(parts) + figures["data_ms"] < figures["step_ms"]


def refused(world: World) -> str:
    with pytest.raises(ConfigError) as caught:
        traced(world, make_config("dp", "sgd"), "never written", (7, 9), 6)
    return str(caught.value)


def test_traces_after_the_last_step_are_refused(ranks):
    (message,) = ranks(1, refused)
    assert re.match(r"train.profile .*step 7.* 6 steps.*\[4, 6\]$", message)


def test_times_are_reset_when_read():
    times = MoveTimes()
    for _ in range(2):
        with times.move("forward"):
            pass
    with pytest.raises(KeyError), times.move("backward"):
        raise KeyError
    taken = times.take()
    assert set(taken) == {"forward", "backward"}
    assert all(seconds >= 0 for seconds in taken.values())
    assert times.take() == {}

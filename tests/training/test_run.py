"""Tests whole runs: the entry point, the training loop, and the options passed to the trainer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import train_wdl
from sbpflow.commands.explain import explain
from sbpflow.config.schema import (
    Adam,
    AdamW,
    Config,
    DataConfig,
    DenseSgd,
    TrainConfig,
)
from sbpflow.data import load_manifest
from sbpflow.data.read.loaders import open_loaders
from sbpflow.errors import ConfigError, SbpError
from sbpflow.models.layered import LayeredPart
from sbpflow.run.planning.explain import describe
from sbpflow.run.saved.resume import Start
from sbpflow.runtime.files.run_folder import RunLock
from sbpflow.runtime.ranks.world import World
from sbpflow.tensor import ops
from sbpflow.training import loop
from sbpflow.training.dense_optimizers import make_dense_optimizer, state_per_element
from sbpflow.training.loop import is_logged
from sbpflow.training.metrics import Evaluation
from sbpflow.training.step_schedule import SERIAL
from tests.deadlines import output_of
from tests.torchrun import torchrun
from tests.training.wdl_case import NoCheckpoints, make_batches, make_config, make_job

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/scheme3.yaml")
CPU = torch.device("cpu")


def test_a_run_of_one_process_writes_its_files(synth_set, tmp_path, monkeypatch):
    compared: list[str] = []
    from sbpflow.training import health

    real = health.check_replicas
    monkeypatch.setattr(
        health, "check_replicas", lambda *args: (compared.append("replicas"), real(*args))[1]
    )
    words = [
        f"data.path={synth_set}",
        f"run.dir={tmp_path}",
        "model.hidden=[16]",
        "data.batch_size=1000",
        "train.epochs=2",
        "train.eval_every=4",
        "train.log_every=3",
    ]
    assert train_wdl.main(["--config", CONFIG, *words]) == 0
    assert compared == ["replicas"]
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # 4,800 rows in batches of 1,000: five steps an epoch, the last step with 800 rows
    assert [e["step"] for e in events if e["event"] == "step"] == [2, 3, 6, 9, 10]
    assert [e["epoch"] for e in events if e["event"] == "step"] == [1, 1, 2, 2, 2]
    scores = [(e["step"], e["split"], e["num_rows"]) for e in events if e["event"] == "eval"]
    assert scores == [(4, "val", 600), (8, "val", 600), (10, "val", 600), (10, "test", 600)]
    final = events[-1]
    assert final["event"] == "final"
    assert final["steps"] == 10
    assert final["samples_per_s"] > 0
    val, test = [e for e in events if e["event"] == "eval"][-2:]
    assert (final["auc"], final["val_auc"]) == (test["auc"], val["auc"])
    assert final["predicted"] == test["predicted"] > 0
    tables = [
        (e["step"], e["split"], sum(e["rows"])) for e in events if e["event"] == "calibration"
    ]
    assert tables == scores
    moves = [name for name in events[0] if name.startswith("move_")]
    assert len(moves) == 13
    assert len(final["peak_memory_bytes"]) == 1
    assert final["best_auc"] == pytest.approx(load_manifest(synth_set).bayes.auc)


def test_an_error_of_the_model_names_step_move_and_operation(synth_set, tmp_path, monkeypatch):
    real, steps = LayeredPart.forward, []

    def wrong(self, vectors, dense, **more):
        # Planning also calls this function, in a dry run.
        steps.extend([] if dense.boxing.is_dry else ["step"])
        if len(steps) == 3:
            ops.matmul(dense, dense)
        return real(self, vectors, dense, **more)

    monkeypatch.setattr(LayeredPart, "forward", wrong)
    words = [f"data.path={synth_set}", f"run.dir={tmp_path}", "model.hidden=[16]"]
    with pytest.raises(SbpError, match="matmul: shapes") as caught:
        train_wdl.main(["--config", CONFIG, *words, "data.batch_size=1000"])
    assert not dist.is_initialized()
    assert caught.value.__notes__ == ["in the move forward: dense forward, loss", "in step 3"]


@pytest.mark.slow
def test_two_ranks_train_and_report_once(synth_set, tmp_path):
    done = subprocess.run(
        [
            *(*torchrun(tmp_path), "train_wdl.py", "--config", CONFIG),
            *(f"data.path={synth_set}", f"run.dir={tmp_path}", "model.hidden=[16]"),
            "data.batch_size=1000",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    text = done.stdout + done.stderr
    assert text.count("INFO end") == 1
    before_the_first = text[text.index("INFO start") : text.index("step 2/5")]
    assert before_the_first.count("\n") < 12
    assert "2 x cpu" in before_the_first
    start = (tmp_path / "start.txt").read_text()
    assert "S(0)@[0, 1]  unique" in start
    assert "rank 1: cpu" in start
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert events[-1]["steps"] == 5
    assert 0.4 < events[-1]["auc"] < 1


@pytest.mark.slow
def test_ranks_with_other_configurations_stop_before_they_train(synth_set, tmp_path, free_port):
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "train_wdl.py", "--config", CONFIG, f"data.path={synth_set}"),
                *(f"run.dir={tmp_path}", f"optimizer.dense.lr=0.00{rank + 1}"),
            ],
            cwd=ROOT,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": "0", "MASTER_PORT": str(free_port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [output_of(rank, 60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    message = "error: rank 1 differs from rank 0 (optimizer.dense.lr: 0.001 on rank 0, "
    assert "".join(texts).count(f"{message}0.002 on rank 1); start every rank with the same") == 1
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("word", ["true", "false"])
def test_checked_mode_and_the_compared_facts_reach_the_world(synth_set, monkeypatch, word):
    given = {}

    def start(device: str, **kwargs: object) -> None:
        given.update(kwargs)
        raise InterruptedError

    monkeypatch.setattr("sbpflow.runtime.ranks.world.World.start", start)
    with pytest.raises(InterruptedError):
        train_wdl.main(["--config", CONFIG, f"data.path={synth_set}", f"parallel.checked={word}"])
    assert given["checked"] is (word == "true")
    assert given["facts"]["data set"].endswith(f" in {synth_set}")
    assert {"plan", "data set", "run.seed", "parallel.checked"} <= set(given["facts"])


def test_a_second_run_in_the_folder_of_a_first_is_refused(synth_set, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("of the first run")
    first = RunLock(tmp_path, rank=0)
    words = ["--config", CONFIG, f"data.path={synth_set}", f"run.dir={tmp_path}"]
    try:
        with pytest.raises(ConfigError, match=rf"^run\.dir: {tmp_path} is in use .*{tmp_path}-2"):
            train_wdl.main(words)
    finally:
        first.close()
    assert not dist.is_initialized()
    assert (tmp_path / "metrics.jsonl").read_text() == "of the first run"


class Recorder:
    """Stands in for the trainer, watch, reporter and loader, and records all calls."""

    def __init__(self, steps: int) -> None:
        self.num_steps = steps
        self.schedule = SERIAL
        self.world, self.rank = self, 0
        self.device = torch.device("cpu")
        self.size = 1
        self.calls: list[tuple[Any, ...]] = []
        self.batches: list[tuple[Any, ...]] = []
        self.last = 0.0
        self.embeddings, self.plan, self.gradient_norm = self, None, None
        self.rate_scale = 1.0
        self.lookahead, self.drained = 1, 0
        self.announced: list[Any] = []

    def announce(self, batch: Any, *, begins_step: bool = True) -> None:
        self.announced.append(batch)

    def drain(self) -> None:
        self.drained += 1

    def cache_counts(self) -> None:
        """No table is cached."""

    def growth_counts(self) -> dict[str, Any]:
        """No field grows."""
        return {}

    def figures(self) -> dict[str, float]:
        return {}

    def epoch(self, epoch: int) -> Any:
        self.calls.append(("epoch", epoch))
        return iter(make_batches(self.num_steps + 1, 10)[: self.num_steps])

    def push(self, step: int, loss: Any, batch: Any, norm: Any) -> None:
        assert norm is None
        self.last = float(step)

    def flush(self) -> None:
        self.calls.append(("flush", int(self.last)))

    def advance(self, step: int, loss: float) -> None:
        assert loss == step

    def step(self, *args: Any) -> Any:
        if isinstance(args[0], list):  # as a trainer
            self.batches.append(tuple(args))
            return torch.zeros(())
        self.calls.append(("log", args[0], args[1]))
        return None

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        self.calls.append(("score", split, step))


def everything(it: Any) -> dict[str, Any]:
    return {"boxing": it, "watch": it, "reporter": it, "checkpoints": NoCheckpoints()}


def run_loop(monkeypatch: pytest.MonkeyPatch, steps: int, **train: Any) -> list[tuple[Any, ...]]:
    score = Evaluation(1, 0.5, 0.5)
    monkeypatch.setattr(loop, "score_split", lambda *args: score)
    it: Any = Recorder(steps)
    loaders = {"train": it, "val": Recorder(1), "test": Recorder(1)}
    result = loop.fit(it, loaders, TrainConfig(**train), **everything(it))
    assert result.val == result.test == score
    return it.calls


def test_the_loop_passes_epochs_to_the_loader_and_evaluates_as_configured(monkeypatch):
    calls = run_loop(monkeypatch, 3, epochs=2, eval_every=2, log_every=4)
    assert calls == [
        ("epoch", 0),
        ("flush", 2),
        ("log", 2, 2.0),
        ("flush", 2),
        ("score", "val", 2),
        ("epoch", 1),
        ("flush", 4),
        ("log", 4, 4.0),
        ("flush", 4),
        ("score", "val", 4),
        ("flush", 6),
        ("log", 6, 6.0),
        ("flush", 6),
        ("score", "val", 6),
        ("score", "test", 6),
    ]


def test_logged_steps():
    assert [step for step in range(1, 301) if is_logged(step, 100)] == [
        *(2, 5, 10, 20, 50),
        *(100, 200, 300),
    ]
    assert [step for step in range(1, 10) if is_logged(step, 3)] == [2, 3, 6, 9]
    assert [step for step in range(1, 4) if is_logged(step, 1)] == [1, 2, 3]


def test_max_steps_ends_a_run_inside_an_epoch(monkeypatch):
    calls = run_loop(monkeypatch, 3, epochs=5, max_steps=4, eval_every=0, log_every=100)
    assert [c for c in calls if c[0] == "epoch"] == [("epoch", 0), ("epoch", 1)]
    assert calls[-3:] == [("log", 4, 4.0), ("score", "val", 4), ("score", "test", 4)]


def order_of(synth_set: Path, seed: int, **data: Any) -> torch.Tensor:
    config = DataConfig(batch_size=1000, loader="memmap", **data)
    loaders = open_loaders(load_manifest(synth_set), config, 0, 1, seed=seed, device=CPU)
    batches = list(loaders["train"].epoch(0))
    assert [batch.batch_size for batch in batches][-1] == (1000 if data.get("tail") else 800)
    held = sum(batch.batch_size for split in ("val", "test") for batch in loaders[split].epoch(0))
    assert held == 1200  # ``data.tail`` does not apply to val and test
    return torch.cat([batch.ids for batch in batches])


def test_loaders_follow_seed_shuffle_and_tail(synth_set):
    rows = order_of(synth_set, 1)
    assert torch.equal(rows, order_of(synth_set, 1))
    assert not torch.equal(rows, order_of(synth_set, 2))
    assert not torch.equal(rows, order_of(synth_set, 1, shuffle="none"))
    assert len(order_of(synth_set, 1, tail="drop")) == 4000


def test_train_splits_without_a_batch_are_refused(synth_set):
    config = DataConfig(batch_size=5000, tail="drop")
    with pytest.raises(ConfigError, match=r"data\.batch_size is 5000, but the train split .* 4800"):
        open_loaders(load_manifest(synth_set), config, 0, 1, seed=1, device=CPU)


def test_hyperparameters_reach_the_optimizers():
    parameter = torch.zeros(2, requires_grad=True)
    for config in (
        DenseSgd(lr=0.3, momentum=0.6, weight_decay=0.02),
        Adam(lr=0.3, betas=(0.5, 0.6), eps=1e-5, weight_decay=0.03),
        AdamW(lr=0.3, betas=(0.5, 0.6), eps=1e-5, weight_decay=0.04),
    ):
        optimizer = make_dense_optimizer(config, [parameter])
        assert optimizer is not None
        (group,) = optimizer.param_groups
        for name in config.__dataclass_fields__:
            assert name == "name" or group[name] == getattr(config, name)
    assert make_dense_optimizer(Adam(), []) is None
    assert [state_per_element(c) for c in (DenseSgd(), DenseSgd(momentum=0.9), Adam())] == [0, 1, 2]


def memory(world: World, config: Config) -> tuple[dict[str, int], int, int]:
    """Return this rank's memory according to ``explain``, and the memory that its tables and dense
    parameters take.
    """
    job = make_job(world, config)
    job.trainer.step(make_batches(2, 30)[0].part(world.rank, world.size))
    dense = sum(p.part.numel() * p.part.itemsize for p in job.model.parameters.values())
    return describe(job.plan)["ranks"][world.rank], job.embeddings.memory_bytes(), dense


@pytest.mark.parametrize("sparse", ["sgd", "rowwise_adagrad", "lazy_adam"])
@pytest.mark.parametrize("scheme", ["dp", "1", "3"])
def test_explained_memory_matches_a_rank(ranks, scheme, sparse):
    config = make_config(scheme, sparse, dense="adam", dense_layouts={"mlp.0.weight": "S(0)"})
    for planned, tables, dense in ranks(3, memory, config):
        assert planned["table_bytes"] + planned["table_state_bytes"] == tables
        assert planned["dense_bytes"] == planned["dense_gradient_bytes"] == dense
        assert planned["dense_state_bytes"] == 2 * dense


def test_explain_plans_gpus_without_one(synth_set, capsys):
    words = ["--ranks", "8", "--json", f"data.path={synth_set}", "parallel.device=cuda"]
    assert explain(["--config", str(ROOT / "configs/scheme2.yaml"), *words]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["backend"] == "nccl"
    collectives = {step["id"]: step["collective"] for step in facts["steps"]}
    assert collectives["deep/reduce/fwd/vectors"] == "reduce_scatter"


def test_explained_bounds_are_reachable(synth_set, capsys):
    words = ["--ranks", "4", "--json", f"data.path={synth_set}", "data.batch_size=1024"]
    assert explain(["--config", CONFIG, *words]) == 0
    steps = {step["id"]: step for step in json.loads(capsys.readouterr().out)["steps"]}
    vectors = steps["deep/unique/fwd/vectors"]
    assert vectors["total_bytes"] == 1024 * 26 * 16 * 4
    assert vectors["bytes_per_rank"] == [768 * 26 * 16 * 4] * 4
    assert steps["deep/unique/bwd/vectors"]["bytes_per_rank"] == [256 * 26 * 16 * 4] * 4
    assert steps["deep/unique/fwd/ids"]["total_bytes"] == 1024 * 26 * 4


class Letters:
    def epoch(self, epoch: int) -> Any:
        return iter(["abcde", "", "fg"][epoch])


def test_an_epoch_ends_with_a_step_of_fewer_batches():
    steps = loop._read_steps(Letters(), range(3), 2)  # type: ignore[arg-type]
    want = [(0, ["a", "b"]), (0, ["c", "d"]), (0, ["e"]), (2, ["f", "g"])]
    assert [(step.epoch, step.batches) for step in steps] == want
    assert loop.last_step(TrainConfig(epochs=3, accumulate=2), 5, Start()) == 9


@pytest.mark.parametrize(
    ("start", "most", "last"),
    [
        (Start(step=3, epoch=1, batches_left=5), None, 9),
        (Start(step=5, epoch=1, batches_left=1), None, 9),
        (Start(step=9, epoch=2, batches_left=0), None, 9),
        (Start(step=50, epoch=1, batches_left=5), None, 56),  # an earlier run with smaller batches
        (Start(step=50, epoch=3), None, 50),
        (Start(step=9, steps_of_before=9), None, 18),  # another set
        (Start(step=9, steps_of_before=9), 4, 13),
        (Start(step=3, epoch=1, batches_left=5), 4, 4),
    ],
)
def test_the_last_step_follows_from_the_batches_that_are_left(start, most, last):
    train = TrainConfig(epochs=3, accumulate=2, max_steps=most)
    assert loop.last_step(train, 5, start) == last


def test_the_last_step_of_very_many_epochs_is_calculated():
    train = TrainConfig(epochs=10**12, accumulate=2)
    assert loop.last_step(train, 5, Start()) == 3 * 10**12


@pytest.mark.parametrize("lookahead", [0, 1, 2, 16])
def test_nothing_is_announced_past_the_last_step(monkeypatch, lookahead):
    monkeypatch.setattr(loop, "score_split", lambda *args: None)
    it: Any = Recorder(4)
    it.lookahead = lookahead
    train = TrainConfig(max_steps=7, eval_every=0, accumulate=2, epochs=9)
    loop.fit(it, {"train": it}, train, **everything(it))
    trained = [batch for (batches,) in it.batches for batch in batches]
    assert len(trained) == 14
    assert [id(batch) for batch in it.announced] == [id(batch) for batch in trained]
    assert it.drained == 1

"""Tests that a broken run ends with a message that names the step, fields or tensor at fault."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sbpflow.boxing.agreement import gather_values, run_on_all_ranks
from sbpflow.boxing.executor import Boxing
from sbpflow.errors import ConfigError, DataError, ReplicaError, TrainingError
from sbpflow.runtime.files.run_folder import RunLock
from sbpflow.runtime.processes.differences import differences
from sbpflow.runtime.ranks.world import World
from sbpflow.training.evaluate import gather_rows, score_split
from sbpflow.training.health import (
    LossWatch,
    check_replicas,
)
from sbpflow.training.metrics import Evaluation, auc
from tests.training.wdl_case import FIELDS, Rows, make_batches, make_config, make_job


def message_of(error: type[Exception], call: Any, *args: Any) -> str:
    try:
        call(*args)
    except error as caught:
        return str(caught)
    return "nothing was raised"


def train_on_nan(world: World) -> str:
    job = make_job(world, make_config("1", "sgd"))
    watch = LossWatch(job.boxing, FIELDS.dense)
    for step, batch in enumerate(make_batches(4, 30)[:3], 1):
        part = batch.part(world.rank, world.size)
        if step == 3 and world.rank == 1:
            part.dense[2, 1] = float("nan")
            part.dense[4, 1] = float("inf")
        loss = job.trainer.step(part)
        if step == 3:
            return message_of(TrainingError, watch.push, step, loss, [part])
        watch.push(step, loss, [part])
    return "no third step"


def test_a_nan_loss_names_step_and_fields_on_every_rank(ranks):
    for message in ranks(2, train_on_nan):
        assert message.startswith("step 3: the loss is nan")
        assert "I2 (2 rows)" in message
        assert "I1" not in message


def push_a_loss(world: World) -> str:
    watch = LossWatch(Boxing(world), FIELDS.dense)
    batch = make_batches(1, 4)[0]
    return message_of(TrainingError, watch.push, 9, torch.tensor(float("inf")), [batch])


def test_infinite_losses_of_finite_fields_are_explained(ranks):
    (message,) = ranks(1, push_a_loss)
    assert message.startswith("step 9: the loss is inf; all dense fields of the batch are finite")


def push_a_label_of_2(world: World) -> str:
    watch = LossWatch(Boxing(world), FIELDS.dense)
    batch = make_batches(1, 4)[0]
    watch.push(8, torch.tensor(0.5), [batch])
    batch.labels[1] = 2.0
    return message_of(TrainingError, watch.push, 9, torch.tensor(0.5), [batch])


def test_a_label_that_is_neither_0_nor_1_ends_the_run(ranks):
    """A label of 2, from a shard that changed after preparation, leaves the loss plausible."""
    (message,) = ranks(1, push_a_label_of_2)
    assert message.startswith("step 9: the label in row 1 of rank 0's part of the batch is 2;")
    assert "sbpflow verify" in message


def push_a_dense_value_of_1e30(world: World) -> str:
    ranges = {FIELDS.dense[1]: (-2.0, 9.5)}
    watch = LossWatch(Boxing(world), FIELDS.dense, ranges)
    batch = make_batches(1, 4)[0]
    batch.dense.clamp_(-2.0, 9.5)
    batch.dense[0, 0] = 1e30  # not reported: this column has no known range
    batch.dense[1, 1] = 9.5
    watch.push(8, torch.tensor(0.5), [batch])
    batch.dense[1, 1] = 1e30
    return message_of(TrainingError, watch.push, 9, torch.tensor(0.5), [batch])


def test_out_of_range_dense_values_end_the_run(ranks):
    (message,) = ranks(1, push_a_dense_value_of_1e30)
    name = FIELDS.dense[1]
    assert f"step 9: {name} in row 1 of rank 0's part of the batch is 1e+30;" in message
    assert "-2 to 9.5" in message


def bend_one_copy(world: World, what: str) -> str:
    job = make_job(world, make_config("dp", "sgd"))
    check_replicas(job.model.parameters, job.embeddings, job.boxing)
    if world.rank == 1 and what == "mlp.0.bias":
        job.model.parameters[what].part.data[0] += 1e-7
    for stored in job.embeddings.stored():
        if world.rank == 1 and stored.shard.table.name == what:
            stored.weights[1, 0] += 1e-7
    return message_of(
        ReplicaError, check_replicas, job.model.parameters, job.embeddings, job.boxing
    )


@pytest.mark.parametrize("what", ["mlp.0.bias", "deep.C3", "wide.C1xC2"])
def test_a_copy_that_differs_is_named(ranks, what):
    for message in ranks(3, bend_one_copy, what):
        assert message.startswith(f"{what}: the copies on ranks [0, 1, 2] differ")


def compare(world: World) -> list[dict[str, list[object]]]:
    return gather_values(Boxing(world), {"rank": [world.rank, 0.1 * world.rank, "\u00e9", None]})


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_has_the_values_of_all(ranks, size):
    everyone = [{"rank": [rank, 0.1 * rank, "\u00e9", None]} for rank in range(size)]
    assert ranks(size, compare) == [everyone] * size


FACTS = [
    {"train.epochs": "1", "run.seed": "7", "optimizer.sparse.lr": "0.05", "model.deep": "true"},
    {"model.deep": "true", "optimizer.sparse.lr": "0.05", "run.seed": "7", "train.epochs": "1"},
    {"train.epochs": "1", "optimizer.sparse.lr": "0.1", "run.dir": "runs/a", "model.deep": "true"},
]


def test_differences_show_both_values():
    assert differences(FACTS, [2]) == (
        " (optimizer.sparse.lr: 0.05 on rank 0, 0.1 on rank 2; run.dir: not given on rank 0, "
        "runs/a on rank 2; run.seed: 7 on rank 0, not given on rank 2)"
    )


def test_differences_list_five_keys_and_shorten_values():
    many = differences([{f"key{n}": value for n in range(8)} for value in "12"], [1])
    assert many.startswith(" (key0: 1 on rank 0, 2 on rank 1; key1: ")
    assert many.endswith("; key4: 1 on rank 0, 2 on rank 1 and 3 more)")
    both = [{"hidden": "1024, " * 50 + end} for end in ("400, 8" + ", 1" * 40, "200")]
    text = differences(both, [1])
    assert "400, 8, 1" in text
    assert "024, 200 on rank 1)" in text
    assert text.count("...") == 3  # "..." stands before both values and after the first
    assert len(text) < 200


def test_key_order_does_not_matter():
    assert differences(FACTS[:2], [1]) == ""


def hold(world: World, folder: Path) -> str:
    held: list[RunLock] = []

    def attempt() -> None:
        held.append(run_on_all_ranks(Boxing(world), lambda: RunLock(folder, rank=world.rank)))

    text = message_of(ConfigError, attempt)
    for lock in held:
        lock.close()
    return text


@pytest.mark.parametrize("world_size", [1, 2])
def test_folders_in_use_are_refused_on_every_rank(ranks, tmp_path, world_size):
    """Only rank 0 finds the lock taken; if it did not share the error, the other ranks would wait
    in their next collective.
    """
    first = RunLock(tmp_path, rank=0)
    for message in ranks(world_size, hold, tmp_path):
        assert message.startswith(f"run.dir: {tmp_path} is in use by another run")
    first.close()
    assert ranks(world_size, hold, tmp_path) == ["nothing was raised"] * world_size


def look_up_bad_id(world: World, value: int) -> str:
    job = make_job(world, make_config("1", "sgd"))
    batch = make_batches(2, 8)[0]
    batch.ids[3, 1] = value  # C2 has 11 rows
    return message_of(DataError, job.trainer.step, batch)


@pytest.mark.parametrize("value", [11, -1])
def test_an_id_out_of_range_is_named(ranks, value):
    (message,) = ranks(1, look_up_bad_id, value)
    text = f"field C2 has id {value} in row 3 of rank 0's part of the batch, but only ids 0..10"
    assert message == f"{text} are valid"


class Split:
    """A loader that yields given batches."""

    def __init__(self, world: World, batches: list[Rows]) -> None:
        self.batches = [batch.part(world.rank, world.size) for batch in batches]
        self.num_steps = len(batches)

    def epoch(self, epoch: int) -> Any:
        return iter(self.batches)


def score(world: World) -> Evaluation | None:
    job = make_job(world, make_config("2", "sgd"))
    for batch in make_batches(4, 30)[:3]:
        job.trainer.step(batch.part(world.rank, world.size))
    return score_split(job.trainer, Split(world, make_batches(6, 31, seed=8)), job.boxing)


def test_scores_do_not_depend_on_the_number_of_ranks(ranks):
    (alone,) = ranks(1, score)
    for world_size in (2, 3, 4):
        first, *others = ranks(world_size, score)
        assert others == [None] * (world_size - 1)
        assert first.num_rows == alone.num_rows
        assert first.auc == pytest.approx(alone.auc, abs=1e-9)
        assert first.logloss == pytest.approx(alone.logloss, abs=1e-12)


def gather_ties(world: World) -> float | None:
    rows = torch.tensor([[s, s > 2] for s in (1, 2, 2, 3, 3, 0, 5)], dtype=torch.float64)
    rows[1, 1] = 1.0
    sizes = (7,) + (0,) * (world.size - 1) if world.size < 3 else (2, 0, 5)
    start = sum(sizes[: world.rank])
    whole = gather_rows(rows[start : start + sizes[world.rank]], sizes, Boxing(world))
    return None if whole is None else auc(whole[:, 0], whole[:, 1])


def test_gathered_ties_count_half_on_any_number_of_ranks(ranks):
    # positives 2, 3, 3, 5 and negatives 1, 2, 0 give eleven ordered pairs and one tie
    for world_size in (1, 2, 3):
        assert ranks(world_size, gather_ties)[0] == pytest.approx(11.5 / 12)


def train_with_dropout(world: World) -> list[float]:
    config = make_config("1", "lazy_adam", dtype="float32")
    config = type(config)(
        data=config.data,
        model=type(config.model)(embedding_dim=4, hidden=(8,), dropout=0.5, wide=config.model.wide),
        parallel=config.parallel,
        optimizer=config.optimizer,
    )
    job = make_job(world, config)
    return [
        float(job.trainer.step(batch.part(world.rank, world.size))) for batch in make_batches(5, 30)
    ]


def test_same_seed_and_world_give_the_same_losses(ranks):
    first, second = ranks(2, train_with_dropout), ranks(2, train_with_dropout)
    assert first == second
    assert first[0] == first[1]
    assert len(set(np.round(first[0], 9))) == 5

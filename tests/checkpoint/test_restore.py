"""Tests restoring grown tables, state per column shard, and folders that ranks do not share."""

import ctypes
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.folder import publish
from sbpflow.checkpoint.format import Index
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.config.checkpoint_options import CheckpointConfig
from sbpflow.config.schema import OptimizerConfig, RunConfig
from sbpflow.embedding.rules.rowwise_adagrad import RowwiseAdagrad
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.run.execution.job import build_job
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.saved.checkpoints import check_shared
from sbpflow.run.saved.resume import DataFacts, decide
from sbpflow.run.saved.save import Saver
from sbpflow.runtime.ranks.world import World
from tests.training.wdl_case import FIELDS, make_batches, make_config

GROWN = Fields.of(
    ("I1", "I2", "I3"),
    {"C1": 50, "C2": 11, "C3": 60, "C4": 3},
    {"C1xC2": 71, "C3xC4": 29},
)


def job_of(world, config, fields):
    spec, plan = plan_run(config, fields, world_size=world.size, device_type="cpu")
    return build_job(config, spec, plan, Boxing(world))


def train(world, job, steps):
    for batch in make_batches(steps, 30):
        job.trainer.step(batch.part(world.rank, world.size))


def save(job, folder, step):
    return Saver(folder, job.boxing, job.state, run="r", deadline_s=30).save(step, {})


def grow(world: World, folder: Path):
    config = make_config("3", "lazy_adam", dense="adam")
    before = job_of(world, config, FIELDS)
    train(world, before, 3)
    saved = open_checkpoint(save(before, folder / "before", 3))
    save(job_of_one_step(world, config), folder / "new", 1)
    fresh = job_of(world, config, GROWN)
    refused = ""
    try:
        fresh.restore(saved)
    except CheckpointError as error:
        refused = str(error)
    fresh = job_of(world, config, GROWN)
    fresh.restore(saved, grown=True)
    save(fresh, folder / "after", 3)
    train(world, fresh, 2)
    return refused, fresh.trainer.num_steps


def job_of_one_step(world, config):
    """Return a job that has trained one step on the grown data set, with all of its embedding
    tensors reset to their initial values.
    """
    job = job_of(world, config, GROWN)
    state = job.embeddings.state().items()
    kept = {name: [r.values.clone() for r in tensor.rectangles] for name, tensor in state}
    train(world, job, 1)
    for name, tensor in job.embeddings.state().items():
        for rectangle, value in zip(tensor.rectangles, kept[name], strict=True):
            rectangle.values.copy_(value)
    return job


def test_grown_tables_keep_saved_rows_and_append_new_ones(ranks, memory):
    for name in ("before", "new", "after"):
        (memory / name).mkdir()
    for refused, steps in ranks(2, grow, memory):
        assert "tables/deep.C1 was saved with shape [37, 5], but has [50, 5] in this run" in refused
        assert "--like OLD --grow" in refused
        assert steps == 5
    before, new = (open_checkpoint(memory / n) for n in ("before/step-3", "new/step-1"))
    after = open_checkpoint(memory / "after/step-3")
    for name, saved in before.tensors.items():
        rows = saved.whole.row_stop
        whole = after.tensor(name)
        assert torch.equal(whole[:rows] if saved.shape else whole, before.tensor(name)), name
        if after.tensors[name].shape != saved.shape:
            assert torch.equal(whole[rows:], new.tensor(name)[rows:]), name
    assert after.tensors["tables/deep.C1/exp_avg"].shape == (50, 5)


def narrow_and_widen(world: World, folder: Path):
    """Convert rows from float32 to bfloat16 and back to float32, with a different layout each
    time.
    """
    wide = make_config("1", "adagrad", dtype="float32")
    narrow = make_config("3", "adagrad", dtype="float32")
    narrow = replace(narrow, parallel=replace(narrow.parallel, table_dtype="bfloat16"))
    job = job_of(world, wide, FIELDS)
    train(world, job, 3)
    path = save(job, folder / "wide", 3)
    for name, config in (("narrow", narrow), ("again", wide)):
        job = job_of(world, config, FIELDS)
        train(world, job, 1)  # change all values, so that none is correct by chance
        job.restore(open_checkpoint(path))
        path = save(job, folder / name, 3)


def test_rows_are_rounded_to_the_nearest_and_widened_exactly(ranks, memory):
    names = ("wide", "narrow", "again")
    for name in names:
        (memory / name).mkdir()
    ranks(2, narrow_and_widen, memory)
    wide, narrow, again = (open_checkpoint(memory / name / "step-3") for name in names)
    assert narrow.tensor("tables/deep.C1").dtype == torch.bfloat16
    for name in wide.tensors:
        value = wide.tensor(name)
        # Copying rounds to the nearest value, ties to even.
        kept = value.to(narrow.tensor(name).dtype)
        assert torch.equal(narrow.tensor(name), kept), name
        assert torch.equal(again.tensor(name), kept.to(value.dtype)), name


def too_large(world: World, folder: Path) -> str:
    wide, narrow = (make_config(scheme, "sgd", dtype="float32") for scheme in ("1", "3"))
    narrow = replace(narrow, parallel=replace(narrow.parallel, table_dtype="float16"))
    job = job_of(world, wide, FIELDS)
    train(world, job, 1)
    for held in job.embeddings.stored():
        held.weights.fill_(1e5)
    path = save(job, folder, 3)
    with pytest.raises(CheckpointError) as caught:
        job_of(world, narrow, FIELDS).restore(open_checkpoint(path))
    return str(caught.value)


def test_values_that_float16_cannot_represent_are_refused(ranks, memory):
    for message in ranks(2, too_large, memory):
        assert "has values that float16 cannot represent" in message


def test_relation_of_a_data_set_to_that_of_a_checkpoint():
    saved = {"path": "a", "fingerprint": "f1", "content_id": "c1", "vocabulary_digest": "v1"}
    facts = DataFacts(
        path="b", fingerprint="f2", content_id="c2", vocabulary_digest="v3", ancestors=("v2", "v1")
    )
    assert facts.relation(saved) == "grown"
    assert replace(facts, ancestors=("v2",)).relation(saved) == "other"
    assert replace(facts, vocabulary_digest="v1", ancestors=()).relation(saved) == "grown"
    assert replace(facts, fingerprint="f1").relation(saved) == "same"
    assert replace(facts, content_id="c1").relation(saved) == "same"
    del saved["content_id"]  # as written by an earlier version
    assert replace(facts, fingerprint="f1").relation(saved) == "same"
    assert facts.relation(saved) == "grown"
    assert facts.relation({**saved, "vocabulary_digest": None}) == "other"


def per_shard(world: World, folder: Path, case: str):
    config = make_config("1", "rowwise_adagrad", dense="adam")
    sparse = RowwiseAdagrad(lr=0.05, row_state="per_shard")
    kept = replace(config, optimizer=OptimizerConfig(sparse=sparse, dense=config.optimizer.dense))
    if case == "save":
        job = job_of(world, kept, FIELDS)
        train(world, job, 2)
        save(job, folder, 2)
        return ""
    job = job_of(world, kept if case == "same" else config, FIELDS)
    try:
        job.restore(open_checkpoint(folder / "step-2"))
    except CheckpointError as error:
        return str(error)
    train(world, job, 2)
    return ""


def test_state_per_column_shard_needs_the_same_shards(ranks, memory):
    ranks(2, per_shard, memory, "save")
    assert ranks(2, per_shard, memory, "same") == ["", ""]
    for size, case in ((3, "same"), (2, "logical")):
        for message in ranks(size, per_shard, memory, case):
            assert "saved as shards from columns [0" in message
            assert "row_state: logical" in message


def look(world: World, folders: list[Path]):
    try:
        check_shared(folders[world.rank], Boxing(world))
    except ConfigError as error:
        return str(error)
    return ""


def look_from_another_machine(world: World, folder: Path, look):
    """Call ``look`` with a separate disk at ``folder`` for rank 1, and return the message; return
    "refused: ..." on rank 1 if the system does not allow the mount.
    """
    if world.rank != 1:
        return look(world, [folder] * world.size)
    messages: list[str] = []

    def work() -> None:
        disk = _mount_over(folder)  # the mount namespace belongs to this thread and ends with it
        messages.append(look(world, [folder] * world.size) if not disk else f"refused: {disk}")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return messages[0]


def _mount_over(folder: Path) -> str:
    """Mount an empty in-memory file system over ``folder`` for this thread; return an error message
    if it fails.
    """
    system = ctypes.CDLL(None, use_errno=True)
    new_namespace, recursive_private = 0x00020000, 0x4000 | 0x40000
    if (
        system.unshare(new_namespace)
        or system.mount(None, b"/", None, recursive_private, None)
        or system.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, None)
    ):
        return os.strerror(ctypes.get_errno())
    return ""


def seen_from_two_machines(ranks, folder: Path, look=look) -> list[str]:
    """Return the messages of two ranks with separate disks at ``folder``; skip the test if the
    system does not allow mounts.
    """
    messages = ranks(2, look_from_another_machine, folder, look)
    if messages[1].startswith("refused"):
        pytest.skip(messages[1])
    return messages


@pytest.mark.skipif(os.geteuid() != 0, reason="another mount namespace needs root")
def test_machines_with_a_local_checkpoint_dir_are_named(ranks, memory):
    for message in seen_from_two_machines(ranks, memory):
        assert f"dir: on ranks [1], {memory} is not the folder that rank 0 uses" in message
        assert "checkpoint.dir=/shared/runs/train" in message
    assert list(memory.iterdir()) == []
    assert ranks(2, look, [memory, memory]) == ["", ""], "the rank sees the folder again"


def resume(world: World, folders: list[Path]) -> str:
    """Start from the checkpoints at ``folders``, which have the same path on all ranks."""
    folder = folders[world.rank]
    config = replace(
        make_config("1", "sgd"),
        run=RunConfig(dir=folder.with_name("new")),
        checkpoint=CheckpointConfig(resume=str(folder), every=0),
    )
    try:
        decide(config, DataFacts(path="", fingerprint="", content_id=""), Boxing(world))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="another mount namespace needs root")
def test_machines_with_another_checkpoint_at_the_same_path_are_named(ranks, memory):
    """Otherwise, each rank would restore its part of the tables from another checkpoint."""
    folder, partial = memory / "run", memory / "partial"
    for path in (folder, partial):
        path.mkdir()
    publish(folder, partial, Index(step=1, run="0" * 12, tensors={}, files={}))
    assert ranks(2, resume, [folder, folder]) == ["", ""]
    for message in seen_from_two_machines(ranks, folder, resume):
        assert f"on ranks [1], {folder / 'step-1'} is not the checkpoint that rank 0" in message


def test_folders_that_ranks_do_not_share_are_refused(ranks, memory):
    (memory / "other").mkdir()
    assert ranks(2, look, [memory, memory]) == ["", ""]
    for message in ranks(2, look, [memory, memory / "other"]):
        assert "on ranks [1], " in message
        assert "checkpoint.every=0" in message
    assert [path.name for path in memory.iterdir()] == ["other"]

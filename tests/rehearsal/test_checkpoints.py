"""Tests that background saves on a rehearsed device write the state as of their start."""

import threading

from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.write import PieceWriter
from sbpflow.run.saved.save import Saver
from tests.training.wdl_case import make_batches, make_config, make_job, to_device

SAVED_AT, STEPS = 2, 5


def begun(world, config, folder):
    """Return a job after its first steps, and its saver."""
    world.checked = False
    job = make_job(world, config)
    for number in range(SAVED_AT):
        step(job, number)
    storages = job.embeddings.stores
    return job, Saver(folder, job.boxing, job.state, run="r", deadline_s=60, stores=storages)


def step(job, number):
    """Run one step; return the number of host waits."""
    from tests.rehearsal.journal import journal

    world = job.boxing.world
    batch = make_batches(STEPS + 2, job.plan.batch_size)[number]
    rows = to_device(batch.part(world.rank, world.size), world.device)
    with journal() as made:
        job.trainer.step(rows)
    return len(made.syncs)


def save_both_ways(world, config, folder):
    """Save a run in the foreground and in the background. Return the host waits of each step during
    the background save and of a step after it, the size of the undo log, and the number of stores.
    """
    _, saver = begun(world, config, folder / "a")
    saver.save(SAVED_AT, {})
    job, saver = begun(world, config, folder / "b")
    real, asked, answered = PieceWriter.write, threading.Event(), threading.Event()

    def write(self, data):
        """After the first block, pause the writer thread while training continues."""
        real(self, data)
        asked.set()
        assert answered.wait(60)

    PieceWriter.write = write
    try:
        saver.start(SAVED_AT, {})
        assert asked.wait(60)
        waits = [step(job, number) for number in range(SAVED_AT, STEPS)]
        answered.set()
        saver.wait()
    finally:
        PieceWriter.write = real
    after = step(job, STEPS)
    saver.save(STEPS + 1, {})
    return waits, after, saver.last_cost.log_bytes, len(job.embeddings.stores())


def test_background_save_equals_a_blocking_save(rehearsed_ranks, memory):
    for name in "ab":
        (memory / name).mkdir()
    config = make_config("1", "lazy_adam", dtype="float32", dense="adam")
    ((waits, after, kept_bytes, num_storages),) = rehearsed_ranks(1, save_both_ways, config, memory)
    assert after == 0
    assert kept_bytes > 0
    # The undo log is in host memory. For each store, the addresses are copied to the host; for each
    # tensor (the weights and the two states of lazy Adam), addresses are copied back, and then rows
    # are copied to the host.
    assert max(waits) <= num_storages * (1 + 2 * 3)
    one, two = (open_checkpoint(memory / name / f"step-{SAVED_AT}") for name in "ab")
    for name in one.tensors:
        assert one.tensor(name).equal(two.tensor(name)), name
    later = open_checkpoint(memory / "b" / f"step-{STEPS + 1}")
    assert not later.tensor("tables/deep.C1").equal(two.tensor("tables/deep.C1"))

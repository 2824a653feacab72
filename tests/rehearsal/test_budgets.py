"""Tests upper bounds on how often a training step waits for the device and on how many ops it
submits.

With one rank, or with the exchanges ``columns`` and ``reduce``, no step should wait. Where a size
depends on the batch, it should be read once per batch, asynchronously, into pinned memory. Ids
come with bounds, as from a loader.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from sbpflow.config.table_rules import TableRule
from sbpflow.embedding.ids.batch_ids import BatchIds, IdBounds, Lists
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.sbp.sbp import balanced_sizes
from tests.embedding.mixes import as_input, make_collection
from tests.embedding.test_mixes import EXCHANGES, RULES, mix_of
from tests.quick import diagonal, quick
from tests.training.wdl_case import NUM_ROWS, make_batches, make_config, make_job, to_device


@dataclass(frozen=True)
class Budget:
    """Limits for one step on any rank; ``waits`` counts syncs and blocking uploads."""

    waits: int
    late_reads: int
    ops: int


# Maps (ranks, scheme) to a budget.
BUDGETS = {
    (1, "1"): Budget(waits=0, late_reads=0, ops=240),
    (1, "3"): Budget(waits=0, late_reads=0, ops=240),
    (2, "dp"): Budget(waits=0, late_reads=1, ops=460),
    (2, "1"): Budget(waits=0, late_reads=0, ops=270),
    (2, "2"): Budget(waits=0, late_reads=0, ops=270),
    (2, "3"): Budget(waits=0, late_reads=1, ops=350),
    (3, "1"): Budget(waits=0, late_reads=0, ops=290),
}


def second_step(world, config, accumulate):
    """Return the number of host waits, late reads, and ops during the second of three steps, and a
    summary of its journal. All three steps are announced in advance, so they overlap.
    """
    from tests.rehearsal.journal import journal

    world.checked = False
    job = make_job(world, config)
    columns = IdBounds(tuple(NUM_ROWS.values()), (), ())
    batches = [
        to_device(batch.part(world.rank, world.size), world.device)
        for batch in make_batches(4 * accumulate, config.data.batch_size)
    ]
    for batch in batches:  # give the ids bounds, as a loader does
        batch.ids = BatchIds(batch.ids, None, columns)
    steps = [batches[n * accumulate : (n + 1) * accumulate] for n in range(4)]
    for batch in batches[: 3 * accumulate]:
        job.trainer.announce(batch)
    for number in range(3):
        with journal() as made:
            job.trainer.step(steps[number])
        if number == 1:
            second = made
    sort = "aten.sort.stable"
    on_main = second.ops[sort] - second.elsewhere[sort]
    if accumulate == 1:  # rows of several batches are merged by a second sort
        # The rows of dense gradients are known only when the gradients arrive; all other sorts run
        # ahead on other streams.
        assert on_main == sum(
            len(group.stacks)
            for group in job.plan.embeddings.groups
            if group.exchange == "local" and group.dense_allreduce and world.size > 1
        )
        assert second.elsewhere[sort]
    return len(second.syncs), len(second.late_reads), second.num_ops, second.summary()


def check(found, budget: Budget) -> None:
    for waits, late_reads, ops, summary in found:
        assert waits <= budget.waits, summary
        assert late_reads <= budget.late_reads, summary
        assert ops <= budget.ops, summary


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("budget", "sparse"), diagonal(list(BUDGETS), ["lazy_adam", "rowwise_adagrad"]), ids=str
)
def test_step_stays_within_its_budget(rehearsed_ranks, budget, sparse):
    ranks, scheme = budget
    config = make_config(scheme, sparse, dtype="float32", dense="adam")
    check(rehearsed_ranks(ranks, second_step, config, 1), BUDGETS[budget])


# Number of additional ops by scheme. They move rows into and out of buffers, in the id stream and
# before and after the transfers.
LAID_OUT = {"3": 80, "dp": 110}


@pytest.mark.few(2)
@pytest.mark.parametrize("share", [1.0, 0.9])
@pytest.mark.parametrize("scheme", LAID_OUT)
def test_fixed_size_buffers_need_no_counts(rehearsed_ranks, scheme, share):
    """If buffers fit any batch, no counts are read; otherwise, they are read one step later."""
    config = make_config(scheme, "rowwise_adagrad", dtype="float32", dense="adam")
    config = replace(config, parallel=replace(config.parallel, row_buffer_fraction=share))
    ops = BUDGETS[2, scheme].ops + LAID_OUT[scheme]
    budget = Budget(waits=0, late_reads=int(share < 1.0), ops=ops)
    check(rehearsed_ranks(2, second_step, config, 1), budget)


@pytest.mark.parametrize("sparse", ["lazy_adam", "rowwise_adagrad"])
def test_unique_columns_read_their_counts_late(rehearsed_ranks, sparse):
    rules = {"deep.*": TableRule(sbp="S(1)", exchange="unique")}
    config = make_config("3", sparse, dtype="float32", dense="adam", tables=rules)
    budget = BUDGETS[2, "3"]
    check(rehearsed_ranks(2, second_step, config, 1), replace(budget, ops=budget.ops + 40))


def test_ftrl_and_half_precision_rows_add_no_waits(rehearsed_ranks):
    config = make_config("1", "adagrad", dtype="float32", dense="adam", wide=Ftrl())
    config = replace(config, parallel=replace(config.parallel, table_dtype="bfloat16"))
    budget = BUDGETS[2, "1"]
    results = rehearsed_ranks(2, second_step, config, 1)
    check(results, replace(budget, ops=budget.ops + 110))


def test_accumulation_adds_no_waits(rehearsed_ranks):
    config = make_config("2", "lazy_adam", dtype="float32", dense="adam")
    budget = BUDGETS[2, "2"]
    results = rehearsed_ranks(2, second_step, config, 3)
    check(results, replace(budget, ops=3 * budget.ops))


def losses_and_step(world, config):
    """Return the result of ``second_step``, and the losses of four steps with Triton's and with
    torch's kernels.
    """
    from importlib.util import find_spec

    from sbpflow.embedding.rules import kernels

    absent, kernels.find_spec = kernels.find_spec, find_spec
    try:
        measured = second_step(world, config, 1)
        by_kernel = []
        for kernel in ("triton", "torch"):
            changed = replace(config, parallel=replace(config.parallel, kernel=kernel))
            job = make_job(world, changed)
            assert {choice.name for choice in job.embeddings.kernels.values()} == {kernel}
            batches = [
                to_device(batch.part(world.rank, world.size), world.device)
                for batch in make_batches(4, config.data.batch_size)
            ]
            by_kernel.append([float(job.trainer.step(batch)) for batch in batches])
    finally:
        kernels.find_spec = absent
    return measured, by_kernel


@pytest.mark.parametrize(
    ("ranks", "scheme"), quick([(1, "1"), (2, "2"), (2, "3")], lambda n: n == 2)
)
def test_triton_matches_torch_within_the_budget(rehearsed_ranks, ranks, scheme):
    pytest.importorskip("triton")
    config = make_config(
        scheme, "rowwise_adagrad", dtype="float32", dense="adam", kernel="triton", batch_size=12
    )
    for found, (triton, plain) in rehearsed_ranks(ranks, losses_and_step, config):
        check([found], BUDGETS[ranks, scheme])
        assert triton == pytest.approx(plain, rel=1e-5)  # float32 sums in another order


def ragged_step(world, mix):
    """Return what ``second_step`` returns, for a collection's second batch, which has lists; the
    third batch starts in the meantime.
    """
    from tests.rehearsal.journal import journal

    collection, bounds = make_collection(world, mix), IdBounds((9,) * 4, (64,), (4,))
    given = []
    for step, size in enumerate(mix.batch_sizes):
        sizes = balanced_sizes(size, world.size)
        mine = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
        ids = as_input(mix, mix.bags(step), mine, world.device)
        bags = ids["bags"]
        lists = Lists(bags.offsets.diff().int().unsqueeze(1), bags.values, bags.weights)
        given.append(BatchIds(torch.cat([ids["one"], ids["three"]], 1), lists, bounds))
    coming = collection.start_id_exchange(given[0], mix.batch_sizes[0], training=True)
    for step in range(3):
        with journal() as made:
            batch, follows = coming, step < 2
            collection.lookup(batch)
            if follows:
                coming = collection.start_id_exchange(
                    given[step + 1], mix.batch_sizes[step + 1], training=True
                )
            vectors = collection.gather_outputs(batch)
            if follows:
                collection.exchange_ids(coming)
            sum(part.sum() for part in vectors.values()).backward()
            collection.send_grads(batch)
            collection.receive_grads(batch)
            collection.update(step + 1)
        if step == 1:
            second = made
    return len(second.syncs), len(second.late_reads), second.num_ops, second.summary()


@pytest.mark.few(2)
@pytest.mark.parametrize(("exchange", "ranks"), diagonal(list(EXCHANGES), [1, 2, 3]))
def test_lists_of_ids_need_one_read_together_with_the_counts(rehearsed_ranks, ranks, exchange):
    mix = mix_of(exchange, 8, RULES[2], batch_sizes=(13, 14, 16), dtype=torch.float32)
    results = rehearsed_ranks(ranks, ragged_step, replace(mix, world_size=ranks))
    check(results, Budget(waits=0, late_reads=min(ranks - 1, 1), ops=430))


def ops_by_repetition(world, config):
    """Return the ops and collectives of the second step of two jobs. The ids of the first job are
    the first and last row of each table, so that each of two ranks owns one of these rows; the
    second job uses as many rows as possible.
    """
    from tests.rehearsal.journal import journal

    world.checked = False
    columns = IdBounds(tuple(NUM_ROWS.values()), (), ())
    found = []
    limits = torch.tensor(columns.columns, dtype=torch.int32)
    for few in (True, False):
        job = make_job(world, config)
        for batch in make_batches(3, config.data.batch_size)[:2]:
            rows = torch.arange(batch.batch_size, dtype=torch.int32).unsqueeze(1)
            batch.ids = rows % 2 * (limits - 1) if few else rows % limits
            mine = to_device(batch.part(world.rank, world.size), world.device)
            mine.ids = BatchIds(mine.ids, None, columns)
            with journal() as made:
                job.trainer.step(mine)
        found.append((made.ops, made.collectives))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "scheme"),
    quick([(1, "1"), (2, "1"), (2, "2"), (2, "3"), (2, "dp")], lambda n: n in (0, 3, 4)),
)
def test_ops_of_a_step_do_not_depend_on_the_touched_rows(rehearsed_ranks, ranks, scheme):
    config = make_config(scheme, "rowwise_adagrad", dtype="float32", dense="adam", batch_size=60)
    for few, many in rehearsed_ranks(ranks, ops_by_repetition, config):
        assert few == many
        assert sum(few[0].values()) > 100

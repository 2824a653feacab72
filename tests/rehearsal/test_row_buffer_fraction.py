"""Tests that fixed-size row buffers, whatever their size, give results bit-identical to those of
transfers of exact size.
"""

import logging
from dataclasses import replace

import numpy as np
import pytest

from sbpflow.config.table_rules import TableRule
from sbpflow.errors import ConfigError
from sbpflow.run.planning.build_plan import plan_run
from tests.training.wdl_case import (
    FIELDS,
    dense_of,
    make_batches,
    make_config,
    make_job,
    pieces_of,
    to_device,
)

# the batches include a short batch, a batch that uses only row 0, and a batch of two samples
STEPS = 8
UNIQUE_COLUMNS = {"deep.*": TableRule(sbp="S(1)", exchange="unique")}
LOCAL = {"*": TableRule(sbp="B", exchange="local")}
CASES = {
    "unique": ("3", None, "lazy_adam"),
    "unique columns": ("3", UNIQUE_COLUMNS, "lazy_adam"),
    "squares of columns": ("3", UNIQUE_COLUMNS, "rowwise_adagrad"),
    "local": ("3", LOCAL, "adagrad"),
}


def config_of(case, share, **parallel):
    scheme, tables, sparse = CASES[case]
    config = make_config(scheme, sparse, dtype="float32", dense="adam", tables=tables)
    return replace(config, parallel=replace(config.parallel, row_buffer_fraction=share, **parallel))


def train_ahead(world, config):
    """Return losses, dense parameters, rows with state, and log messages; ids are exchanged one
    batch ahead.
    """
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("sbpflow.embedding.exchange.overflow")
    logger.addHandler(handler)
    world.checked = False
    job = make_job(world, config)
    batches = [
        to_device(batch.part(world.rank, world.size), world.device)
        for batch in make_batches(STEPS, config.data.batch_size)
    ]
    losses = [float(loss) for loss in job.trainer.train_on(batches)]
    logger.removeHandler(handler)
    return losses, dense_of(job), pieces_of(job), messages


def assert_equal(found, wanted, rtol=0.0):
    def equal(one, other):
        return np.allclose(one, other, rtol=rtol, atol=rtol)

    for (losses, dense, pieces, _), (same, dense_too, pieces_too, _) in zip(
        found, wanted, strict=True
    ):
        assert equal(losses, same)
        for name, value in dense.items():
            assert equal(value, dense_too[name]), name
        for (table, _, rows, state), (_, _, rows_too, state_too) in zip(
            pieces, pieces_too, strict=True
        ):
            assert equal(rows, rows_too), table
            for name, value in state.items():
                assert equal(value, state_too[name]), (table, name)


QUICK = {(2, "unique")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, case, marks=[pytest.mark.slow] * ((ranks, case) not in QUICK))
        for ranks in (2, 3)
        for case in CASES
    ],
)
def test_any_buffer_fraction_trains_to_equal_bits(rehearsed_ranks, ranks, case):
    wanted = rehearsed_ranks(ranks, train_ahead, config_of(case, None))
    # With three ranks, the order in which an all-reduce sums depends on an element's position.
    rtol = 1e-6 if (ranks, case) == (3, "squares of columns") else 0.0
    for share in (1.0, 0.6, 0.05):
        results = rehearsed_ranks(ranks, train_ahead, config_of(case, share))
        assert_equal(results, wanted, rtol)
        # With buffers a twentieth of the maximum size, nearly every exchange overflows and is
        # repeated.
        assert bool(results[0][3]) == (share == 0.05) or share == 0.6


@pytest.mark.slow
def test_buffers_support_half_precision_rows_and_vectors(rehearsed_ranks):
    narrow = {"table_dtype": "bfloat16", "comm_dtype": "bfloat16"}
    wanted = rehearsed_ranks(2, train_ahead, config_of("unique", None, **narrow))
    for share in (1.0, 0.3):
        assert_equal(rehearsed_ranks(2, train_ahead, config_of("unique", share, **narrow)), wanted)


def test_overflowing_batch_logs_a_sufficient_fraction(rehearsed_ranks):
    results = rehearsed_ranks(2, train_ahead, config_of("unique", 0.05))
    words = results[0][3][0]
    assert words.startswith("parallel.row_buffer_fraction: 0.05 ")
    assert not results[1][3], "rank 0 speaks for all"
    enough = float(words.rpartition("; use ")[2])
    assert 0.05 < enough <= 1.0
    first = words.split(" a batch of ")[0]
    again = rehearsed_ranks(2, train_ahead, config_of("unique", enough))[0][3]
    assert all(not line.startswith(first) for line in again)


def test_buffers_are_rejected_on_cpu():
    with pytest.raises(
        ConfigError, match=r"parallel.row_buffer_fraction: 0.5 is not .* on cpu.*device: cuda"
    ):
        plan_run(config_of("unique", 0.5), FIELDS, world_size=2, device_type="cpu")


def described(world, config):
    return make_job(world, config).embeddings.describe_buffers()


def test_tables_with_buffers_are_logged(rehearsed_ranks):
    of_two = rehearsed_ranks(2, described, config_of("unique", 0.5))
    assert of_two[0]
    assert all("in buffers of 0.5 times the maximum" in line for line in of_two[0])
    assert rehearsed_ranks(1, described, config_of("unique", 0.5)) == [[]]

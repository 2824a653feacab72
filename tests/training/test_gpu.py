"""Tests the schemes on CUDA, with one rank and with several ranks over NCCL.

On a machine with one GPU, the ranks share the GPU, each with its own host ID (NCCL_HOSTID).
"""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.device_timer import timed_ms
from sbpflow.embedding.plan.growth import MIN_ROWS, Eviction, Growth
from sbpflow.embedding.rules.registry import sparse_optimizer
from tests.embedding.growing_case import GrowingCase, check_equal, run_case
from tests.training.test_equality import SCHEMES, reference_run
from tests.training.test_steps import steps_of_one_iteration
from tests.training.wdl_case import (
    SPARSE,
    join_tables,
    make_batches,
    make_config,
    make_job,
    to_device,
    train,
)


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", SPARSE)
def test_one_gpu_trains_like_the_reference_in_float64(nccl_ranks, sparse):
    config = make_config("1", sparse)
    (result,) = nccl_ranks(1, train, config, 30)
    losses, model = reference_run(sparse, "sgd", 30)
    np.testing.assert_allclose(result["losses"], losses, rtol=1e-9)
    for name, weights in join_tables([result], config.model.embedding_dim).items():
        expected = model.tables()[name][1].numpy()
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-8, err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", SPARSE)
def test_kernels_agree_on_the_gpu(nccl_ranks, sparse):
    # float32 sums are computed in another order over ten steps
    runs = [
        nccl_ranks(1, train, make_config("1", sparse, dtype="float32", dim=8, kernel=kernel), 10)
        for kernel in ("torch", "auto")
    ]
    np.testing.assert_allclose(runs[0][0]["losses"], runs[1][0]["losses"], rtol=1e-5)


def captured(dense, batch_size=30, hidden=(7, 6)):
    """Return a configuration with dropout and ``parallel.cuda_graph``."""
    config = make_config("1", "adagrad", dtype="float32", dense=dense, dim=8, batch_size=batch_size)
    return replace(
        config,
        model=replace(config.model, dropout=0.5, hidden=hidden),
        parallel=replace(config.parallel, device="cuda", cuda_graph=True),
    )


def losses_of(world, config, warm_up_steps, steps):
    """Return the losses of some steps; warm-up steps run op by op."""
    job = make_job(world, config)
    job.trainer.graphs._graphs.warm_up_steps = warm_up_steps
    return [
        float(job.trainer.step(to_device(batch.part(world.rank, world.size), world.device)))
        for batch in make_batches(steps, config.data.batch_size)
    ]


def check_graph(ranks, world_size, dense, steps):
    both = (ranks(world_size, losses_of, captured(dense), warm, steps) for warm in (3, steps))
    for graphed, plain in zip(*both, strict=True):
        # Results are close but may differ, because libraries may choose other kernels if less
        # memory is free.
        np.testing.assert_allclose(graphed, plain, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dense", ["adam", "sgd"])
def test_a_cuda_graph_trains_like_steps_that_run_op_by_op(nccl_ranks, dense):
    check_graph(nccl_ranks, 1, dense, 30)


@pytest.mark.nccl
def test_a_cuda_graph_trains_equally_over_nccl(nccl_ranks):
    check_graph(nccl_ranks, 2, "adam", 30)


@pytest.mark.gpu
def test_one_gpu_uses_a_graph_by_default(nccl_ranks):
    config = captured("adam")
    config = replace(config, parallel=replace(config.parallel, cuda_graph="auto"))
    assert nccl_ranks(1, has_graphs, config) == [True]


def has_graphs(world, config):
    return make_job(world, config).trainer.graphs is not None


def check_growing(ranks, nccl_ranks, tmp_path, world_size):
    pytest.importorskip("numba")
    growth = Growth(
        evict=Eviction(max_rows=MIN_ROWS, idle_samples=150),
        admit_count=2,
        forget_after_samples=100,
    )
    for run, device in ((ranks, "cpu"), (nccl_ranks, "cuda")):
        (tmp_path / device).mkdir()
        case = GrowingCase(growth=growth, ahead=3, device=device)
        run(world_size, run_case, case, tmp_path / device)
    check_equal(tmp_path / "cpu" / "step-24", tmp_path / "cuda" / "step-24")


@pytest.mark.gpu
def test_growing_tables_on_a_gpu_equal_those_on_cpu(ranks, nccl_ranks, tmp_path):
    check_growing(ranks, nccl_ranks, tmp_path, 1)


@pytest.mark.nccl
def test_growing_tables_over_nccl_equal_those_on_cpu(ranks, nccl_ranks, tmp_path):
    check_growing(ranks, nccl_ranks, tmp_path, 2)


@pytest.mark.gpu
def test_tables_in_host_memory_equal_tables_on_the_gpu(nccl_ranks):
    pytest.importorskip("hypothesis")  # both modules import it
    from tests.embedding.test_mixes import mix_of
    from tests.rehearsal.test_cached_tables import both_ways

    rule = sparse_optimizer("rowwise_adagrad", lr=0.1)
    mix = mix_of("unique", 8, rule, accumulate=2, batch_sizes=(2, 1, 0, 2, 1) * 4)
    (output,) = mix.outputs
    tables = tuple(replace(table, num_rows=10 * table.num_rows) for table in output.tables)
    mix = replace(mix, outputs=(replace(output, tables=tables),))
    assert sum(nccl_ranks(1, both_ways, mix, 40, None)) > 20


def step_ms(world, config, warm_up_steps, steps=50):
    """Return the ms per step for batches of one shape."""
    job = make_job(world, config)
    job.trainer.graphs._graphs.warm_up_steps = warm_up_steps
    rows = to_device(make_batches(2, config.data.batch_size)[0], world.device)
    for _ in range(8):
        job.trainer.step(rows)
    return timed_ms(lambda: job.trainer.step(rows), steps=steps)["ms"]


@pytest.mark.gpu
def test_cuda_graphs_are_faster_when_launch_bound(nccl_ranks):
    config = captured("adam", batch_size=256, hidden=(64,) * 7)
    ((graphed,), (plain,)) = (nccl_ranks(1, step_ms, config, steps) for steps in (3, 10**9))
    assert graphed < 0.9 * plain, f"{graphed:.2f} ms with a graph, {plain:.2f} ms without"


def check_scheme(ranks, scheme, sparse, steps):
    config = make_config(scheme, sparse)
    results = ranks(2, train, config, steps)
    losses, model = reference_run(sparse, "sgd", steps)
    for result in results:
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-9)
    for name, weights in join_tables(results, config.model.embedding_dim).items():
        expected = model.tables()[name][1].numpy()
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-8, err_msg=name)


@pytest.mark.nccl
@pytest.mark.parametrize("sparse", SPARSE)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_over_nccl_train_like_the_reference(nccl_ranks, scheme, sparse):
    check_scheme(nccl_ranks, scheme, sparse, 30)


@pytest.mark.nccl
@pytest.mark.parametrize("scheme", SCHEMES)
def test_explain_matches_the_log_over_nccl(nccl_ranks, scheme):
    for rank, result in enumerate(
        nccl_ranks(2, steps_of_one_iteration, make_config(scheme, "sgd"))
    ):
        planned = [
            (step["id"], step["collective"])
            for step in result["plan"]["steps"]
            for group in step["groups"]
            if rank in group
        ]
        assert planned == [(r[0], r[1]) for r in result["records"]]

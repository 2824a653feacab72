"""The schemes on CUDA: one rank on the device, and several over NCCL.

On a machine with one GPU the ranks share it, each under a host name of its own (NCCL_HOSTID).
"""

import numpy as np
import pytest

from tests.training.test_equality import SCHEMES, reference_run
from tests.training.test_steps import steps_of_one_iteration
from tests.training.wdl_case import SPARSE, join_tables, make_config, train


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
    # float32 sums in another order, ten steps
    runs = [
        nccl_ranks(1, train, make_config("1", sparse, dtype="float32", dim=8, kernel=kernel), 10)
        for kernel in ("torch", "auto")
    ]
    np.testing.assert_allclose(runs[0][0]["losses"], runs[1][0]["losses"], rtol=1e-5)


@pytest.mark.nccl
@pytest.mark.parametrize("sparse", SPARSE)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_over_nccl_train_like_the_reference(nccl_ranks, scheme, sparse):
    config = make_config(scheme, sparse)
    results = nccl_ranks(2, train, config, 30)
    losses, model = reference_run(sparse, "sgd", 30)
    for result in results:
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-9)
    for name, weights in join_tables(results, config.model.embedding_dim).items():
        expected = model.tables()[name][1].numpy()
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-8, err_msg=name)


@pytest.mark.nccl
@pytest.mark.parametrize("scheme", SCHEMES)
def test_explain_holds_against_the_log_over_nccl(nccl_ranks, scheme):
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

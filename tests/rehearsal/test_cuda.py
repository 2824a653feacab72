"""Runs the tests that require a GPU on a rehearsed GPU, so that mistakes do not cost GPU time."""

from dataclasses import replace

import pytest
import torch

import tests.sbp.test_cuda as conversions
import tests.training.test_gpu as training
from sbpflow.boxing.executor import Boxing
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast
from sbpflow.tensor.global_tensor import GlobalTensor
from tests.quick import diagonal, quick
from tests.training.test_equality import SCHEMES
from tests.training.test_own_rule import config_of
from tests.training.wdl_case import SPARSE


def test_conversions_of_one_rank(rehearsed_ranks):
    conversions.test_one_rank(rehearsed_ranks)
    conversions.test_between_cpu_and_cuda(rehearsed_ranks)


def test_dropout_matches_its_counted_masks(rehearsed_ranks):
    conversions.test_dropout_matches_its_counted_masks(rehearsed_ranks)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("dtype", "world_size"),
    diagonal(["float64", "float32", "bfloat16", "int64", "int32", "int16"], [2, 3]),
)
def test_conversions_on_a_line(rehearsed_ranks, world_size, dtype):
    conversions.test_one_axis(rehearsed_ranks, world_size, dtype)


@pytest.mark.parametrize(
    ("src", "dst"), quick([([0, 1], [1, 2]), ([0], [0, 1, 2]), ([2, 0, 1], [1])], lambda n: n == 0)
)
def test_conversions_between_placements(rehearsed_ranks, src, dst):
    conversions.test_placements(rehearsed_ranks, src, dst)


def test_conversions_on_a_grid(rehearsed_ranks):
    conversions.test_grids(rehearsed_ranks)


def test_partial_to_split_is_one_reduce_scatter(rehearsed_ranks):
    conversions.test_partial_to_split_is_one_reduce_scatter(rehearsed_ranks)


@pytest.mark.few(2)
@pytest.mark.parametrize("layouts", conversions.LAYOUTS.values(), ids=conversions.LAYOUTS)
def test_wide_and_deep_can_be_written_with_ops(rehearsed_ranks, layouts):
    conversions.test_wide_and_deep_equals_one_rank(rehearsed_ranks, layouts)


@pytest.mark.parametrize("sparse", quick(SPARSE, lambda n: n > 1))
def test_one_rank_matches_the_reference(rehearsed_ranks, sparse):
    training.test_one_gpu_trains_like_the_reference_in_float64(rehearsed_ranks, sparse)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("scheme", "sparse"),
    [
        pytest.param(scheme, sparse, marks=[pytest.mark.slow] * ((row + column) % 4 > 0))
        for row, scheme in enumerate(SCHEMES)
        for column, sparse in enumerate(SPARSE)
    ],
)
def test_schemes_match_the_reference(rehearsed_ranks, scheme, sparse):
    training.check_scheme(rehearsed_ranks, scheme, sparse, 8)


@pytest.mark.parametrize("scheme", quick(SCHEMES, lambda n: n % 3 == 0))
def test_explain_matches_the_log(rehearsed_ranks, scheme):
    training.test_explain_matches_the_log_over_nccl(rehearsed_ranks, scheme)


def test_cuda_graph_equals_eager_steps(rehearsed_ranks):
    training.check_graph(rehearsed_ranks, 1, "adam", 6)
    assert rehearsed_ranks(1, training.step_ms, training.captured("adam"), 3, 1)[0] > 0


def test_graphs_are_used_by_default_except_for_a_user_s_own_rule(rehearsed_ranks):
    built_in, own = training.captured("adam"), config_of("1", dtype="float32")
    for config, graphed in ((built_in, True), (own, False)):
        parallel = replace(config.parallel, device="cuda", cuda_graph="auto")
        made = replace(config, parallel=parallel)
        assert rehearsed_ranks(1, training.has_graphs, made) == [graphed]


def test_cuda_graph_equals_eager_steps_on_several_ranks(rehearsed_ranks):
    training.check_graph(rehearsed_ranks, 2, "adam", 6)


def cpu_part_of_a_cuda_layout(world):
    boxing = Boxing(world)
    layout = Layout(Placement.line("cuda", 1), (Broadcast(),))
    made = GlobalTensor.from_local(torch.ones(2, device=world.device), layout, (2,), boxing)
    assert made.part.is_cuda
    with pytest.raises(SbpError, match=r"part on cpu, but B@\[0\] is on cuda; pass part.to\("):
        GlobalTensor.from_local(torch.ones(2), layout, (2,), boxing)


def test_part_on_the_wrong_device_is_rejected_at_the_call(rehearsed_ranks):
    rehearsed_ranks(1, cpu_part_of_a_cuda_layout)

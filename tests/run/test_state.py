"""Tests that a job's state has the same names, shapes and values for any number of ranks."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sbpflow.errors import ConfigError
from sbpflow.run.saved.checkpoints import Checkpoints
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.tensor.global_tensor import GlobalTensor
from tests.training.wdl_case import make_batches, make_config, make_job


def state_of(world: World, scheme: str, dense_layouts: dict[str, str]):
    world.checked = False
    job = make_job(
        world, make_config(scheme, "lazy_adam", dense="adam", dense_layouts=dense_layouts)
    )
    for batch in make_batches(5, 30):
        job.trainer.step(batch.part(world.rank, world.size))
    return {
        name: (
            tensor.shape,
            [
                ((p.row_start, p.row_stop), (p.col_start, p.col_stop), values.numpy().copy())
                for p, values in ((r.place, r.values) for r in tensor.rectangles)
            ],
        )
        for name, tensor in job.state().items()
    }


def joined(results):
    whole = {}
    for result in results:
        for name, (shape, rectangles) in result.items():
            rows, columns = shape[0], int(np.prod(shape[1:]))
            full = whole.setdefault(name, np.full((rows, columns), np.nan))
            for (r0, r1), (c0, c1), values in rectangles:
                full[r0:r1, c0:c1] = values.reshape(r1 - r0, c1 - c0)
    return whole


@pytest.mark.parametrize("scheme", ["dp", "1", "2", "3"])
def test_rectangles_of_all_ranks_equal_the_state_of_one_rank(ranks, scheme):
    one = joined(ranks(1, state_of, "dp", {}))
    assert {"tables/deep.C1", "tables/deep.C1/exp_avg", "dense/mlp.0.weight"} <= set(one)
    assert {"dense/mlp.0.bias/exp_avg", "dense/mlp.1.weight/exp_avg_sq"} <= set(one)
    split = {"mlp.0.*": "S(0)", "mlp.1.weight": "S(1)"}
    results = ranks(3, state_of, scheme, split)
    assert results[0].keys() == results[1].keys() == results[2].keys() == one.keys()
    for name, full in joined(results).items():
        assert not np.isnan(full).any(), name
        np.testing.assert_allclose(full, one[name], rtol=0, atol=1e-12, err_msg=name)


def start_with_a_cube(world: World) -> str:
    """Return the error of a run with checkpoints and a parameter of three dims that the first two
    ranks split along its second dim.
    """
    config = make_config("3", "sgd")
    job = make_job(world, config)
    cube = GlobalTensor.from_full(
        torch.ones(2, 4, 3), Layout(Placement.line("cpu", 2), "S(1)"), job.boxing
    )
    job.model.parameters["cube"] = cube.requires_grad_()
    with pytest.raises(ConfigError) as caught:
        Checkpoints(config, job, Mock(), resumed=Mock(), metrics_bytes=Mock(), keep_set=Mock())
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_layouts_that_cannot_be_saved_are_refused_before_the_first_step(ranks, world_size):
    for message in ranks(world_size, start_with_a_cube):
        assert message.startswith("parallel.dense: dense/cube: ")
        assert message.endswith("only along dim 0; use S(0), or checkpoint.every: 0")

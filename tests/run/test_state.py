"""Tests that a job's state has the same names, shapes and values for any number of ranks."""

import numpy as np
import pytest

from sbpflow.runtime.ranks.world import World
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
                ((r.row_start, r.row_stop), (r.col_start, r.col_stop), r.values.numpy().copy())
                for r in tensor.rectangles
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

"""Every model trains like its twin in plain PyTorch, whatever the layouts and the ranks.

Also the parameter totals, against those that the authors of the public runs logged.
"""

import numpy as np
import pytest
import torch

from sbpflow.config.table_rules import TableRule
from tests.models.twins import BATCH, DIM, MODELS, STEPS, config_of, named, twin_run
from tests.training.wdl_case import NUM_ROWS, make_batches, make_job, train

MIXED = {
    "deep.C1": TableRule(sbp="S(0)", ranks=(0, 2), sizes=(30, 7), exchange="unique"),
    "deep.C2": TableRule(sbp="S(0)", ranks=(1,)),
    "deep.C3": TableRule(sbp="S(1)", ranks=(2, 1), sizes=(1, 4)),
    "deep.C4": TableRule(sbp="B"),
}
SPLIT = {
    "wdl": {"mlp.0.*": "S(0)", "mlp.1.weight": "S(1)"},
    "deepfm": {"mlp.0.weight": "S(1)", "mlp.1.*": "S(0)", "numeric.weight": "S(1)"},
    "dlrm": {"bottom.0.*": "S(0)", "top.0.weight": "S(1)", "top.1.*": "S(0)"},
    "dcnv2": {"cross.*": "S(0)", "output.weight": "S(1)"},
    "dcnv2 low rank": {"cross.*.v.weight": "S(1)", "cross.*.w.*": "S(0)", "bottom.*": "S(0)"},
}


def train_and_score(world, config):
    """What ``train`` gives, running statistics, and this rank's logits of the first batch after."""
    import tests.training.wdl_case as case

    jobs = []
    real, case.make_job = case.make_job, lambda *a: jobs.append(make_job(*a)) or jobs[0]
    try:
        result = train(world, config, STEPS)
    finally:
        case.make_job = real
    (job,) = jobs
    batch = make_batches(STEPS, BATCH)[0].part(world.rank, world.size)
    result["logits"] = job.trainer.predict(batch).numpy()
    result["buffers"] = {name: one.part.numpy() for name, one in job.model.buffers.items()}
    assert {f"dense/{name}" for name in result["buffers"]} <= set(job.state())
    return result


def check(ranks, world_size, name, config):
    results = ranks(world_size, train_and_score, config)
    losses, twin, logits = twin_run(name)
    for result in results:
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-10, atol=0)
    # Weights and what follows from them: sums in another order, over 50 steps of momentum 0.9.
    found = np.concatenate([result["logits"] for result in results])
    np.testing.assert_allclose(found, logits.numpy(), rtol=0, atol=1e-8)
    for key, (value, _) in named(twin).items():
        if key in results[0]["dense"] and not config.parallel.dense:
            mine = results[-1]["dense"][key]
            np.testing.assert_allclose(mine, value.detach().numpy(), rtol=0, atol=1e-9)
    check_tables(results, twin)
    norms = [one for one in twin.modules() if isinstance(one, torch.nn.BatchNorm1d)]
    buffers = list(results[-1]["buffers"].values())
    assert len(buffers) == 2 * len(norms)
    for n, norm in enumerate(norms):
        np.testing.assert_allclose(buffers[2 * n], norm.running_mean.numpy(), rtol=0, atol=1e-9)
        np.testing.assert_allclose(buffers[2 * n + 1], norm.running_var.numpy(), rtol=0, atol=1e-9)


def check_tables(results, twin):
    found = {}
    for result in results:
        for table, (r0, r1, c0, c1), weights, _ in result["pieces"]:
            kind, _, field = table.partition(".")
            width = 1 if kind == "wide" else DIM
            whole = found.setdefault(table, np.full((NUM_ROWS[field], width), np.nan))
            whole[r0:r1, c0:c1] = weights
    expected = named(twin)
    assert len(found) == len(twin.tables())
    for table, weights in found.items():
        wanted = expected[table][0].detach().numpy()
        np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-9, err_msg=table)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("world_size", "scheme"), [(1, "1"), (2, "1"), (3, "2"), (4, "dp"), (4, "3")]
)
def test_schemes_train_like_the_twin(ranks, world_size, scheme, name):
    check(ranks, world_size, name, config_of(name, scheme))


@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_plan_trains_like_the_twin(ranks, name):
    check(ranks, 3, name, config_of(name, "2", tables=MIXED))


@pytest.mark.parametrize("name", MODELS)
def test_split_parameters_train_like_the_twin(ranks, name):
    check(ranks, 2, name, config_of(name, "3", dense_layouts=SPLIT[name]))

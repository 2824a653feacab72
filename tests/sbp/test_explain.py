"""Tests that ``explain`` shows, for each scheme and backend, the bytes that the derivations give.

On p ranks, a batch consists of B rows with f = 26 deep columns of d = 16, and 2 wide columns summed
to one number. Sums are over all ranks, with 4 bytes per number. With D bytes of deep vectors, the
published comparison gives 2 D (p-1) / p for the deep tables of scheme 2, which contradicts its own
derivation. It also counts each rank's own copy of the ids.
"""

import pytest

from sbpflow.config.schema import Config, DataConfig, OptimizerConfig
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.embedding.rules.sgd import Sgd
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe

B, F, D_EACH, CROSSES, DENSE, HIDDEN = 16384, 26, 16, 2, 13, 1024
FIELDS = Fields.of(
    [f"I{n}" for n in range(1, DENSE + 1)],
    {f"C{n}": 1000 for n in range(1, F + 1)},
    {"C1xC2": 1000, "C3xC4": 1000},
)
D = B * F * D_EACH * 4  # the deep vectors
WIDE = B * 4  # the sums of the wide columns
MLP = 4 * (HIDDEN * (F * D_EACH + DENSE + 1) + HIDDEN * (HIDDEN + 1) + HIDDEN + 1)
LOSS = 4  # the loss, reduced with the gradients


def derived(scheme, p):
    """Return the sum of the bytes per iteration for ids, for wide and deep vectors in both
    directions, and for dense gradients.
    """
    ids = B * (F + CROSSES) * 4 * (p - 1)
    wide, dense = 2 * WIDE * (p - 1), 2 * (p - 1) * (MLP + LOSS)
    deep = {"1": 2 * D * (p - 1) // p, "2": 2 * D * (p - 1)}
    if scheme in deep:
        return ids + wide + deep[scheme] + dense
    # In scheme 3's worst case, every id is sent to another rank, its row is received, and its
    # gradient is sent. The owner keeps the ids for the gradients, so they are sent only once.
    # The counts add p x (p-1) int64 values for each of 2 groups.
    rows = D + CROSSES * WIDE
    return B * (F + CROSSES) * 4 + 2 * rows + dense + 2 * 8 * p * (p - 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("scheme", ["1", "2", "3"])
def test_explain_totals_are_the_derivations(scheme, p, device):
    """NCCL has a true reduce-scatter; gloo's all-to-all and local sum send the same number of
    bytes.
    """
    config = Config(
        data=DataConfig(batch_size=B),
        model=WdlConfig(
            embedding_dim=D_EACH,
            hidden=(HIDDEN, HIDDEN),
            wide=WideConfig(crosses=(("C1", "C2"), ("C3", "C4"))),
        ),
        parallel=ParallelConfig(device=device, scheme=scheme),
        optimizer=OptimizerConfig(sparse=Sgd(lr=0.1)),
    )
    _, plan = plan_run(config, FIELDS, world_size=p, device_type=device)
    facts = describe(plan)
    assert facts["bytes_per_iteration"] == derived(scheme, p)
    names = {step["id"]: step["collective"] for step in facts["steps"]}
    reduces = {"cpu": "all_to_all", "cuda": "reduce_scatter"}[device]
    if scheme != "3":
        assert names["wide/reduce/fwd/vectors"] == reduces
    if scheme == "2":
        assert names["deep/reduce/fwd/vectors"] == reduces

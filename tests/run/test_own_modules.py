"""Tests torch modules whose losses or fixed tensors are unusual."""

from dataclasses import dataclass

import pytest
import torch.nn.functional as F
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.run.execution.job import start_job
from sbpflow.run.model.spec import Fields, embedding_output
from sbpflow.run.model.torch_model import TorchModel
from sbpflow.runtime.ranks.world import World
from tests.run.test_torch_model import DIM, FIELDS, Net, config, run


def exact_bce(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss in float64, as users do for precision."""
    return F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none")


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str = "own"
    exact: bool = False

    def spec(self, fields: Fields) -> TorchModel:
        outputs = (embedding_output("deep", fields.sparse, dim=DIM),)
        options = {"row_loss": exact_bce} if self.exact else {}
        return TorchModel(outputs=outputs, make=Net, **options)


def losses(world: World, exact: bool) -> list[float]:
    given = config("3", Model(exact=exact), dtype="float32")
    return run(start_job(given, FIELDS, Boxing(world)), world)


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_in_float64_trains_a_float32_module(ranks, size):
    (wanted,) = ranks(1, losses, False)
    for found in ranks(size, losses, True):
        assert found == pytest.approx(wanted, abs=1e-5)

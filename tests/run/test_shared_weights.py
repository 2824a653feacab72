"""Tests exports of torch modules in which a parameter has several names."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from sbpflow.run.export import forms
from sbpflow.run.export.graph import graph_of
from tests.run.test_torch_model import WIDTH


class Shared(nn.Module):
    """A net with two names for a layer, and a third one for its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 1)
        self.again = self.first
        self.weight = self.first.weight

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        return self.again(torch.cat([vectors["deep"], dense], 1))


def test_a_bundle_names_shared_parameters_as_checkpoints_do():
    """A delta contains the weights of a checkpoint that the bundle uses."""
    net = Shared().eval()
    content, values = graph_of(net, {"deep": WIDTH - 2}, 2, torch.float32)
    names = {name for name, _ in net.named_parameters()}
    assert set(content["weights"].values()) == names
    assert names <= set(values)


def test_the_optional_forms_have_one_input_per_shared_parameter():
    net = Shared().eval()
    plan = SimpleNamespace(
        outputs=[SimpleNamespace(name="deep", width=WIDTH - 2)], dtype=torch.float32
    )
    given = SimpleNamespace(plan=plan, dense=net, num_dense=2)
    module, inputs, _, names = forms._functional(given)
    assert set(names["weights"]) == {name for name, _ in net.named_parameters()}
    rows = torch.randn(3, WIDTH)
    given = (rows[:, :-2], rows[:, -2:], *inputs[2:])
    assert torch.equal(module(*given), net.first(rows))

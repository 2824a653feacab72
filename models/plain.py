"""Run a model as an ordinary ``nn.Module``: the same layers on plain tensors in one process.

``PlainModel`` is for export, for ``torch.compile``, and for inspecting a model without ranks.
Parameters and buffers have the same names and shapes as in a run, so the values of a run can be
loaded.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpflow.models.layers import Functions, Layers
from sbpflow.run.model.spec import initial_values
from sbpflow.tensor.ops.interactions import pair_sum

if TYPE_CHECKING:
    from sbpflow.models.layered import LayeredSpec


class PlainFunctions:
    """``Functions`` for plain tensors; ``id`` is ignored."""

    def add(self, a: Tensor, b: Tensor, *, id: str | None = None) -> Tensor:
        return a + b

    def mul(self, a: Tensor, b: Tensor, *, id: str | None = None) -> Tensor:
        return a * b

    def relu(self, x: Tensor, *, id: str | None = None) -> Tensor:
        return torch.relu(x)

    def cast(self, x: Tensor, dtype: torch.dtype, *, id: str | None = None) -> Tensor:
        return x.to(dtype)

    def reshape(self, x: Tensor, shape: Sequence[int], *, id: str | None = None) -> Tensor:
        return x.reshape(tuple(shape))

    def concat(self, tensors: Sequence[Tensor], dim: int, *, id: str | None = None) -> Tensor:
        return torch.cat(list(tensors), dim)

    def linear_of_parts(
        self,
        xs: Sequence[Tensor],
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        id: str = "linear",
    ) -> Tensor:
        return F.linear(xs[0] if len(xs) == 1 else torch.cat(list(xs), 1), weight, bias)

    def cross_network(
        self,
        x: Tensor,
        layers: Sequence[Sequence[Tensor]],
        *,
        half: torch.dtype | None = None,
        id: str = "cross",
    ) -> Tensor:
        start, dtype = x, half or x.dtype
        for layer in layers:
            *lower, upper, bias = (weight.to(dtype) for weight in layer)
            entering = x.to(dtype)
            if lower:
                entering = F.linear(entering, lower[0])
            x = start * F.linear(entering, upper, bias).to(start.dtype) + x
        return x

    def dropout(
        self,
        x: Tensor,
        p: float,
        seed: int,
        *,
        relu: bool = False,
        training: bool = True,
        id: str | None = None,
    ) -> Tensor:
        return F.dropout(torch.relu(x) if relu else x, p, training)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, *, id: str | None = None
    ) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias)

    def batch_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        *,
        training: bool,
        id: str = "batch_norm",
    ) -> Tensor:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training)

    def dot_interaction(self, x: Tensor, *, id: str | None = None) -> Tensor:
        fields = x.shape[1]
        row, column = torch.tril_indices(fields, fields, -1, device=x.device)
        return torch.bmm(x, x.transpose(1, 2)).flatten(1)[:, row * fields + column]

    def fm_interaction(self, x: Tensor, *, id: str | None = None) -> Tensor:
        return pair_sum(x.float() if x.dtype.itemsize < 4 else x)


class PlainModel(nn.Module):
    """Computes logits [b, 1] with ``forward(vectors, dense)``.

    ``vectors`` contains the embedding outputs [b, width] by name, and ``dense`` contains the dense
    fields [b, n]. The initial values are the same as in a run with the same ``seed``.
    """

    def __init__(
        self, spec: "LayeredSpec", *, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self._spec = spec
        self._functions: Functions[Tensor] = PlainFunctions()
        for name, parameter in spec.parameters.items():
            value = nn.Parameter(initial_values(name, parameter, seed=seed, dtype=dtype))
            owner, leaf = self._owner(name)
            owner.register_parameter(leaf, value)
        for name, buffer in spec.buffers.items():
            owner, leaf = self._owner(name)
            owner.register_buffer(leaf, initial_values(name, buffer, seed=seed, dtype=dtype))

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """Return or create the nested module for a dotted name, and return the name's last part."""
        *path, leaf = name.split(".")
        owner: nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        return owner, leaf

    def forward(self, vectors: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        layers = Layers(
            functions=self._functions,
            parameters=dict(self.named_parameters()),
            buffers=dict(self.named_buffers()),
            half=self._spec.half,
            training=self.training,
            seed=0,
        )
        return self._spec.logits(layers, vectors, dense)

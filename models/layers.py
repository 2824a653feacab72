"""Define the layers of the models; the same code runs on global tensors and on plain tensors.

``Layers`` calls ``Functions``: the ops of ``sbpflow.tensor``, or the functions of ``models.plain``
for one process. Shape classes such as ``MlpShape`` list the layers' parameters and buffers under
the names by which the layers read them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Literal, Protocol, TypeVar

import torch

from sbpflow.embedding.plan.tables import INITIAL_RANGE
from sbpflow.errors import unknown_value
from sbpflow.run.model.spec import ParameterSpec
from sbpflow.tensor.global_tensor import GlobalTensor

T = TypeVar("T", GlobalTensor, torch.Tensor)
Norm = Literal["none", "batch", "layer"]


class Functions(Protocol[T]):
    """The functions that layers call; ``sbpflow.tensor.ops`` implements them for global tensors."""

    def add(self, a: T, b: T, *, id: str | None = None) -> T: ...
    def mul(self, a: T, b: T, *, id: str | None = None) -> T: ...
    def relu(self, x: T, *, id: str | None = None) -> T: ...
    def cast(self, x: T, dtype: torch.dtype, *, id: str | None = None) -> T: ...
    def reshape(self, x: T, shape: Sequence[int], *, id: str | None = None) -> T: ...
    def concat(self, tensors: Sequence[T], dim: int, *, id: str | None = None) -> T: ...
    def linear_of_parts(
        self, xs: Sequence[T], weight: T, bias: T | None = None, *, id: str = "linear"
    ) -> T: ...
    def cross_network(
        self,
        x: T,
        layers: Sequence[Sequence[T]],
        *,
        half: torch.dtype | None = None,
        id: str = "cross",
    ) -> T: ...
    def dropout(
        self,
        x: T,
        p: float,
        seed: int,
        *,
        relu: bool = False,
        training: bool = True,
        id: str | None = None,
    ) -> T: ...
    def layer_norm(self, x: T, weight: T, bias: T, *, id: str | None = None) -> T: ...
    def batch_norm(
        self,
        x: T,
        weight: T,
        bias: T,
        running_mean: T,
        running_var: T,
        *,
        training: bool,
        id: str = "batch_norm",
    ) -> T: ...
    def dot_interaction(self, x: T, *, id: str | None = None) -> T: ...
    def fm_interaction(self, x: T, *, id: str | None = None) -> T: ...


def linear_specs(
    name: str, inputs: int, outputs: int, *, bias: bool = True
) -> dict[str, ParameterSpec]:
    """Return the specs of a glorot-uniform weight [outputs, inputs] and, with ``bias``, of a zero
    bias [outputs].
    """
    bound = math.sqrt(6.0 / (inputs + outputs))
    specs = {f"{name}.weight": ParameterSpec(shape=(outputs, inputs), bound=bound)}
    if bias:
        specs[f"{name}.bias"] = ParameterSpec(shape=(outputs,))
    return specs


def vector_specs(num_fields: int, dim: int) -> dict[str, ParameterSpec]:
    """Return the spec of the dense fields' vectors for ``Layers.numeric_vectors``; empty without
    dense fields.
    """
    shape = (num_fields, dim)
    if not num_fields:
        return {}
    return {"numeric.weight": ParameterSpec(shape=shape, bound=INITIAL_RANGE)}


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpShape:
    """Hidden layers (linear, norm, ReLU, dropout), and a last linear layer if ``outputs`` is not 0.

    The last linear layer has neither norm nor dropout. ``last_relu`` adds a ReLU after this layer.
    """

    name: str
    inputs: int
    hidden: tuple[int, ...]
    outputs: int = 0
    last_relu: bool = False
    norm: Norm = "none"
    dropout: float = 0.0

    @property
    def width(self) -> int:
        """Return the width of the output."""
        return self.outputs or (self.hidden[-1] if self.hidden else self.inputs)

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the specs of NAME.0.weight, NAME.0.bias, NAME.0.norm.weight, and so on."""
        specs: dict[str, ParameterSpec] = {}
        widths = (self.inputs, *self.hidden, *((self.outputs,) if self.outputs else ()))
        for index, (inputs, outputs) in enumerate(pairwise(widths)):
            specs |= linear_specs(f"{self.name}.{index}", inputs, outputs)
            if index < len(self.hidden) and self.norm != "none":
                specs[f"{self.name}.{index}.norm.weight"] = ParameterSpec(shape=(outputs,), value=1)
                specs[f"{self.name}.{index}.norm.bias"] = ParameterSpec(shape=(outputs,))
        return specs

    def buffers(self) -> dict[str, ParameterSpec]:
        """Return the specs of the batch norms' running statistics."""
        specs: dict[str, ParameterSpec] = {}
        for index, width in enumerate(self.hidden if self.norm == "batch" else ()):
            norm = f"{self.name}.{index}.norm"
            specs[f"{norm}.running_mean"] = ParameterSpec(shape=(width,))
            specs[f"{norm}.running_var"] = ParameterSpec(shape=(width,), value=1)
        return specs


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers(Generic[T]):
    """Runs layers on one batch, with parameters and buffers looked up by name.

    ``half`` is the compute dtype of linear layers, or None to compute in the weights' dtype. The
    weights keep their own dtype, in which ``whole`` layers compute. ``seed`` is the dropout seed.
    """

    functions: Functions[T]
    parameters: Mapping[str, T]
    buffers: Mapping[str, T]
    half: torch.dtype | None
    training: bool
    seed: int

    def linear(
        self, name: str, inputs: Sequence[T], *, whole: bool = False, fixed_bias: bool = False
    ) -> T:
        """Apply a linear layer to the concatenated ``inputs``: [b, widths] -> [b, outputs].

        A ``whole`` layer computes in the dtype of the weights. A ``fixed_bias`` has no gradient.
        """
        weight, bias = self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias")
        if fixed_bias and bias is not None:
            bias = bias.detach()
        dtype = weight.dtype if whole or self.half is None else self.half
        return self.functions.linear_of_parts(
            [self._cast(x, dtype, f"{name}.input.{n}") for n, x in enumerate(inputs)],
            self._cast(weight, dtype, f"{name}.weight"),
            None if bias is None else self._cast(bias, dtype, f"{name}.bias"),
            id=name,
        )

    def mlp(self, shape: MlpShape, inputs: Sequence[T]) -> T:
        """Apply an MLP, [b, widths] -> [b, shape.width]; the last linear layer is ``whole`` unless
        a ReLU follows.
        """
        f = self.functions
        for index in range(len(shape.hidden)):
            name = f"{shape.name}.{index}"
            # Batch norm subtracts the bias again, so the gradient of the bias is only rounding
            # error. Adam and RMSprop would scale it to full steps, which depend on the number of
            # ranks, and which the running mean of the evaluations follows only with a delay.
            x = self.linear(name, inputs, fixed_bias=shape.norm == "batch")
            x = self._norm(shape.norm, f"{name}.norm", x)
            dropping = {"relu": True, "training": self.training, "id": f"{name}.dropout"}
            inputs = [f.dropout(x, shape.dropout, self.seed, **dropping)]
        if shape.outputs:
            name = f"{shape.name}.{len(shape.hidden)}"
            last = self.linear(name, inputs, whole=not shape.last_relu)
            return f.relu(last) if shape.last_relu else last
        return inputs[0]

    def cross(self, names: Sequence[str], x: T) -> T:
        """Apply the cross layers ``names`` to ``x``: [b, n] -> [b, n]."""
        kinds = (".v.weight", ".w.weight", ".w.bias", ".weight", ".bias")
        tensors = self.parameters
        weights = [[tensors[n + kind] for kind in kinds if n + kind in tensors] for n in names]
        return self.functions.cross_network(x, weights, half=self.half, id="cross")

    def numeric_vectors(self, dense: T) -> T:
        """Multiply each dense field by the field's vector: [b, fields] -> [b, fields x dim]."""
        weight = self.parameters["numeric.weight"]
        (rows, count), dim = dense.shape, weight.shape[1]
        f = self.functions
        column = f.reshape(dense, (rows, count, 1), id="numeric.columns")
        return f.reshape(f.mul(column, weight, id="numeric"), (rows, count * dim), id="numeric.row")

    def total(self, terms: Sequence[T]) -> T:
        """Sum the terms [b, 1] of the logit in the dtype of the weights."""
        total = terms[0]
        for n, term in enumerate(terms[1:]):
            total = self.functions.add(total, term, id=f"logit.{n}")
        return total

    def narrow(self, x: T, id: str) -> T:
        """Cast ``x`` to the compute dtype, so that several linear layers share one cast."""
        return x if self.half is None else self._cast(x, self.half, id)

    def widen(self, x: T, id: str) -> T:
        """Cast ``x`` to the dtype of the weights."""
        return self._cast(x, next(iter(self.parameters.values())).dtype, id)

    def _norm(self, kind: Norm, name: str, x: T) -> T:
        if kind == "none":
            return x
        weight, bias = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        x = self._cast(x, weight.dtype, f"{name}.input")
        if kind == "layer":
            return self.functions.layer_norm(x, weight, bias, id=name)
        if kind == "batch":
            mean, var = self.buffers[f"{name}.running_mean"], self.buffers[f"{name}.running_var"]
            return self.functions.batch_norm(
                x, weight, bias, mean, var, training=self.training, id=name
            )
        raise unknown_value("model.norm", kind, Norm)

    def _cast(self, x: T, dtype: torch.dtype, id: str) -> T:
        return x if x.dtype == dtype else self.functions.cast(x, dtype, id=f"{id}.cast")

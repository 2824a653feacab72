"""Defines per-coordinate FTRL-Proximal (McMahan et al., KDD 2013, algorithm 1)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from sbpflow.embedding.rules.base import RowBlock, SparseOptimizer
from sbpflow.runtime.fields.keys import Key
from sbpflow.runtime.fields.ranges import Accumulator, Float32, NonNegative


@dataclass(frozen=True, kw_only=True, slots=True)
class Ftrl(SparseOptimizer):
    """Implements FTRL-Proximal, which produces sparse weights.

    A row keeps its initial values until it is touched, as in TensorFlow's Ftrl.
    """

    name: Literal["ftrl"] = "ftrl"
    beta: Annotated[
        NonNegative,
        Key("results", "Constant added to the square root of the sum of squared gradients."),
    ] = 1.0
    l1: Annotated[Float32, Key("results", "L1 penalty, which sets small weights to 0.")] = 0.0
    l2: Annotated[NonNegative, Key("results", "L2 penalty, which shrinks weights.")] = 0.0
    initial_accumulator: Accumulator = 0.0

    state: ClassVar = {"sum": "element", "linear": "element"}
    # weights are computed from ``linear``, a sum whose terms depend on the learning rate
    one_rate: ClassVar = "accumulates sums that assume a constant learning rate"

    def initial_state(self, name: str) -> float:
        return self.initial_accumulator if name == "sum" else 0.0

    def step(self, block: RowBlock) -> None:
        old = block.take("sum")
        total = old.addcmul(block.grads, block.grads)
        block.put("sum", total)
        root = total.sqrt_()
        linear = block.take("linear").add_(block.grads)
        linear.addcmul_((root - old.sqrt_()).div_(self.lr), block.weights, value=-1.0)
        block.put("linear", linear)
        beyond = linear - linear.clamp(-self.l1, self.l1)
        curvature = root.add_(self.beta).div_(self.lr).add_(self.l2)
        # With l1 = 0 and only zero gradients so far, the quotient could be 0 / 0.
        block.weights.copy_(torch.where(beyond == 0, 0.0, -beyond / curvature))

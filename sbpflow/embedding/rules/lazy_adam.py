"""Defines Adam for the rows of a batch, as in TensorFlow's LazyAdam and torch's SparseAdam."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from sbpflow.embedding.rules.base import RowBlock, RowDecay, SparseOptimizer, StepNumbers
from sbpflow.runtime.fields.ranges import Betas, Epsilon, LearningRate


@dataclass(frozen=True, kw_only=True, slots=True)
class LazyAdam(SparseOptimizer):
    """Applies Adam only to the rows of a batch; other rows keep their weights and state."""

    name: Literal["lazy_adam"] = "lazy_adam"
    lr: LearningRate = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-8
    weight_decay: RowDecay = 0.0

    state: ClassVar = {"exp_avg": "element", "exp_avg_sq": "element"}

    def numbers(self, lr: float, step: int) -> StepNumbers:
        """Return the ``StepNumbers`` of a training step. The rate includes the bias correction of
        the mean.

        Bias corrections use the step number of the job, not the number of updates of a row.
        """
        beta1, beta2 = self.betas
        rate, correction = lr / (1.0 - beta1**step), math.sqrt(1.0 - beta2**step)
        return StepNumbers(rate, 1.0 - lr * self.weight_decay, step, correction)

    def step(self, block: RowBlock) -> None:
        beta1, beta2 = self.betas
        mean = block.take("exp_avg").lerp_(block.grads, 1.0 - beta1)
        block.put("exp_avg", mean)
        square = block.take("exp_avg_sq").mul_(beta2)
        square.addcmul_(block.grads, block.grads, value=1.0 - beta2)
        block.put("exp_avg_sq", square)
        denominator = square.sqrt_().div_(block.numbers.correction).add_(self.eps)
        block.subtract_quotient(mean, denominator)

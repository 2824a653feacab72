"""What a sparse rule takes of a step: its rate, and what follows from the step's number.

These are numbers of the host. Within a captured CUDA graph such a number stays what it was, so for
one they are kept in memory of the device, which is written before each replay.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sbpflow.embedding.plan.optimizer import SparseOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """Numbers of the host; or 0-d tensors, of the arithmetic's dtype and int64."""

    rate: float | Tensor  # what a step is multiplied by; lazy Adam's with its first correction
    decay: float | Tensor  # what weights are multiplied by before it
    root: float | Tensor  # lazy Adam's second correction, 1 of other rules
    step: int | Tensor  # of the job, counted from 1

    @staticmethod
    def of(optimizer: SparseOptimizer, lr: float, step: int) -> "StepNumbers":
        """At the learning rate ``lr``."""
        rate, root = lr, 1.0
        if optimizer.name == "lazy_adam":
            # Bias correction by the job's step count, as TensorFlow's LazyAdam and torch's
            # SparseAdam.
            beta1, beta2 = optimizer.betas
            rate, root = lr / (1.0 - beta1**step), math.sqrt(1.0 - beta2**step)
        decay = 1.0 - lr * optimizer.weight_decay
        return StepNumbers(rate=rate, decay=decay, root=root, step=step)


class KeptNumbers:
    """Those of one storage, always in the same memory of its device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._words = torch.zeros(4, dtype=torch.int64, device=device)
        self.floats = self._words[:3].view(torch.float64)  # rate, decay, root

    def write(self, numbers: StepNumbers) -> None:
        """These, of the host, for all that the device is told from now on; nobody waits."""
        words = torch.empty(4, dtype=torch.int64, pin_memory=self._words.is_cuda)
        floats = words[:3].view(torch.float64)
        for place, value in enumerate((numbers.rate, numbers.decay, numbers.root)):
            floats[place] = value
        words[3] = numbers.step
        self._words.copy_(words, non_blocking=True)

    def read(self) -> StepNumbers:
        """What is there when the device comes to it."""
        rate, decay, root = self.floats.to(self._dtype).unbind()
        return StepNumbers(rate=rate, decay=decay, root=root, step=self._words[3])

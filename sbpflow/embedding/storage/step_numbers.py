"""Keeps the step-dependent numbers of a sparse optimizer in device memory.

A captured CUDA graph would freeze the Python numbers that ``SparseOptimizer.numbers`` returns. For
graphs, ``DeviceNumbers`` keeps these numbers in device memory, where the host sets them before each
replay.
"""

import torch

from sbpflow.embedding.rules.base import StepNumbers


class DeviceNumbers:
    """The ``StepNumbers`` of one store, at a fixed address in device memory."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._words = torch.zeros(4, dtype=torch.int64, device=device)
        self.floats = self._words[:3].view(torch.float64)  # rate, decay, correction

    def write(self, numbers: StepNumbers) -> None:
        """Set the numbers for all work that is submitted later; do not wait for the device."""
        words = torch.empty(4, dtype=torch.int64, pin_memory=self._words.is_cuda)
        floats = words[:3].view(torch.float64)
        for place, value in enumerate((numbers.rate, numbers.decay, numbers.correction)):
            floats[place] = value
        words[3] = numbers.step
        self._words.copy_(words, non_blocking=True)

    def read(self) -> StepNumbers:
        """Return the numbers as tensors, which the device reads when it executes the work."""
        rate, decay, correction = self.floats.to(self._dtype).unbind()
        return StepNumbers(rate, decay, self._words[3], correction)

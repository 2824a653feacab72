"""What a sparse optimizer takes of a step, in memory of the device.

``SparseOptimizer.numbers`` are of the host. Within a captured CUDA graph such a number stays what
it was, so for one they are kept on the device, and written before each replay.
"""

import torch

from sbpflow.embedding.rules.base import StepNumbers


class KeptNumbers:
    """Those of one storage, always in the same memory of its device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._words = torch.zeros(4, dtype=torch.int64, device=device)
        self.floats = self._words[:3].view(torch.float64)  # rate, decay, correction

    def write(self, numbers: StepNumbers) -> None:
        """These, of the host, for all that the device is told from now on; nobody waits."""
        words = torch.empty(4, dtype=torch.int64, pin_memory=self._words.is_cuda)
        floats = words[:3].view(torch.float64)
        for place, value in enumerate((numbers.rate, numbers.decay, numbers.correction)):
            floats[place] = value
        words[3] = numbers.step
        self._words.copy_(words, non_blocking=True)

    def read(self) -> StepNumbers:
        """What is there when the device comes to it."""
        rate, decay, correction = self.floats.to(self._dtype).unbind()
        return StepNumbers(rate, decay, self._words[3], correction)

"""Numbers of a device that the host wants to know, read without waiting for the device.

They are copied beside the work that follows, into pinned memory, and asked for later. On CPU they
are there at once.
"""

import torch
from torch import Tensor


class AsyncScalarRead:
    """A copy under way of ``values``, by the current stream; keeps them until ``wait``."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values, self._host = values, values
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The values in host memory; waits for what the device was told before them."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host

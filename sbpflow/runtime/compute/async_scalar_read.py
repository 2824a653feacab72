"""Reads small device tensors on the host without blocking the device.

A tensor is copied to pinned memory without blocking the host, and is read after the copy. On the
CPU, no copy is needed.
"""

import torch
from torch import Tensor


class AsyncScalarRead:
    """Copies ``values`` to the host on the current stream, and keeps a reference to them."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values, self._host = values, values
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """Wait for the copy; return the values in host memory."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host

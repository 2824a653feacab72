"""Where a forward takes random numbers from: they depend on a seed and a name alone.

Within a captured CUDA graph a number of the host stays what it was, and no generator may be seeded.
``KeptDraws`` keeps keys in memory of the device and seeds torch's generator before each replay.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from sbpflow.runtime.random.streams import stream_key


class Draws:
    """Anew each time."""

    def key(self, device: torch.device, seed: int, name: str) -> Tensor:
        """0-d int64 on ``device``: the key of the stream ``name`` of ``seed``."""
        return torch.full((), stream_key(seed, name), dtype=torch.int64, device=device)

    @contextmanager
    def of_torch(self, device: torch.device, seed: int, name: str) -> Generator[None]:
        """torch's own generators start from ``seed`` and ``name``, and are put back."""
        with seeded(stream_key(seed, name), device):
            yield


class KeptDraws(Draws):
    """Of a region that is run again and again, with another seed each time."""

    def __init__(self) -> None:
        self.capturing = False
        self._keys: dict[str, Tensor] = {}
        self._of_torch = ""

    def key(self, device: torch.device, seed: int, name: str) -> Tensor:
        """The same memory each time, filled anew but while a graph is captured."""
        if name not in self._keys:
            self._keys[name] = super().key(device, seed, name)
        elif not self.capturing:
            self._keys[name].fill_(stream_key(seed, name))
        return self._keys[name]

    @contextmanager
    def of_torch(self, device: torch.device, seed: int, name: str) -> Generator[None]:
        """As ``Draws``; while a graph is captured, from where the generators are."""
        self._of_torch = name
        if self.capturing:
            yield
            return
        with super().of_torch(device, seed, name):
            yield

    @contextmanager
    def replaying(self, device: torch.device, seed: int) -> Generator[None]:
        """A replay inside draws what a run with ``seed`` does."""
        for name, key in self._keys.items():
            key.fill_(stream_key(seed, name))
        if not self._of_torch:
            yield
            return
        with seeded(stream_key(seed, self._of_torch), device):
            yield


@contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None]:
    """torch's generators, that of a CUDA ``device`` too, start from ``seed`` and are put back."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield

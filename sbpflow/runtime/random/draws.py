"""Provides the random numbers of a forward pass, which depend only on a seed and a name.

A CUDA graph freezes the host values that it captures, and cannot seed a generator. Therefore
``KeptDraws`` stores keys in device memory and seeds torch's generator before each replay.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from sbpflow.runtime.random.streams import stream_key


class Draws:
    """Provides random numbers outside CUDA graphs."""

    def key(self, device: torch.device, seed: int, name: str) -> Tensor:
        """Return the key of stream ``name`` for ``seed``, as a 0-d int64 tensor on ``device``."""
        return torch.full((), stream_key(seed, name), dtype=torch.int64, device=device)

    @contextmanager
    def of_torch(self, device: torch.device, seed: int, name: str) -> Generator[None]:
        """Inside the context, seed torch's own generators from ``seed`` and ``name``."""
        with seeded(stream_key(seed, name), device):
            yield


class KeptDraws(Draws):
    """Provides random numbers for a captured graph that is replayed with different seeds."""

    def __init__(self) -> None:
        self.capturing = False
        self._keys: dict[str, Tensor] = {}
        self._of_torch = ""

    def key(self, device: torch.device, seed: int, name: str) -> Tensor:
        """Return the same tensor at every call; update its value unless a graph is being
        captured."""
        if name not in self._keys:
            self._keys[name] = super().key(device, seed, name)
        elif not self.capturing:
            self._keys[name].fill_(stream_key(seed, name))
        return self._keys[name]

    @contextmanager
    def of_torch(self, device: torch.device, seed: int, name: str) -> Generator[None]:
        """Seed torch's generators as ``Draws`` does, but not during the capture of a graph."""
        self._of_torch = name
        if self.capturing:
            yield
            return
        with super().of_torch(device, seed, name):
            yield

    @contextmanager
    def replaying(self, device: torch.device, seed: int) -> Generator[None]:
        """Inside the context, a replay uses the same random numbers as an ordinary forward pass
        with ``seed``.
        """
        for name, key in self._keys.items():
            key.fill_(stream_key(seed, name))
        if not self._of_torch:
            yield
            return
        with seeded(stream_key(seed, self._of_torch), device):
            yield


@contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None]:
    """Seed torch's generators, including that of a CUDA ``device``; restore them on exit."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield

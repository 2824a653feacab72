"""Generators of random numbers for a forward: what is drawn depends on a seed and a name alone.

Within a captured CUDA graph no generator may be made or seeded. ``KeptDraws`` keeps those of a
region from one run to the next, so that they are seeded before each replay and draw the same.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import torch

from sbpflow.runtime.streams import stream_key

Numbered = Callable[[int], torch.Generator]


class Draws:
    """New generators each time."""

    def numbered(self, device: torch.device, seed: int, name: str) -> Numbered:
        """number -> a generator at the start of the stream ``<name>/<number>`` of ``seed``."""
        one = torch.Generator(device)
        return lambda number: one.manual_seed(stream_key(seed, f"{name}/{number}"))

    @contextmanager
    def of_torch(self, device: torch.device, seed: int, name: str) -> Generator[None]:
        """torch's own generators start from ``seed`` and ``name``, and are put back."""
        with seeded(stream_key(seed, name), device):
            yield


class KeptDraws(Draws):
    """The generators of a region that is run again and again with another seed each time."""

    def __init__(self) -> None:
        self.capturing = False
        self._kept: dict[str, torch.Generator] = {}
        self._of_torch = ""

    @property
    def generators(self) -> Iterable[torch.Generator]:
        """Those drawn from so far, without torch's own."""
        return self._kept.values()

    def numbered(self, device: torch.device, seed: int, name: str) -> Numbered:
        def kept(number: int) -> torch.Generator:
            stream = f"{name}/{number}"
            if stream not in self._kept:
                self._kept[stream] = torch.Generator(device)
            found = self._kept[stream]
            return found if self.capturing else found.manual_seed(stream_key(seed, stream))

        return kept

    @contextmanager
    def of_torch(self, device: torch.device, seed: int, name: str) -> Generator[None]:
        self._of_torch = name
        if self.capturing:
            yield
            return
        with super().of_torch(device, seed, name):
            yield

    @contextmanager
    def replaying(self, device: torch.device, seed: int) -> Generator[None]:
        """All generators start from ``seed``: a replay inside draws what a run with it does."""
        for stream, generator in self._kept.items():
            generator.manual_seed(stream_key(seed, stream))
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

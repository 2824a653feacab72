"""Implements a kernel for tests: the torch kernel under another name, which counts its calls."""

from sbpflow.embedding.rules.kernels import Kernel
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.runtime.compute.doctor import Finding

warmed: list = []  # The arguments of each call to ``warm_up``.
updates: list = []  # The name of the optimizer of each update.
indexers: list = []  # The indexer of each deduplicated lookup.


class OwnStorage(TorchStorage):
    name = "own"

    def update(self, lookup, grads, lr, step):
        updates.append(self.optimizer.name)
        super().update(lookup, grads, lr, step)


class OwnIndexer:
    def __init__(self, num_addresses):
        self.num_addresses = num_addresses

    def wrap(self, lookup):
        indexers.append(self)
        return lookup


def warm_up(rules, dtype, row_dtype):
    warmed.append(([rule.name for rule in rules], dtype, row_dtype))


OWN = Kernel(
    label="Own",
    packages=("torch",),
    is_installed=lambda: True,
    fault=lambda stack: None if stack.width < 64 else "own rows have fewer than 64 columns",
    reason="for the test",
    check=lambda: Finding("own", "ok", "works"),
    storage=f"{__name__}:OwnStorage",
    warm_up=f"{__name__}:warm_up",
    indexer=f"{__name__}:OwnIndexer",
)
FUNCTION = f"{__name__}:OwnStorage"  # An optimizer's function for the kernel, which is not called.

"""Collects the checks of kernels for ``doctor``. Importing this module does not import torch, whose
installation may be broken.
"""

from sbpflow.embedding.rules.kernels import COMPILED
from sbpflow.runtime.compute.doctor import Check


def kernel_checks() -> dict[str, Check]:
    """Return the check of each kernel, by name."""
    return {name: kernel.check for name, kernel in COMPILED.items()}

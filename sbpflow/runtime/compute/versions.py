"""Which builds fit together, and what to install where they do not.

Importing this file imports neither torch nor FBGEMM. The pairs follow FBGEMM's releases; 1.8.0 with
torch 2.13.0 was run on CPU (2026), and 1.9.0 with torch 2.13.0 was seen failing to load.
"""

import importlib
import os
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

from sbpflow.errors import ConfigError

SBPFLOW_VERSION = "0.1.0"
# FBGEMM is compiled against one torch: same row or it does not load.
FBGEMM_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8"}
_FBGEMM_DISTS = ("fbgemm-gpu-cpu", "fbgemm-gpu")


@dataclass(frozen=True, slots=True)
class Installed:
    """Versions found in this environment; None where a package is absent."""

    torch: str | None
    fbgemm: str | None
    fbgemm_dist: str | None

    @staticmethod
    def find() -> "Installed":
        """Reads package metadata only, so it works where the packages do not load."""
        found = [(name, version) for name in _FBGEMM_DISTS if (version := dist_version(name))]
        if len(found) > 1:
            names = " and ".join(f"{name} {version}" for name, version in found)
            raise ConfigError(
                f"{names} are both installed and overwrite each other's files; run "
                f"pip uninstall -y {' '.join(name for name, _ in found)}, then "
                f"{install_command(dist_version('torch'), found[0][0])}"
            )
        name, version = found[0] if found else (None, None)
        return Installed(dist_version("torch"), version, name)


def dist_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def minor(version: str) -> str:
    """``2.13.0+cpu`` -> ``2.13``."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check_pair(installed: Installed) -> None:
    """ConfigError if FBGEMM is installed and was not built for the torch installed."""
    torch, fbgemm = installed.torch, installed.fbgemm
    if torch is None or fbgemm is None or installed.fbgemm_dist is None:
        return
    wanted = FBGEMM_OF_TORCH.get(minor(torch))
    if wanted != minor(fbgemm):
        raise ConfigError(_mismatch(installed, "they do not fit together"))


def import_fbgemm() -> ModuleType | None:
    """The loaded ``fbgemm_gpu``; None if it is not installed; ConfigError if it does not fit."""
    installed = Installed.find()
    if installed.fbgemm is None:
        return None
    check_pair(installed)
    try:
        return importlib.import_module("fbgemm_gpu")
    except (ImportError, OSError, AttributeError) as error:
        # A wrong ABI shows as an undefined symbol, a missing library, or an op nobody registered.
        reason = str(error).strip().split("\n", 1)[0]
        raise ConfigError(_mismatch(installed, f"importing it fails: {reason}")) from error


def install_command(torch: str | None, fbgemm_dist: str) -> str:
    """The pip command for an FBGEMM that fits ``torch``, or for the newest pair known."""
    known = minor(torch) if torch is not None and minor(torch) in FBGEMM_OF_TORCH else None
    pair = known or list(FBGEMM_OF_TORCH)[-1]
    torch_pin = (torch or "").split("+")[0] if known else f"{pair}.0"
    return f"pip install torch=={torch_pin} {fbgemm_dist}=={FBGEMM_OF_TORCH[pair]}.0"


def _mismatch(installed: Installed, why: str) -> str:
    dist = installed.fbgemm_dist or _FBGEMM_DISTS[0]
    return (
        f"torch {installed.torch} and {dist} {installed.fbgemm}: {why}; use "
        f"{install_command(installed.torch, dist)}, or parallel.kernel=torch"
    )


def build_facts() -> dict[str, str]:
    """The builds that ranks of one run must share: what they compute and send depends on them."""
    names = ("torch", "sbpflow", *_FBGEMM_DISTS)
    return {name: dist_version(name) or "not installed" for name in names}


def summary() -> dict[str, str]:
    """What a run should name at its start; packages that are absent say so."""
    import platform

    import torch

    names = ("numpy", *_FBGEMM_DISTS, "nvidia-dali-cuda130", "tensorboard")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: dist_version(name) or "not installed" for name in names}
    versions["cuda"] = torch.version.cuda or "not in this build"
    versions["cores"] = f"{len(os.sched_getaffinity(0))}, {torch.get_num_threads()} torch threads"
    return versions

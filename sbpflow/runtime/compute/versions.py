"""Checks that the installed torch and FBGEMM are compatible, or says what to install.

Importing this module loads neither torch nor FBGEMM. The compatible pairs follow FBGEMM's
releases. On CPU with torch 2.13.0 (2026), FBGEMM 1.8.0 worked, and FBGEMM 1.9.0 failed to load.
"""

import importlib
import os
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

from sbpflow.errors import ConfigError

SBPFLOW_VERSION = "0.1.0"
# Each FBGEMM release is compiled against one torch version and loads only with that version.
FBGEMM_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8"}
_FBGEMM_DISTS = ("fbgemm-gpu-cpu", "fbgemm-gpu")


@dataclass(frozen=True, slots=True)
class Installed:
    """The installed versions; None stands for a package that is not installed."""

    torch: str | None
    fbgemm: str | None
    fbgemm_dist: str | None

    @staticmethod
    def find() -> "Installed":
        """Read the versions from package metadata, which works even if the packages do not load."""
        dists = [(name, version) for name in _FBGEMM_DISTS if (version := dist_version(name))]
        if len(dists) > 1:
            names = " and ".join(f"{name} {version}" for name, version in dists)
            raise ConfigError(
                f"{names} are both installed and overwrite each other's files; run "
                f"pip uninstall -y {' '.join(name for name, _ in dists)}, then "
                f"{install_command(dist_version('torch'), dists[0][0])}"
            )
        name, version = dists[0] if dists else (None, None)
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
    """Raise ConfigError if FBGEMM was not built for the installed torch."""
    torch, fbgemm = installed.torch, installed.fbgemm
    if torch is None or fbgemm is None or installed.fbgemm_dist is None:
        return
    if FBGEMM_OF_TORCH.get(minor(torch)) != minor(fbgemm):
        raise ConfigError(_mismatch(installed, "FBGEMM's releases do not pair these versions"))


def has_fbgemm() -> bool:
    """Return whether FBGEMM is installed, without importing it, which takes half a second. Raise
    ConfigError if its version does not match the installed torch.
    """
    installed = Installed.find()
    check_pair(installed)
    return installed.fbgemm is not None


def import_fbgemm() -> ModuleType | None:
    """Import ``fbgemm_gpu`` if installed; raise ConfigError if it does not match the installed
    torch."""
    if not has_fbgemm():
        return None
    try:
        return importlib.import_module("fbgemm_gpu")
    except (ImportError, OSError, AttributeError) as error:
        # An ABI mismatch shows up as an undefined symbol, a missing library, or an unregistered
        # operator.
        reason = str(error).strip().split("\n", 1)[0]
        fault = _mismatch(Installed.find(), f"the import fails: {reason}")
        raise ConfigError(fault) from error


def install_command(torch: str | None, fbgemm_dist: str) -> str:
    """Return the pip command that installs a matching version of FBGEMM for ``torch`` or, for an
    unknown version of torch, the newest known versions of both."""
    known = minor(torch) if torch is not None and minor(torch) in FBGEMM_OF_TORCH else None
    pair = known or list(FBGEMM_OF_TORCH)[-1]
    torch_pin = (torch or "").split("+")[0] if known else f"{pair}.0"
    return f"pip install torch=={torch_pin} {fbgemm_dist}=={FBGEMM_OF_TORCH[pair]}.0"


def _mismatch(installed: Installed, why: str) -> str:
    dist = installed.fbgemm_dist or _FBGEMM_DISTS[0]
    return (
        f"torch {installed.torch} and {dist} {installed.fbgemm} are not compatible: {why}; use "
        f"{install_command(installed.torch, dist)}, or parallel.kernel=torch"
    )


def build_facts() -> dict[str, str]:
    """Return the versions that must be equal on all ranks, because they affect the results."""
    names = ("torch", "sbpflow", *_FBGEMM_DISTS)
    return {name: dist_version(name) or "not installed" for name in names}


def summary() -> dict[str, str]:
    """Return the versions that a run logs at startup."""
    import platform

    import torch

    names = ("numpy", *_FBGEMM_DISTS, "nvidia-dali-cuda130", "tensorboard")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: dist_version(name) or "not installed" for name in names}
    versions["cuda"] = torch.version.cuda or "not in this build"
    versions["cores"] = f"{len(os.sched_getaffinity(0))}, {torch.get_num_threads()} torch threads"
    return versions

"""Chooses the device of a rank, and explains why an expected GPU is not used."""

import contextlib
import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sbpflow.errors import ConfigError

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "meta": "gloo"}
"""Maps device types to c10d backends; "meta", for dry runs, never sends data."""
_DRIVER = Path("/proc/driver/nvidia/version")
_CGROUPS, _CGROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def backend_of_device(device_type: str) -> str:
    """Return the c10d backend for tensors of a device type: "nccl" or "gloo"."""
    return BACKENDS[device_type]


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy host values to ``device``, through pinned memory, so that the host does not wait for
    the current stream of a GPU. Values on ``device`` are returned unchanged.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def choose_device(device: str, local_rank: int) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda"; raise ConfigError if the device is
    unavailable.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, or cuda, got {device!r}")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(
            "parallel.device: cuda is not available, because "
            f"{why_no_cuda() or 'this torch is a CPU build'}; use parallel.device=cpu, or a "
            "machine and a torch build with CUDA"
        )
    if device == "cpu" or not available:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK is {local_rank}, but this host has {count} CUDA device(s), and NCCL needs "
            f"one per rank; start at most {count} ranks here (for example, torchrun "
            f"--nproc-per-node {count}), or use parallel.device=cpu"
        )
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    return chosen


def why_no_cuda() -> str:
    """Return why torch cannot use CUDA although the machine or the build supports it, or ""."""
    driver = _DRIVER.exists()
    if torch.version.cuda is None:
        if not driver:
            return ""
        return (
            f"torch {torch.__version__} is a CPU build although an NVIDIA driver is installed; "
            "install a CUDA build, or use parallel.device=cpu"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        hint = "" if driver else "; no NVIDIA driver is loaded"
        return f"torch {torch.__version__} cannot use CUDA: {reason}{hint}"
    return f"torch {torch.__version__} sees no CUDA device; check CUDA_VISIBLE_DEVICES"


def memory_bytes(device_type: str) -> int | None:
    """Return the memory in bytes of this rank's GPU, or, on CPU, the memory that this process may
    use; ``None`` if unknown.
    """
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return None
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return min([physical, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    """Yield the memory limits in bytes of this process's control groups (versions 1 and 2), which
    containers and job schedulers set.
    """
    try:
        lines = _CGROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit = _CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, limit = _CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container, the path may be the host's, so only the root exists.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                with contextlib.suppress(OSError):
                    text = (folder / limit).read_text().strip()
                    if text.isdecimal():  # otherwise "max"
                        yield int(text)


def device_name(device: torch.device) -> str:
    """Return the device's name, model, and host, for logs."""
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device} ({model}) on {platform.node()}"

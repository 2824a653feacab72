"""Which device a rank gets, and why it is not a GPU where one might be expected."""

import os
import platform
import warnings
from pathlib import Path

import torch

from sbpflow.errors import ConfigError

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "meta": "gloo"}
"""By type of device; nothing is sent from meta tensors, those of a dry run."""
_DRIVER = Path("/proc/driver/nvidia/version")


def backend_of_device(device_type: str) -> str:
    """The c10d backend that moves tensors of this kind of device: "nccl" or "gloo"."""
    return BACKENDS[device_type]


def choose_device(device: str, local_rank: int) -> torch.device:
    """The device of a rank for "auto", "cpu" or "cuda"; ConfigError if it is not there."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not known; use auto, cpu or cuda")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(
            f"parallel.device: cuda, but {why_no_cuda() or 'this torch is a CPU build'}; use "
            "parallel.device=cpu, or a machine and a build of torch that have CUDA"
        )
    if device == "cpu" or not available:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK is {local_rank}, but this host has {count} CUDA device(s), and NCCL takes "
            f"one rank for each; start at most {count} on it, for example torchrun "
            f"--nproc-per-node {count}, or use parallel.device=cpu"
        )
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    return chosen


def why_no_cuda() -> str:
    """What keeps torch from CUDA on a machine, or with a build, that is made for it; else ""."""
    driver = _DRIVER.exists()
    if torch.version.cuda is None:
        if not driver:
            return ""
        return (
            f"torch {torch.__version__} is a CPU build though an NVIDIA driver is here; install a "
            "CUDA build, or say parallel.device=cpu"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        there = "" if driver else "; no NVIDIA driver is loaded"
        return f"torch {torch.__version__} cannot use CUDA: {reason}{there}"
    return f"torch {torch.__version__} sees no CUDA device; see CUDA_VISIBLE_DEVICES"


def memory_bytes(device_type: str) -> int | None:
    """Of this rank's GPU, or of this machine for all of its ranks; ``None`` if unknown."""
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return None
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def device_name(device: torch.device) -> str:
    """The device and what it is, on which host, for summaries."""
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device} ({what}) on {platform.node()}"

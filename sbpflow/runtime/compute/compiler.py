"""Finds compilers for torch.compile, sets its cache folder, and times half-precision math."""

import atexit
import os
import shutil
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sbpflow.runtime.files.cache_dir import code_cache

CPP_COMPILERS = ("g++", "clang++", "c++")
C_COMPILERS = ("gcc", "clang", "cc")


def compiler_problem(device_type: str) -> str:
    """Return why torch.compile cannot compile for a device and what to install, or "" if it can."""
    if device_type == "cuda":
        if find_spec("triton") is None:
            return "triton, which compiles for CUDA, is not installed; run pip install triton"
        names, given, kind = C_COMPILERS, os.environ.get("CC"), "C"
    elif device_type == "cpu":
        names, given, kind = CPP_COMPILERS, os.environ.get("CXX"), "C++"
    else:
        raise ValueError(f"the device must be cpu or cuda, got {device_type!r}")
    wanted = (given,) if given else names
    if any(shutil.which(name) for name in wanted):
        return ""
    return f"no {kind} compiler was found (tried {', '.join(wanted)}); install {names[0]}"


def keep_compiled_privately() -> None:
    """Make torch.compile cache code in the user's cache, unless TORCHINDUCTOR_CACHE_DIR is set.

    torch's default cache has a predictable name in the shared temporary folder, so any local user
    could create it first, and torch executes its contents. torch always stores precompiled headers
    in that default cache, so this function disables precompiled headers. Call this function before
    compiling anything.
    """
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # If torch's tracer is already loaded, it may have set the variable to torch's default.
    shared = Path(tempfile.gettempdir()).absolute()
    if given is not None and (
        Path(given).parent != shared or not Path(given).name.startswith("torchinductor_")
    ):
        return
    os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    inductor: Any = sys.modules.get("torch._inductor.config")
    if inductor is not None:  # torch has already read the variable
        inductor.cpp_cache_precompile_headers = False
    folder = code_cache("inductor")
    if folder is None:  # ``torch.compile`` needs files; create a private folder for this process
        folder = Path(tempfile.mkdtemp(prefix="sbpflow-inductor-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def half_time(half: torch.dtype, *, rows: int = 512, width: int = 512, repeats: int = 5) -> float:
    """Return the time of a matrix product in dtype ``half``, including casts, relative to float32.
    Both times are the best of ``1 + repeats`` runs, and all runs take a few milliseconds in total.
    """
    x, weight = torch.ones(rows, width), torch.ones(width, width)
    products = (lambda: x.to(half) @ weight.to(half), lambda: x @ weight)
    best = [float("inf")] * 2
    for _ in range(1 + repeats):
        for number, product in enumerate(products):
            start = time.perf_counter()
            product()
            best[number] = min(best[number], time.perf_counter() - start)
    return best[0] / best[1]

"""What of compiling and of narrow arithmetic this machine offers: found, or measured."""

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
    """Why torch.compile has no compiler for the device, with what to install; "" if it has."""
    if device_type == "cuda":
        if find_spec("triton") is None:
            return "triton is not installed, which compiles for CUDA: pip install triton"
        names, given, kind = C_COMPILERS, os.environ.get("CC"), "C"
    elif device_type == "cpu":
        names, given, kind = CPP_COMPILERS, os.environ.get("CXX"), "C++"
    else:
        raise ValueError(f"device {device_type!r}; use cpu or cuda")
    wanted = (given,) if given else names
    if any(shutil.which(name) for name in wanted):
        return ""
    return f"there is no {kind} compiler (looked for {', '.join(wanted)}): install {names[0]}"


def keep_compiled_privately() -> None:
    """Where torch.compile keeps its code, unless TORCHINDUCTOR_CACHE_DIR says: the user's cache.

    torch's own choice has a known name in the shared temporary folder, so any local user can make
    it first, and torch executes what it finds there. Precompiled headers, which are there whatever
    the variable says, are off. Call it before anything is compiled.
    """
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # torch writes its own choice into the variable when it loads its tracer, which may be before.
    own = Path(tempfile.gettempdir()).absolute()
    if given is not None and (
        Path(given).parent != own or not Path(given).name.startswith("torchinductor_")
    ):
        return
    os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    inductor: Any = sys.modules.get("torch._inductor.config")
    if inductor is not None:  # it has read the variable
        inductor.cpp_cache_precompile_headers = False
    folder = code_cache("inductor")
    if folder is None:  # torch.compile needs files: of this process alone, gone with it
        folder = Path(tempfile.mkdtemp(prefix="sbpflow-inductor-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def half_time(half: torch.dtype, *, rows: int = 512, width: int = 512, repeats: int = 5) -> float:
    """Time of a product on this CPU in ``half``, with the casts that it needs, by that in float32.

    The best of ``repeats`` of each; a few milliseconds.
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

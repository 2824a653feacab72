"""Runs all tests and measurements that need a GPU.

The parts are tests, the dense part, the DLPerf sweep, TorchRec, kernels, a trace, and NCCL. Each
part is a process with a time limit, and runs even if other parts failed, except for the parts that
need a working collective. benchmarks/results/gpu.jsonl has a line for each part, and measurements
are written to gpu_*.jsonl. If a package is missing, the part is skipped with a message.

    make gpu PYTHON=...      or      python -m benchmarks.gpu [--limit-s S] [--only PART ...]
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 450.0  # time limit for all parts together
LEAST_S = 10.0  # a part is not started if less time than this remains

NEEDED = {
    "torch": "a build for CUDA 13 (for example, torch==2.11.0)",
    "numpy": "pip install numpy",
    "yaml": "pip install pyyaml",
    "tqdm": "pip install tqdm",
    "pytest": "pip install pytest",
}
# Optional packages, and what happens without them.
USED = {
    "triton": "torch's slower kernels update the rows",
    "hypothesis": "the Triton kernels' tests are skipped",
    "fbgemm_gpu": "no comparison with FBGEMM's kernels",
    "nvidia.dali": "data.loader: auto reads with memmap",
    "polars": "data cannot be prepared from text; the parts generate their own data",
    "torchrec": "no comparison with TorchRec",
}


@dataclass(frozen=True)
class Part:
    """A part: a command, its time limit in seconds, and the packages that it needs."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    needs: tuple[str, ...] = ()
    after: str = ""  # name of another part; if it fails, this part is skipped


def _pytest(*words: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-p", "no:cacheprovider", *words)


KERNEL_TESTS = ("tests/embedding/test_triton.py", "tests/sbp/test_dropout.py")
GPU_TESTS = ("tests/sbp/test_cuda.py", "tests/training/test_gpu.py")
PARTS = (
    Part("gpu tests", _pytest("-m", "gpu", *GPU_TESTS), 90),
    Part("kernel tests", _pytest(*KERNEL_TESTS), 90, ("triton", "hypothesis")),
    Part("mlp", ("-m", "benchmarks.gpu_mlp"), 60),
    Part("dlperf", ("-m", "benchmarks.gpu_dlperf", "parallel.cuda_graph=false"), 90),
    # The graph is a separate part, because a failure during capture may leave the device unusable.
    Part("dlperf graph", ("-m", "benchmarks.gpu_dlperf"), 90),
    Part("torchrec", ("-m", "benchmarks.gpu_torchrec"), 120, ("torchrec", "fbgemm_gpu")),
    Part("tables", ("-m", "benchmarks.gpu_tables"), 90, ("torchrec", "fbgemm_gpu", "numba")),
    Part("kernels", ("-m", "benchmarks.gpu_kernels"), 60),
    Part("trace", ("-m", "benchmarks.gpu_trace"), 40),
    Part("collective", ("-m", "benchmarks.gpu_ranks", "collective"), 40),
    Part("nccl tests", _pytest("-m", "nccl", *GPU_TESTS), 90, after="collective"),
    Part("overlap", ("-m", "benchmarks.gpu_ranks", "overlap"), 60, after="collective"),
)


def is_there(name: str) -> bool:
    """Return whether a package is installed, importing only its parent packages."""
    parent, _, _ = name.rpartition(".")
    return not (parent and not is_there(parent)) and importlib.util.find_spec(name) is not None


def shortcomings() -> tuple[list[str], list[str]]:
    """Return (missing requirements, missing optional packages), with one line per item."""
    fatal = [f"make gpu needs {name}: {how}" for name, how in NEEDED.items() if not is_there(name)]
    if not fatal:
        import torch

        if not torch.cuda.is_available():
            fatal.append(f"make gpu needs a CUDA device; torch {torch.__version__} sees none")
    return fatal, [f"{name} is absent: {what}" for name, what in USED.items() if not is_there(name)]


def run_part(part: Part, limit_s: float) -> tuple[bool, str]:
    """Run the part, and kill its remaining processes at the end; return whether it succeeded and,
    if not, the reason.
    """
    process = subprocess.Popen([sys.executable, *part.command], cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False, f"not finished after {limit_s:.0f} s"
    finally:
        _end(process)
    return status == 0, "" if status == 0 else f"exit code {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes in the part's session, including the ranks that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_parts(
    parts: Sequence[Part],
    add: Callable[..., None],
    *,
    limit_s: float,
    run: Callable[[Part, float], tuple[bool, str]] = run_part,
) -> bool:
    """Run the parts one after another, skipping those that need a part that failed; call ``add``
    with a line for each part.
    """
    begin = time.monotonic()
    passed: dict[str, bool] = {}
    for part in parts:
        left = limit_s - (time.monotonic() - begin)
        absent = [name for name in part.needs if not is_there(name)]
        why = f"skipped: {', '.join(absent)} absent" if absent else ""
        if part.after and not passed.get(part.after, True):
            why = f"skipped: {part.after} failed"
        if left < LEAST_S:
            limits = f"{LEAST_S:.0f} s remain of the total time limit of {limit_s:.0f} s"
            why = f"skipped: less than {limits}"
        start = time.monotonic()
        if not why:
            sys.stdout.write(f"== {part.name}\n")
            sys.stdout.flush()
            passed[part.name], why = run(part, min(part.limit_s, left))
        add(
            benchmark="part",
            part=part.name,
            passed=passed.get(part.name),
            why=why,
            seconds=round(time.monotonic() - start, 1),
        )
    return all(passed.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART")
    args = parser.parse_args(argv)
    fatal, absent = shortcomings()
    for line in (*fatal, *absent):
        sys.stderr.write(line + "\n")
    if fatal:
        return 2
    from benchmarks.record import Results

    parts = [part for part in PARTS if args.only is None or part.name in args.only]
    results = Results("gpu", recorded=args.only is None)
    return 0 if run_parts(parts, results.add, limit_s=args.limit_s) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Writes a Chrome trace of three training steps with the DLPerf shape.

python -m benchmarks.gpu_trace [--rows N] [--output FILE] [key=value ...]
"""

import argparse
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_dlperf import FIRST_ROWS, batches, make_job
from benchmarks.record import RESULTS, Results
from sbpflow.config.load import load_config
from sbpflow.config.schema import Config
from sbpflow.models.registry import MODELS
from sbpflow.runtime.ranks.world import World

TRACED_STEPS = 3


def trace(rows: int, config: Config, world: World, output: Path) -> dict[str, object]:
    """Trace steps 6 to 8; the result contains the 16 longest kernels, per step."""
    job, fields = make_job(rows, config, world)
    source = batches(config, fields, world.device)
    for _ in range(5):
        job.trainer.step(next(source))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as made:
        for _ in range(TRACED_STEPS):
            job.trainer.step(next(source))
        torch.cuda.synchronize()
    output.parent.mkdir(parents=True, exist_ok=True)
    made.export_chrome_trace(str(output))
    kernels = [e for e in made.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: e.self_device_time_total, reverse=True)
    longest = [
        {
            "name": e.key[:100],
            "launches": e.count / TRACED_STEPS,
            "ms": round(e.self_device_time_total / 1e3 / TRACED_STEPS, 3),
        }
        for e in kernels[:16]
    ]
    total = sum(e.self_device_time_total for e in kernels) / 1e3 / TRACED_STEPS
    return {
        "rows": rows,
        "trace": output.name,
        "device_ms_per_step": round(total, 2),
        "longest": longest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=FIRST_ROWS)
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_trace.json")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    # without a graph, the trace names the operations
    overrides = ["parallel.device=cuda", "parallel.cuda_graph=false", *args.overrides]
    config = load_config("configs/dlperf.yaml", overrides, models=MODELS)
    results = Results("gpu_trace", recorded=args.rows == FIRST_ROWS)
    with World.start("cuda") as world:
        results.add(benchmark="trace", **trace(args.rows, config, world, args.output))


if __name__ == "__main__":
    main()

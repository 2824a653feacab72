"""Times only the DLPerf model's dense part at torch's best speed: a lower limit for the step time.

The work consists of forward, loss, backward, and Adam for 429 -> 7 x 1024 -> 1 at batch 16384. The
step is compiled and replayed as one CUDA graph, in IEEE float32, TF32, and bfloat16 autocast.

    python -m benchmarks.gpu_mlp [--batch-size N] [--no-compile]
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.device_timer import timed_ms
from benchmarks.record import Results

WIDTHS = (429, *[1024] * 7, 1)
PRECISIONS = ("float32", "tf32", "bfloat16")


def make_mlp(widths: tuple[int, ...], dropout: float, device: torch.device) -> nn.Sequential:
    """Build linear, ReLU, and dropout layers; no ReLU or dropout follows the last linear layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, device=device), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])


def autocast_of(precision: str, device: torch.device) -> AbstractContextManager[object]:
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def measure(
    precision: str,
    *,
    batch_size: int,
    device: torch.device,
    widths: tuple[int, ...] = WIDTHS,
    compile: bool = True,
    graph: bool = True,
    steps: int = 20,
) -> dict[str, float]:
    """Measure the ms per step. The TFLOP/s are computed from three multiply-adds per weight and
    sample.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    model = make_mlp(widths, 0.5, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=graph, fused=graph)
    x = torch.rand(batch_size, widths[0], device=device)
    labels = torch.zeros(batch_size, 1, device=device)
    forward = torch.compile(model) if compile else model

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        with autocast_of(precision, device):
            logits = forward(x)
        loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
        loss.backward()
        optimizer.step()
        return loss

    work = _captured(step) if graph else step
    figures = timed_ms(work, steps=steps)
    products = sum(a * b for a, b in pairwise(widths))
    return figures | {"tflop_per_s": 6e-9 * products * batch_size / figures["ms"]}


def _captured(step: Callable[[], Tensor]) -> Callable[[], None]:
    """Capture ``step`` as one CUDA graph, after three runs on a side stream, as torch requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        step()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=16384)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    results = Results("gpu_mlp", recorded=args.batch_size == 16384)
    for precision in PRECISIONS:
        figures = measure(
            precision,
            batch_size=args.batch_size,
            device=torch.device("cuda"),
            compile=not args.no_compile,
        )
        results.add(
            benchmark="mlp_alone",
            precision=precision,
            batch_size=args.batch_size,
            widths=list(WIDTHS),
            compiled=not args.no_compile,
            **figures,
        )


if __name__ == "__main__":
    main()

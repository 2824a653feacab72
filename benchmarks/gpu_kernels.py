"""Compares the storages on a GPU: Triton, torch, and, if installed, FBGEMM.

The work consists of looking up and updating 16-column rows for 26 x 16384 Zipf-like ids. The output
includes the number of distinct ids, which determines how many bytes must be moved. Results are
compared before timing.

    python -m benchmarks.gpu_kernels [--ids N] [--rows N]
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.device_timer import timed_ms
from benchmarks.record import Results
from sbpflow.embedding.rules.registry import RULES, sparse_optimizer
from sbpflow.embedding.storage import fbgemm_rules
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.fbgemm_storage import FbgemmStorage
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.runtime.compute.versions import import_fbgemm

IDS, ROWS, WIDTH = 26 * 16384, 51_200_000, 16


def storages(rule: str, rows: int, device: torch.device) -> Iterator[tuple[str, RowKernel]]:
    """Yield one storage after another, because two large storages may not fit in memory."""
    optimizer = sparse_optimizer(rule, lr=0.01)
    shared = {"dim": WIDTH, "optimizer": optimizer, "device": device, "dtype": torch.float32}
    yield "torch", TorchStorage(rows, WIDTH, **shared)
    try:
        from sbpflow.embedding.storage.triton_storage import TritonStorage
    except ImportError:
        pass
    else:
        yield "triton", TritonStorage(rows, WIDTH, **shared)
    if hasattr(fbgemm_rules, rule) and import_fbgemm() is not None:
        yield "fbgemm", FbgemmStorage(rows, WIDTH, optimizer=optimizer, device=device)


def make_ids(count: int, rows: int, device: torch.device) -> Tensor:
    """Generate ids from uniform numbers to the power of 4: a Zipf-like concentration with thousands
    of equal ids.
    """
    generator = torch.Generator(device).manual_seed(1)
    uniform = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
    return (uniform**4 * rows).to(torch.int64)


def measure(
    rule: str, *, ids: int, rows: int, device: torch.device, steps: int = 20
) -> Iterator[dict[str, object]]:
    """Yield one line per kernel; raise AssertionError if a result differs from torch's beyond
    rounding.
    """
    addresses = make_ids(ids, rows, device)
    grads = torch.randn(ids, WIDTH, device=device)
    expected: Tensor | None = None
    for name, storage in storages(rule, rows, device):
        storage.update(Lookup(addresses), grads, 0.01, 1)
        vectors = storage.lookup(Lookup(addresses))
        expected = vectors if expected is None else expected
        # The kernels add thousands of float32 gradients in different orders.
        torch.testing.assert_close(vectors, expected, rtol=1e-3, atol=1e-3)
        del vectors
        access = Lookup(addresses)
        lookup = timed_ms(lambda s=storage, a=access: s.lookup(a), steps=steps)
        update = timed_ms(
            lambda s=storage: s.update(Lookup(addresses), grads, 0.01, 2), steps=steps
        )
        yield {
            "kernel": name,
            "rule": rule,
            "ids": ids,
            "unique": int(torch.unique(addresses).numel()),
            "rows": rows,
            "lookup_ms": lookup["ms"],
            "update_and_sort_ms": update["ms"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ids", type=int, default=IDS)
    parser.add_argument("--rows", type=int, default=ROWS)
    args = parser.parse_args()
    results = Results("gpu_kernels", recorded=(args.ids, args.rows) == (IDS, ROWS))
    for rule in RULES:
        for line in measure(rule, ids=args.ids, rows=args.rows, device=torch.device("cuda")):
            results.add(benchmark="storage_kernels", **line)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

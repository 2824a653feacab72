"""Tests whether the kernel chosen by measurement is the fastest: ``python -m benchmarks.chooser``.

The storage shapes are random (rows, widths, batch, bags, exchange, rule, skew). For each shape, the
kernels are measured and one is chosen, as at the first start of a run. Then all kernels are
measured again. The result is the slowdown of the chosen kernel relative to the fastest one. The
program writes benchmarks/results/chooser.jsonl, with one line per shape and one line for all
shapes. With a different number of shapes, it only prints the results.
"""

import argparse
import random
from dataclasses import asdict

import torch

from benchmarks.record import Results
from sbpflow.embedding.rules.kernels import StackFacts
from sbpflow.embedding.rules.registry import RULES, sparse_optimizer
from sbpflow.embedding.storage.choose import (
    choose_kernel,
    kernel_faults,
    missing_kernels,
)
from sbpflow.embedding.storage.measure import StackShape, choose_by_times, measure

SHAPES = 20


def draw(generator: random.Random) -> StackShape:
    """Return a random shape: a batch of up to 63,000 ids on up to 3.2 million rows."""
    dim = generator.choice([1, 4, 8, 16, 32, 64, 128])
    lists = generator.choice([0, 0, 2, 4])
    ids = int(10 ** generator.uniform(3, 4.8))
    return StackShape(
        rows=int(10 ** generator.uniform(3, 6.5)),
        width=dim,
        dim=dim,
        ids=ids,
        per_bag=1 if lists else generator.choice([1, 1, 4, 20]),
        lists=lists,
        home_ids=ids // 2 if lists else 0,
        optimizer=sparse_optimizer(generator.choice(list(RULES)), lr=0.01),
        dtype=torch.float32,
        row_dtype=generator.choice([torch.float32, torch.float32, torch.bfloat16]),
        skew=generator.choice([1.0, 3.0, 5.0]),
    )


def main() -> None:
    """Measure the kernels, choose one, and measure all kernels again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=SHAPES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("chooser", recorded=args.shapes == SHAPES)
    generator, missing = random.Random(7), missing_kernels("auto")
    excess: list[float] = []
    for number in range(args.shapes):
        shape = draw(generator)
        facts = StackFacts(
            width=shape.width,
            optimizer=shape.optimizer,
            dtype=shape.dtype,
            row_dtype=shape.row_dtype,
            column_split=False,
            device_type="cpu",
        )
        faults = kernel_faults(facts, missing)
        names = [name for name, fault in faults.items() if fault is None]
        first = measure(shape, names)
        chosen = choose_by_times(choose_kernel("auto", facts, missing), first).name
        again = measure(shape, names)
        excess.append(again[chosen] / min(again.values()) - 1)
        facts_of_shape = {key: str(value) for key, value in asdict(shape).items()}
        results.add(
            number=number,
            shape=facts_of_shape,
            chosen=chosen,
            measured_ms=first,
            again_ms=again,
            slower_than_the_fastest=excess[-1],
        )
    results.add(shapes=len(excess), most_slower=max(excess), above_5_percent=sum(
        share > 0.05 for share in excess))  # fmt: skip


if __name__ == "__main__":
    main()

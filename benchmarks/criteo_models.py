"""Compares each model's test AUC on real Criteo rows, in float32 and bf16, with plain PyTorch.

    python -m benchmarks.criteo_models --input train.txt.gz [--models dlrm] [--seeds 1 2 3]

Without --input, the program uses the file in SBPFLOW_CRITEO_ROWS, or reports that the benchmark is
skipped; --data accepts a prepared set (split by time 80/10/10). For each seed, train_wdl.py trains
one epoch with configs/MODEL.yaml, with and without ``model.autocast: bf16``. For comparison, the
program trains the same model from benchmarks/plain_models.py (Wide & Deep: plain_wdl.py), which
does not use sbpflow's model or engine code. Both models are trained with the same rows in the same
order and the same initial values, because on so few rows the AUC varies by 0.01 between seeds. Only
the dropout masks differ. --worker runs the plain model.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import cpu_criteo
from benchmarks.cpu_criteo import run
from benchmarks.plain_models import (
    PlainDcn,
    PlainDeepFm,
    PlainDlrm,
    PlainModel,
    start_as_sbpflow,
)
from benchmarks.plain_wdl import BATCH, PlainWideDeep, Rows, scores
from benchmarks.record import Results
from sbpflow.config.schema import DataConfig
from sbpflow.data import fields_of, load_manifest
from sbpflow.data.read.loaders import open_loaders

MODELS = ("wdl", "dlrm", "deepfm", "dcnv2")
KINDS = {"float32": (), "bf16": ("model.autocast=bf16",)}


def train(model: str, ranks: int, data: Path, folder: Path, *words: str) -> dict[str, float]:
    """Run train_wdl.py once and return the run's last event."""
    shared = (f"data.path={data}", "data.shuffle=rows", "train.progress=false")
    return cpu_criteo.train(model, ranks, folder, *shared, *words)[-1]


def make_plain(model: str, rows: Rows, names: list[str], seed: int) -> PlainModel:
    """Build the model in configs/MODEL.yaml with the initial values of a run with this seed."""
    sizes, numbers = rows.sizes[: rows.num_sparse], rows.num_dense
    kinds = {
        "wdl": lambda: PlainWideDeep(rows),
        "dlrm": lambda: PlainDlrm(sizes, numbers, 16, (256, 64), (400, 400), sparse=True),
        "deepfm": lambda: PlainDeepFm(sizes, numbers, 16, (400, 400), dropout=0.2, sparse=True),
        "dcnv2": lambda: PlainDcn(sizes, numbers, 16, (400, 400), dropout=0.2, sparse=True),
    }
    made: PlainModel = kinds[model]()
    start_as_sbpflow(made.named(names), seed)
    return made


def train_plain(model: str, data: Path, seed: int) -> dict[str, float]:
    """Train one epoch in one process over the run's batches; return test scores."""
    torch.manual_seed(seed)
    manifest = load_manifest(data)
    names = [field.name for field in fields_of(manifest).ids]
    net = make_plain(model, Rows(data, "test"), names, seed)
    optimizers = [
        torch.optim.SparseAdam(net.tables(), lr=1e-3),
        torch.optim.Adam(net.others(), lr=1e-3),
    ]
    config = DataConfig(path=data, batch_size=BATCH, shuffle="rows", loader="memmap")
    loaders = open_loaders(manifest, config, 0, 1, seed=seed, device=torch.device("cpu"))
    start = time.perf_counter()
    for batch in loaders["train"].epoch(0):
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = net(batch.dense, batch.ids.long())
        F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        for optimizer in optimizers:
            optimizer.step()
    seconds = time.perf_counter() - start
    for loader in loaders.values():
        loader.close()
    return {
        "seed": seed,
        **scores(net, data, "test"),
        "samples_per_s": round(manifest.splits["train"] / seconds),
    }


def compare(model: str, data: Path, folder: Path, ranks: int, seeds: list[int]) -> None:
    """Replace the recorded lines of one model."""
    results = Results("criteo_models", f"criteo_{model}")
    found: dict[str, list[float]] = {}
    for kind, words in KINDS.items():
        for seed in seeds:
            final = train(model, ranks, data, folder, f"run.seed={seed}", *words)
            line = {key: final[key] for key in ("auc", "logloss", "samples_per_s")}
            results.add(model=f"sbpflow {kind}", seed=seed, world_size=ranks, **line)
            found.setdefault(f"sbpflow {kind}", []).append(final["auc"])
    words = ("--worker", "--models", model, "--data", str(data), "--seeds", *map(str, seeds))
    for text in run("-m", "benchmarks.criteo_models", *words).splitlines():
        line = json.loads(text)
        results.add(model="plain torch", world_size=1, **line)
        found.setdefault("plain torch", []).append(line["auc"])
    means = {name: round(statistics.mean(values), 5) for name, values in found.items()}
    results.add(
        means=means,
        from_plain_torch=round(means["sbpflow float32"] - means["plain torch"], 5),
        of_bf16=round(means["sbpflow bf16"] - means["sbpflow float32"], 5),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--input", default=os.environ.get("SBPFLOW_CRITEO_ROWS"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    if args.worker:
        for seed in args.seeds:
            print(json.dumps(train_plain(args.models[0], args.data, seed)))
            sys.stdout.flush()
        return
    if not args.input and args.data is None:
        print("skipped: no real rows; use --input or set SBPFLOW_CRITEO_ROWS")
        return
    with tempfile.TemporaryDirectory() as scratch:
        data = args.data or Path(scratch) / "criteo"
        if args.data is None:
            run("-m", "data", "prepare", "--input", args.input, "--output", str(data))
        for model in args.models:
            compare(model, data, Path(scratch) / "run", args.ranks, args.seeds)


if __name__ == "__main__":
    main()

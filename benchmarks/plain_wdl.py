"""Trains a reference Wide & Deep in plain PyTorch, without sbpflow's model or engine.

The program uses one process and reads a prepared set's files with numpy. The architecture, initial
distributions, and optimizers match the configs. Tables are nn.Embedding(sparse=True) with
torch.optim.SparseAdam (Adam on touched rows, like LazyAdam) or a rowwise Adagrad implemented here;
the dense part uses Adam.

    python -m benchmarks.plain_wdl --data DIR --sparse lazy_adam --seeds 1 2 3
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plain_models import PlainModel, hidden_layers, named_layers

DIM, HIDDEN, DROPOUT, BATCH = 16, (400, 400), 0.2, 1024


class Rows:
    """One split of a prepared set, in file order."""

    def __init__(self, folder: Path, split: str) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        self.num_dense = len(manifest["dense"])
        names = [field["name"] for field in manifest["fields"]]
        self.sizes = [field["rows"] for field in manifest["fields"]]
        self.num_sparse = sum("x" not in name for name in names)
        parts = [np.load(folder / shard["file"]) for shard in manifest["splits"][split]]
        words = torch.from_numpy(np.concatenate(parts))
        self.labels = words[:, 0].contiguous().view(torch.float32)
        self.dense = words[:, 1 : 1 + self.num_dense].contiguous().view(torch.float32)
        self.ids = words[:, 1 + self.num_dense :].long()

    def __len__(self) -> int:
        return len(self.labels)


class PlainWideDeep(PlainModel):
    """Computes logit = sum of wide weights + MLP(embeddings ++ dense)."""

    def __init__(self, rows: Rows) -> None:
        tables = rows.sizes[: rows.num_sparse]
        super().__init__(tables, rows.num_dense, DIM, sparse=True)
        crosses = rows.sizes[rows.num_sparse :]
        self.wide = nn.ModuleList(nn.Embedding(n, 1, sparse=True) for n in crosses)
        for table in [*self.deep, *self.wide]:
            nn.init.uniform_(table.weight, -0.05, 0.05)
        layers = hidden_layers(len(tables) * DIM + rows.num_dense, HIDDEN, dropout=DROPOUT)
        self.mlp = nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 1))
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        count = len(self.deep)
        vectors = [table(ids[:, i]) for i, table in enumerate(self.deep)]
        wide = sum(table(ids[:, count + i]) for i, table in enumerate(self.wide))
        return (self.mlp(torch.cat([*vectors, dense], 1)) + wide).squeeze(1)

    def named(self, fields: Sequence[str]) -> dict[str, tuple[Tensor, float]]:
        found = named_layers("mlp", self.mlp)
        for name, table in zip(fields, [*self.deep, *self.wide], strict=True):
            found[f"{'wide' if 'x' in name else 'deep'}.{name}"] = table.weight, 0.05
        return found


class RowwiseAdagrad:
    """Keeps one accumulator per row: the sum over steps of the mean squared gradient of the row's
    columns.
    """

    def __init__(self, tables: list[nn.Parameter], lr: float, eps: float = 1e-8) -> None:
        self.tables, self.lr, self.eps = tables, lr, eps
        self.sums = [torch.zeros(len(table)) for table in tables]

    @torch.no_grad()
    def step(self) -> None:
        for table, total in zip(self.tables, self.sums, strict=True):
            grad = table.grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            total[rows] += (values**2).mean(1)
            table[rows] -= self.lr * values / (total[rows].sqrt() + self.eps).unsqueeze(1)
            table.grad = None

    def zero_grad(self) -> None:
        pass


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the AUC by the rank-sum formula; ties get their mean rank."""
    _, inverse, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts.double() - 1) / 2)[inverse]
    positives = labels.double().sum()
    negatives = len(labels) - positives
    low = positives * (positives + 1) / 2
    return float((ranks[labels == 1].sum() - low) / (positives * negatives))


def scores(model: nn.Module, folder: Path, split: str) -> dict[str, float]:
    """Return the AUC and the logloss of a split."""
    held = Rows(folder, split)
    model.eval()
    with torch.no_grad():
        parts = zip(held.dense.split(8192), held.ids.split(8192), strict=True)
        logits = torch.cat([model(dense, ids) for dense, ids in parts])
    loss = F.binary_cross_entropy_with_logits(logits.double(), held.labels.double())
    return {"auc": auc(logits, held.labels), "logloss": float(loss)}


def train(args: argparse.Namespace, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    rows = Rows(args.data, "train")
    model = PlainWideDeep(rows)
    if args.sparse == "lazy_adam":
        sparse = torch.optim.SparseAdam(model.tables(), lr=1e-3)
    else:
        sparse = RowwiseAdagrad(model.tables(), lr=0.05)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
    # Shuffle the rows, as a loader does; any order of the training rows is valid.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    start = time.perf_counter()
    for batch in order.split(BATCH):
        logits = model(rows.dense[batch], rows.ids[batch])
        loss = F.binary_cross_entropy_with_logits(logits, rows.labels[batch])
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
    seconds = time.perf_counter() - start
    result = {"seed": seed, "samples_per_s": round(len(rows) / seconds)}
    for split in ("val", "test"):
        result |= {f"{split}_{k}": value for k, value in scores(model, args.data, split).items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sparse", choices=["lazy_adam", "rowwise_adagrad"], default="lazy_adam")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    for seed in args.seeds:
        print(json.dumps({"model": "plain torch", "sparse": args.sparse, **train(args, seed)}))


if __name__ == "__main__":
    main()

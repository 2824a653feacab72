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
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class PlainWideDeep(nn.Module):
    """Computes logit = sum of wide weights + MLP(embeddings ++ dense)."""

    def __init__(self, rows: Rows, dim: int, hidden: list[int], dropout: float) -> None:
        super().__init__()
        tables = rows.sizes[: rows.num_sparse]
        self.deep = nn.ModuleList(nn.Embedding(n, dim, sparse=True) for n in tables)
        crosses = rows.sizes[rows.num_sparse :]
        self.wide = nn.ModuleList(nn.Embedding(n, 1, sparse=True) for n in crosses)
        for table in [*self.deep, *self.wide]:
            nn.init.uniform_(table.weight, -0.05, 0.05)
        layers: list[nn.Module] = []
        width = len(tables) * dim + rows.num_dense
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU(), nn.Dropout(dropout)]
            width = size
        layers.append(nn.Linear(width, 1))
        self.mlp = nn.Sequential(*layers)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        count = len(self.deep)
        vectors = [table(ids[:, i]) for i, table in enumerate(self.deep)]
        wide = sum(table(ids[:, count + i]) for i, table in enumerate(self.wide))
        return (self.mlp(torch.cat([*vectors, dense], 1)) + wide).squeeze(1)

    def tables(self) -> list[nn.Parameter]:
        return [table.weight for table in [*self.deep, *self.wide]]


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


def train(args: argparse.Namespace, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    rows = Rows(args.data, "train")
    model = PlainWideDeep(rows, args.dim, args.hidden, args.dropout)
    if args.sparse == "lazy_adam":
        sparse = torch.optim.SparseAdam(model.tables(), lr=args.sparse_lr or 1e-3)
    else:
        sparse = RowwiseAdagrad(model.tables(), lr=args.sparse_lr or 0.05)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
    # Shuffle the rows, as a loader does; any order of the training rows is valid.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    start = time.perf_counter()
    for batch in order.split(args.batch_size):
        logits = model(rows.dense[batch], rows.ids[batch])
        loss = F.binary_cross_entropy_with_logits(logits, rows.labels[batch])
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
    seconds = time.perf_counter() - start
    result = {"seed": seed, "samples_per_s": round(len(rows) / seconds)}
    model.eval()
    for split in ("val", "test"):
        held = Rows(args.data, split)
        with torch.no_grad():
            logits = torch.cat(
                [
                    model(d, i)
                    for d, i in zip(held.dense.split(8192), held.ids.split(8192), strict=True)
                ]
            )
        result[f"{split}_auc"] = auc(logits, held.labels)
        result[f"{split}_logloss"] = float(
            F.binary_cross_entropy_with_logits(logits.double(), held.labels.double())
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sparse", choices=["lazy_adam", "rowwise_adagrad"], default="lazy_adam")
    parser.add_argument("--sparse-lr", type=float)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--hidden", type=int, nargs="*", default=[400, 400])
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    for seed in args.seeds:
        print(json.dumps({"model": "plain torch", "sparse": args.sparse, **train(args, seed)}))


if __name__ == "__main__":
    main()

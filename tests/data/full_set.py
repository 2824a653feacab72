"""Makes a small set with every kind of column, and provides its rows as Python values."""

import random
from dataclasses import dataclass

import numpy as np

from sbpflow.data import load_manifest
from sbpflow.data.format.manifest import SPLITS, write_manifest
from sbpflow.data.format.shards import write_shard

NUM_ROWS, SHARD_ROWS, LISTS, MOST = 5000, 700, 3, 9


@dataclass
class Row:
    """The expected values of a row."""

    ids: list[int]
    lists: list[list[int]]
    list_weights: list[list[float]]
    weight: float
    group: int
    time: int
    key: int
    labels: list[float]
    label: float


def make_rows(num_rows, seed):
    rng = random.Random(seed)
    rows = []
    for number in range(num_rows):
        lists = [
            [rng.randrange(1000) for _ in range(rng.randrange(MOST + 1))] for _ in range(LISTS)
        ]
        rows.append(
            Row(
                ids=[number, number + 1],
                lists=lists,
                list_weights=[[rng.random() for _ in ids] for ids in lists],
                weight=rng.random(),
                group=2**64 - 1 - number // 20,
                time=10**15 + number,
                key=-number,
                labels=[float(number % 3), float("nan")],
                label=float(rng.random() < (number % 7) / 7),
            )
        )
    return rows


def write(folder, name, rows, first):
    words = np.empty((len(rows), 4), dtype=np.int32)
    words[:, 0] = np.array([row.label for row in rows], dtype=np.float32).view(np.int32)
    words[:, 1] = np.arange(first, first + len(rows), dtype=np.float32).view(np.int32)
    words[:, 2:] = [row.ids for row in rows]
    lengths = np.array([[len(ids) for ids in row.lists] for row in rows], dtype=np.uint8)
    flat = [(i, w) for r in rows for ids, ws in zip(r.lists, r.list_weights, strict=True)
            for i, w in zip(ids, ws, strict=True)]  # fmt: skip
    parts = {
        "lengths": lengths,
        "starts": np.concatenate([[0], np.cumsum(lengths.sum(1, dtype=np.int64))]),
        "values": np.array([i for i, _ in flat], dtype=np.int32),
        "value_weights": np.array([w for _, w in flat], dtype=np.float32),
        "weight": np.array([row.weight for row in rows], dtype=np.float32),
        "group": np.array([row.group for row in rows], dtype=np.uint64),
        "time": np.array([row.time for row in rows], dtype=np.int64),
        "row_key": np.array([row.key for row in rows], dtype=np.int64),
        "labels": np.array([row.labels for row in rows], dtype=np.float32),
    }
    return write_shard(folder, name, words, parts)


def make_full_set(folder):
    """Return the manifest and the train rows of the set."""
    folder.mkdir()
    splits, train = {}, make_rows(NUM_ROWS, 1)
    for split, rows in zip(SPLITS, (train, make_rows(17, 2), make_rows(5, 3)), strict=True):
        splits[split] = [
            write(folder, f"{split}-{n}.npy", rows[n : n + SHARD_ROWS], n)
            for n in range(0, len(rows), SHARD_ROWS)
        ]
    content = {
        "source": "test",
        "dense": [{"name": "I1"}],
        "fields": [
            {"name": "C1", "rows": 10_000},
            *({"name": f"L{n}", "rows": 1000, "hot": MOST, "ragged": True, "weighted": n == 1}
              for n in range(LISTS)),
            {"name": "C2", "rows": 10_000},
        ],
        "length_type": "|u1",
        "side": [
            {"name": "w", "role": "weight", "type": "float32"},
            {"name": "user", "role": "group", "type": "uint64"},
            {"name": "ts", "role": "time", "type": "int64"},
            {"name": "key", "role": "row_key", "type": "int64"},
            {"name": "buy", "role": "label", "type": "float32"},
            {"name": "stay", "role": "label", "type": "float32"},
        ],
        "splits": splits,
    }  # fmt: skip
    write_manifest(folder, content)
    return load_manifest(folder), train

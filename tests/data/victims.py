"""Defines the processes of the kill tests, in a separate module that the fork server can load."""

import json
import os
from pathlib import Path

from sbpflow.data import load_manifest, open_loader
from tests.data.rows import run_prepare


def prepares(ready, source: Path, output: Path) -> None:
    """Prepare in pieces of 64 KiB."""
    ready.set()
    run_prepare(output, source, piece_bytes=1 << 16)


def reads(ready, folder: Path, state_file: Path, world_size: int) -> None:
    """Read epoch 0 as all ranks; after each step, save the state and the rows read so far."""
    manifest = load_manifest(folder)
    loaders = [
        open_loader(manifest, batch_size=500, rank=r, world_size=world_size, shuffle="rows")
        for r in range(world_size)
    ]
    saved = {"state": None, "seen": []}
    if state_file.exists():
        saved = json.loads(state_file.read_text())
        for loader in loaders:
            loader.load_state_dict(saved["state"])
    ready.set()
    for batches in zip(*(loader.epoch(0) for loader in loaders), strict=True):
        saved["seen"] += [int(row) for batch in batches for row in batch.dense[:, 0]]
        saved["state"] = loaders[-1].state_dict()
        partial = state_file.with_suffix(".partial")
        partial.write_text(json.dumps(saved))
        os.replace(partial, state_file)

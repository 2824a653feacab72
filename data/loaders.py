"""The loaders of a run, one per split that has rows, as its configuration says."""

import torch

from data.loader import RowLoader, open_loader
from data.manifest import Manifest
from sbpflow.config import DataConfig


def open_loaders(
    manifest: Manifest,
    config: DataConfig,
    rank: int,
    world_size: int,
    *,
    seed: int,
    device: torch.device,
) -> dict[str, RowLoader]:
    """By split; only ``train`` is shuffled or may drop its tail."""
    return {
        split: open_loader(
            manifest,
            split=split,
            batch_size=config.batch_size,
            rank=rank,
            world_size=world_size,
            backend=config.loader,
            shuffle=config.shuffle if split == "train" else "none",
            seed=seed,
            device=device,
            tail=config.tail if split == "train" else "keep",
        )
        for split, num_rows in manifest.splits.items()
        if num_rows
    }

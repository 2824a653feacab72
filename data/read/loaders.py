"""Open the loaders of a run, one for each split that has rows."""

from collections.abc import Sequence

import torch

from sbpflow.config.schema import DataConfig
from sbpflow.data.format.manifest import Manifest
from sbpflow.data.read.loader import RowLoader, choose_backend, open_loader
from sbpflow.errors import ConfigError
from sbpflow.run.model.spec import HashedColumn


def open_loaders(
    manifest: Manifest,
    config: DataConfig,
    rank: int,
    world_size: int,
    *,
    seed: int,
    device: torch.device,
    crosses: Sequence[HashedColumn] = (),
    ids_on_host: bool = False,
) -> dict[str, RowLoader]:
    """Return the loaders by split. Only ``train`` is shuffled or may drop its tail. Raises
    ConfigError if train has no labels or has too few rows for a batch.
    """
    if not manifest.labelled:
        raise ConfigError(
            f"data.path: the rows in {manifest.path} have no labels and can only be scored; train "
            "on a set made by `sbpflow prepare`"
        )
    num_rows = manifest.splits["train"]
    if not num_rows or (config.tail == "drop" and num_rows < config.batch_size):
        raise ConfigError(
            f"data.batch_size is {config.batch_size}, but the train split of {manifest.path} has "
            f"only {num_rows} rows, so data.tail: {config.tail} leaves no batch; use "
            + ("a smaller batch_size, or data.tail: keep" if num_rows else "a set with train rows")
        )
    backend = choose_backend(config.loader)
    return {
        split: open_loader(
            manifest,
            split=split,
            batch_size=config.batch_size,
            rank=rank,
            world_size=world_size,
            backend=backend,
            shuffle=config.shuffle if split == "train" else "none",
            seed=seed,
            device=device,
            tail=config.tail if split == "train" else "keep",
            crosses=crosses,
            ids_on_host=ids_on_host,
        )
        for split, num_rows in manifest.splits.items()
        if num_rows
    }

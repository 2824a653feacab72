"""Trains small models on a table with every kind of column, and exports them as bundles."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sbpflow.boxing.executor import Boxing
from sbpflow.commands.export import export_model
from sbpflow.config.model_tables import FieldRule, TableShape
from sbpflow.config.schema import Config, DataConfig
from sbpflow.data import fields_of, load_manifest
from sbpflow.data.__main__ import main as data_main
from sbpflow.data.read.loaders import open_loaders
from sbpflow.embedding.plan.growth import Eviction, first_address
from sbpflow.models.dcnv2 import DcnV2Config
from sbpflow.models.deepfm import DeepFmConfig
from sbpflow.models.dlrm import DlrmConfig
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import build_job
from sbpflow.run.execution.predict import probabilities
from sbpflow.run.model.spec import Fields, embedding_output
from sbpflow.run.model.torch_model import TorchModel
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.saved.saved_model import find_checkpoint
from sbpflow.runtime.random.streams import unmix
from sbpflow.runtime.ranks.world import World
from tests.data.tables import INF, SCHEMA, SPLIT, table, write_csv
from tests.run.saved import save_job
from tests.training.wdl_case import make_config

STEPS, BATCH = 5, 64


class Own(nn.Module):
    """A user's module with buffers and several kinds of layers and functions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 8)
        self.attention = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 1)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.register_buffer("order", torch.arange(8, dtype=torch.int16))
        self.register_buffer("mask", torch.ones(8, dtype=torch.int8))

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        x = torch.cat([vectors["all"], vectors["summed"], dense.clamp(-3, 3)], 1)
        x = nn.functional.gelu(self.first(x))[:, self.order.long()] * self.scale * self.mask
        x = self.norm(x + torch.softmax(self.attention(x), 1).masked_fill(x > 3, 0.0))
        return self.last(x.unsqueeze(1).expand(-1, 2, -1).mean(1)).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class OwnConfig:
    name: str = "tests.serving.bundles:OwnConfig"
    fields: Mapping[str, FieldRule] = field(default_factory=dict)
    tables: Mapping[str, TableShape] = field(default_factory=dict)

    def spec(self, fields: Fields) -> TorchModel:
        deep = embedding_output("all", fields.sparse, dim=3, rules=self)
        one = embedding_output(
            "summed", fields.sparse, dim=2, combine="sum", pooling="mean", rules=self
        )
        width = deep.width + 2 + len(fields.dense)
        return TorchModel(outputs=(deep, one), make=lambda: Own(width))


MODELS: Mapping[str, Any] = {
    "wdl": WdlConfig(
        embedding_dim=4,
        hidden=(7, 6),
        dropout=0.0,
        wide=WideConfig(crosses=(("city", "shop"),), hash_size=97),
    ),
    "dlrm": DlrmConfig(embedding_dim=16, bottom=(6,), top=(7,)),
    "deepfm": DeepFmConfig(embedding_dim=4, hidden=(7,), norm="batch"),
    "dcnv2": DcnV2Config(embedding_dim=4, hidden=(7,), cross_rank=2, structure="stacked"),
    "own": OwnConfig(),
}


GROWS = FieldRule(vocabulary="dynamic", admit_count=2, evict=Eviction(max_rows=65_536))
FITTED = FieldRule(vocabulary="fitted")
RULES = {"*": GROWS, "more": FITTED, "score": FITTED}
HASHED = {**RULES, "hashed.*": FITTED}
GROWING: Mapping[str, Any] = {
    "wdl": WdlConfig(
        embedding_dim=4,
        hidden=(7, 6),
        dropout=0.0,
        wide=WideConfig(
            columns=("shop", "city"),
            crosses=(("city", "shop"), ("shop", "score")),
            hash_size=97,
        ),
        fields=HASHED,
    ),
    "wide": WdlConfig(
        deep=False, wide=WideConfig(crosses=(("city", "shop"),), hash_size=97), fields=HASHED
    ),
    "pairs": WdlConfig(
        embedding_dim=16, hidden=(7,), dropout=0.0, fields=RULES,
        wide=WideConfig(crosses=(("city", "shop"),)),
    ),
    "own": OwnConfig(fields=RULES),
}  # fmt: skip
"""Models with growing fields, for ``make_keyed_set``"""


def good_rows(num_rows: int, seed: int = 0) -> list[dict[str, object]]:
    """Return rows of ``table`` that can be scored."""
    return [row for row in table(num_rows, seed) if row["price"] != INF]


def make_set(
    folder: Path, *more: str, rows: int | list[dict[str, object]] = 900, seed: int = 0
) -> Path:
    """Prepare a table with every kind of column; the folder also has its text, ``t.csv``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schema.yaml").write_text(SCHEMA)
    source = write_csv(folder / "t.csv", good_rows(rows, seed) if isinstance(rows, int) else rows)
    words = ["--input", source, "--output", folder / "set", "--schema", folder / "schema.yaml"]
    words += ["--split", SPLIT, "--max-bad-fraction", "0.05", "--crosses", "cityxshop", *more]
    assert data_main(["prepare", *map(str, words)]) == 0
    return folder / "set"


def crowded_keys() -> list[int]:
    """Return keys with at most 17 digits that are all in one bucket."""
    keys = unmix(first_address(130) + torch.arange(2000)).tolist()
    return [key for key in keys if abs(key) < 10**17]


def drifting_rows(num_rows: int, seed: int = 0) -> list[dict[str, object]]:
    """Return ``good_rows`` whose shops and cities come and go; some occur only once.

    Recurring shops have keys in a single bucket, so later shops take over the table rows of earlier
    ones. Cities are missing only in the last rows.
    """
    rows, shops = good_rows(num_rows, seed), crowded_keys()
    for number, row in enumerate(rows):
        if number % 3:
            row["shop"] = None if number % 13 == 0 else shops[number // 40 % len(shops)]
            row["city"] = f"K\u00f6ln {number // 50}"
        elif number < STEPS * BATCH:
            row["city"] = row["city"] or "Paris"
        if number % 17 == 0:
            row["shop"], row["city"] = 10**15 + number, f"once {number}"
    return rows


def make_keyed_set(folder: Path, rows: int = 900) -> Path:
    """Prepare ``drifting_rows`` with keys, except for ``more`` and ``score``, which have
    vocabularies.
    """
    keys = "--keys", "city,shop,tags,genre,cityxshop"
    return make_set(folder, *keys, rows=drifting_rows(rows))


def config_of(path: Path, model: Any, **parallel: Any) -> Config:
    config = make_config("1", "adagrad", dtype="float32")
    return replace(
        config,
        data=DataConfig(path=path, batch_size=BATCH, loader="memmap"),
        model=model,
        parallel=replace(config.parallel, **parallel),
    )


def train(world: World, run: Path, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Train and save a run; return the scores and the labels from its evaluation on test."""
    manifest, size = load_manifest(config.data.path), world.size
    spec, plan = plan_run(config, fields_of(manifest), world_size=size, device_type="cpu")
    job = build_job(config, spec, plan, Boxing(world))
    crosses = spec.hashed_columns
    loaders = open_loaders(
        manifest, config.data, world.rank, size, seed=7, device=world.device, crosses=crosses
    )
    for _, batch in zip(range(STEPS), loaders["train"].epoch(0), strict=False):
        job.trainer.step(batch)
    save_job(run, job, config, STEPS)
    scores, labels = [], []
    for batch in loaders["test"].epoch(0):
        parts: list[Any] = [(job.trainer.predict(batch).numpy(), batch.labels.numpy())]
        if size > 1:
            parts *= size
            dist.all_gather_object(parts, parts[0])
        scores += [probabilities(logits) for logits, _ in parts]
        labels += [own for _, own in parts]
    return np.concatenate(scores), np.concatenate(labels)


def export(run: Path, config: Config, output: Path, **options: Any) -> list[Path]:
    return export_model(find_checkpoint(run), config, output, **options)

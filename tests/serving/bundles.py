"""Trains small models on a table with every kind of column, and exports them as bundles."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sbpflow.boxing.executor import Boxing
from sbpflow.commands.export import export_model
from sbpflow.config.schema import Config, DataConfig
from sbpflow.data import fields_of, load_manifest
from sbpflow.data.__main__ import main as data_main
from sbpflow.data.read.loaders import open_loaders
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
from sbpflow.runtime.ranks.world import World
from tests.data.tables import INF, SCHEMA, SPLIT, table, write_csv
from tests.run.saved import save_job
from tests.training.wdl_case import make_config

STEPS = 5


class Own(nn.Module):
    """A user's module with branches on shapes, a buffer, and several kinds of layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 8)
        self.attention = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 1)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        x = torch.cat([vectors["all"], vectors["summed"], dense.clamp(-3, 3)], 1)
        x = nn.functional.gelu(self.first(x)) * self.scale
        x = self.norm(x + torch.softmax(self.attention(x), 1).masked_fill(x > 3, 0.0))
        return self.last(x.unsqueeze(1).expand(-1, 2, -1).mean(1)).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class OwnConfig:
    name: str = "tests.serving.bundles:OwnConfig"

    def spec(self, fields: Fields) -> TorchModel:
        deep = embedding_output("all", fields.sparse, dim=3)
        one = embedding_output("summed", fields.sparse, dim=2, combine="sum", pooling="mean")
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


def good_rows(num_rows: int, seed: int = 0) -> list[dict[str, object]]:
    """Return rows of ``table`` that can be scored."""
    return [row for row in table(num_rows, seed) if row["price"] != INF]


def make_set(folder: Path, *more: str, rows: int = 900, seed: int = 0) -> Path:
    """Prepare a table with every kind of column; the folder also has its text, ``t.csv``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schema.yaml").write_text(SCHEMA)
    source = write_csv(folder / "t.csv", good_rows(rows, seed))
    words = ["--input", source, "--output", folder / "set", "--schema", folder / "schema.yaml"]
    words += ["--split", SPLIT, "--max-bad-fraction", "0.05", "--crosses", "cityxshop", *more]
    assert data_main(["prepare", *map(str, words)]) == 0
    return folder / "set"


def config_of(path: Path, model: Any, **parallel: Any) -> Config:
    config = make_config("1", "adagrad", dtype="float32")
    return replace(
        config,
        data=DataConfig(path=path, batch_size=64, loader="memmap"),
        model=model,
        parallel=replace(config.parallel, **parallel),
    )


def train(world: World, run: Path, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Train and save a run; return the scores of its evaluation of test, and the labels."""
    manifest = load_manifest(config.data.path)
    spec, plan = plan_run(config, fields_of(manifest), world_size=1, device_type="cpu")
    job = build_job(config, spec, plan, Boxing(world))
    loaders = open_loaders(
        manifest, config.data, 0, 1, seed=7, device=world.device, crosses=spec.hashed_columns
    )
    for _, batch in zip(range(STEPS), loaders["train"].epoch(0), strict=False):
        job.trainer.step(batch)
    save_job(run, job, config, STEPS)
    scores, labels = [], []
    for batch in loaders["test"].epoch(0):
        scores.append(probabilities(job.trainer.predict(batch).numpy()))
        labels.append(batch.labels.numpy())
    return np.concatenate(scores), np.concatenate(labels)


def export(run: Path, config: Config, output: Path, **options: Any) -> list[Path]:
    return export_model(find_checkpoint(run), config, output, **options)

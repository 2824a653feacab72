"""``sbpflow export``: write a trained model in formats that do not need sbpflow."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sbpflow.commands.saved_run import add_model, saved_run
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser

if TYPE_CHECKING:
    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config
    from sbpflow.data import Manifest
    from sbpflow.run.export.plain_model import PlainModel
    from sbpflow.run.export.row_formats import RowFormat

_FORMS = "pt2,safetensors"


def _arguments(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        prog="sbpflow export",
        description="Write a trained model for plain torch and for programs without torch.",
    )
    add_model(parser)
    add = parser.add_argument
    add("--output", type=local_path, required=True, metavar="DIR", help="a new folder")
    add("--forms", default=_FORMS, help=f"comma-separated file formats (default {_FORMS})")
    add("--rows", default="as_trained", help="table row format: as_trained, float16 or int8")
    text = "labelled set to score, also with the original rows (default: the run's set)"
    add("--score", type=local_path, metavar="SET", help=text)
    add("--split", default="test", choices=("train", "val", "test"), help="split of --score")
    return parser.parse_intermixed_args(argv)


def export(argv: Sequence[str]) -> int:
    """Write a trained model in formats that do not need sbpflow."""
    from sbpflow.run.saved.saved_model import weights_text

    args = _arguments(argv)
    checkpoint, config = saved_run(args)
    print(weights_text(checkpoint))
    files = export_model(
        checkpoint,
        config,
        args.output,
        forms=args.forms,
        rows=args.rows,
        scored=args.score,
        split=args.split,
    )
    for file in files:
        print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


def export_model(
    checkpoint: "Checkpoint",
    config: "Config",
    output: Path,
    *,
    forms: str = _FORMS,
    rows: str = "as_trained",
    scored: Path | None = None,
    split: str = "test",
) -> list[Path]:
    """Write a saved model to the new folder ``output`` and return its files; prints its scores."""
    from sbpflow.checkpoint.folder import data_folder
    from sbpflow.data import fields_of, load_manifest, open_loader
    from sbpflow.data.predictions import check_ids
    from sbpflow.run.export.export import (
        check_unscored,
        facts_of,
        parse_forms,
        parse_rows,
        score_plain,
        write_model,
    )
    from sbpflow.run.export.plain_model import plain_model
    from sbpflow.run.planning.build_plan import plan_run
    from sbpflow.run.saved.saved_model import saved_layouts

    chosen, row_format = parse_forms(forms), parse_rows(rows)
    like = load_manifest(data_folder(checkpoint.path))
    fields = fields_of(like)
    config, planned = saved_layouts(checkpoint, config, 1)
    spec, plan = plan_run(config, fields, world_size=1, device_type="cpu", planned=planned)

    def make(rows: "RowFormat") -> "PlainModel":
        return plain_model(
            spec,
            plan.embeddings,
            checkpoint.tensor,
            saved=checkpoint.tensors,
            num_dense=len(fields.dense),
            seed=config.run.seed,
            row_format=rows,
        )

    def score(
        manifest: "Manifest", rows: "RowFormat", model: "PlainModel"
    ) -> dict[str, float | None]:
        loader = open_loader(
            manifest,
            split=split,
            batch_size=config.data.batch_size,
            backend="memmap",
            shuffle="none",
            crosses=spec.hashed_columns,
        )
        result = score_plain(model, loader.epoch(0))
        loader.close()
        scores = f"AUC {result.auc}, logloss {result.logloss:.6f}"
        print(f"rows {rows}: {scores} ({result.num_rows} rows, {split} of {path})")
        return {"auc": result.auc, "logloss": result.logloss}

    path = scored or config.data.path
    manifest = load_manifest(path) if path is not None and path.is_dir() else None
    if manifest is None:
        check_unscored(row_format, path)
    model = make(row_format)
    facts = facts_of(checkpoint, like.vocabulary_digest)
    if manifest is not None:
        check_ids(manifest, like)
        facts["scores"] = {row_format: score(manifest, row_format, model)}
        if row_format != "as_trained":
            facts["scores"]["as_trained"] = score(manifest, "as_trained", make("as_trained"))
    return write_model(output, model, facts, chosen)

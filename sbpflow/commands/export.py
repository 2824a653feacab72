"""``sbpflow export``: write a trained model as a bundle that does not need sbpflow."""

from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sbpflow.commands.saved_run import add_model, saved_run
from sbpflow.errors import ConfigError
from sbpflow.runtime.files.remote_path import RemotePath, any_path
from sbpflow.runtime.processes.launch import ArgumentParser

if TYPE_CHECKING:
    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config, DataConfig
    from sbpflow.data import Manifest
    from sbpflow.data.bundle_input import Growing, SavedKeys
    from sbpflow.run.export.bundle import BundleModel, RawInput
    from sbpflow.run.export.growing_tables import GrowingTables
    from sbpflow.run.export.plain_model import Addresses
    from sbpflow.run.export.row_formats import RowFormat
    from sbpflow.run.model.spec import ModelSpec
    from sbpflow.runtime.files.remote_path import AnyPath

_EVERY_SECONDS, _DELTAS = 10.0, 24


def _arguments(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        prog="sbpflow export",
        description="Write a trained model as a bundle, which needs only torch and numpy to score "
        "raw rows.",
    )
    add_model(parser, required=False)
    add = parser.add_argument
    add("--output", type=any_path, required=True, metavar="DIR", help="a new folder, or a URL")
    add("--rows", default="as_trained", help="table row format: as_trained (default), float16, or "
        "int8")  # fmt: skip
    text = (
        "labeled set to score with both the exported and the original table rows (default: the "
        "run's set)"
    )
    add("--score", type=any_path, metavar="SET", help=text)
    text = "split of the set to score (default: test)"
    add("--split", choices=("train", "val", "test"), help=text)
    text = (
        "also write model.pt2, the whole model for torch.export.load; needs 3x the model's memory"
    )
    add("--pt2", action="store_true", help=text)
    text = "also compile the dense part for this CPU (dense.pt2); takes minutes"
    add("--compile", action="store_true", help=text)
    add("--onnx", action="store_true", help="also write the dense part for ONNX (dense.onnx)")
    text = "export every new checkpoint of this run, as a delta or a new bundle, until the run ends"
    add("--follow", type=any_path, metavar="RUN", help=text)
    text = f"minimum time between exports with --follow (default: {_EVERY_SECONDS:g})"
    add("--every-seconds", type=float, metavar="S", help=text)
    text = f"number of deltas after each bundle with --follow (default: {_DELTAS})"
    add("--deltas", type=int, metavar="N", help=text)
    add("--parent", type=int, help=SUPPRESS)  # the export stops when this process ends
    args = parser.parse_intermixed_args(argv)
    if (args.checkpoint is None) == (args.follow is None):
        parser.error("use either --checkpoint DIR or --follow RUN")
    _check_used(parser, args)
    args.every_seconds = _EVERY_SECONDS if args.every_seconds is None else args.every_seconds
    args.deltas = _DELTAS if args.deltas is None else args.deltas
    if not args.every_seconds >= 0 or args.deltas < 0:
        parser.error(
            "--every-seconds and --deltas must be 0 or more, got "
            f"{args.every_seconds} and {args.deltas}"
        )
    return args


def _check_used(parser: ArgumentParser, args: Namespace) -> None:
    """Raise ConfigError for an option that has no effect, because of --checkpoint or --follow."""
    if args.follow is not None:
        reason = "--follow, which exports every new checkpoint and does not score it"
        given = {f"--{args.which}": args.which, "--score": args.score, "--split": args.split}
    else:
        reason = "--checkpoint, which exports a single bundle"
        given = {"--every-seconds": args.every_seconds, "--deltas": args.deltas}
    for option, value in given.items():
        if value is not None:
            parser.error(f"{option} has no effect with {reason}; remove {option}")


def export(argv: Sequence[str]) -> int:
    """Write a trained model as a bundle."""
    from sbpflow.data.prepare.workspace import only_run
    from sbpflow.run.saved.saved_model import weights_text

    args = _arguments(argv)
    if args.follow is not None:
        from sbpflow.commands.follow import follow

        return follow(args)
    checkpoint, config = saved_run(args)
    print(weights_text(checkpoint))
    options: dict[str, Any] = {"rows": args.rows, "scored": args.score, "split": args.split}
    options |= {"pt2": args.pt2, "compiled": args.compile, "onnx": args.onnx}
    files: Sequence[AnyPath]
    if isinstance(args.output, RemotePath):
        files = export_to(args.output, checkpoint, config, **options)
    else:
        with only_run(args.output):
            files = export_model(checkpoint, config, args.output, **options)
    for file in files:
        print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


def export_to(
    url: "RemotePath",
    checkpoint: "Checkpoint",
    config: "Config",
    **options: Any,  # noqa: ANN401 (of export_model)
) -> "list[RemotePath]":
    """Write a saved model to a new folder in an object store and return its files.

    ``model.json`` is written last, so its presence marks a complete folder.
    """
    from sbpflow.run.export.bundle import BUNDLE_FILES
    from sbpflow.runtime.files.upload import check_own_files, upload
    from sbpflow.serving.deltas import BUNDLE_FILE

    if (url / BUNDLE_FILE).exists():
        raise ConfigError(f"--output {url} already exists; use a new folder")
    check_own_files("--output", url, BUNDLE_FILES)
    with TemporaryDirectory(prefix="sbpflow-") as name:
        folder = Path(name) / "bundle"
        export_model(checkpoint, config, folder, **options)
        return [url / name for name in upload(folder, url, owned=BUNDLE_FILES, last=(BUNDLE_FILE,))]


def export_model(
    checkpoint: "Checkpoint",
    config: "Config",
    output: Path,
    *,
    rows: str = "as_trained",
    scored: "AnyPath | None" = None,
    split: str | None = None,
    pt2: bool = False,
    compiled: bool = False,
    onnx: bool = False,
    measured: bool = True,
    has_spare_rows: bool = False,
) -> list[Path]:
    """Write a saved model to a new folder and return its files; print scores if ``measured``.

    ``has_spare_rows`` adds spare rows to growing tables, for keys that later deltas add.
    """
    from sbpflow.checkpoint.folder import data_folder
    from sbpflow.checkpoint.format import digest_of
    from sbpflow.data import fields_of, load_manifest
    from sbpflow.run.export.bundle import BundleModel, add_facts
    from sbpflow.run.export.export import parse_rows, write_export
    from sbpflow.run.export.forms import write_compiled, write_onnx, write_pt2
    from sbpflow.run.export.growing_tables import GrowingTables
    from sbpflow.run.export.plain_model import dense_part
    from sbpflow.run.planning.build_plan import plan_run
    from sbpflow.run.saved.saved_model import saved_layouts
    from sbpflow.serving.scorer import load

    if output.exists():
        raise ConfigError(f"--output {output} already exists; use a new folder")
    row_format = parse_rows(rows)
    like = load_manifest(data_folder(checkpoint.path), cache=config.data.cache)
    fields = fields_of(like)
    config, planned = saved_layouts(checkpoint, config, 1)
    spec, plan = plan_run(
        config, fields, world_size=1, device_type="cpu", planned=planned, traced=False
    )
    manifest = _labelled_set(scored, split, row_format, like, config.data) if measured else None
    keyed = {field.name for field in fields.ids if field.keyed}
    tables = GrowingTables(checkpoint, plan.embeddings, keyed, has_spare_rows=has_spare_rows)
    growing = _saved_keys(tables)
    read, saved = checkpoint.tensor, checkpoint.tensors
    model = BundleModel(
        plan=tables.plan,
        hashed=spec.hashed_columns,
        dense=dense_part(spec, tables.plan, read, saved, config.run.seed).eval(),
        num_dense=len(fields.dense),
        read=tables.read,
        row_format=row_format,
        keyed=keyed,
        raw=_raw_rows(like, growing),
        facts={
            "checkpoint": digest_of(checkpoint.index),
            "trained": {
                "vocabulary": like.vocabulary_digest,
                "config": checkpoint.documents.get("config"),
            },
        },
    )
    origin = {"run": checkpoint.run, "step": checkpoint.step, "delta": 0}

    def finish(work: Path) -> None:
        if manifest is not None:
            scores = _scores(manifest, split or "test", work, model, config.data.batch_size)
            add_facts(work, {"scores": scores})
        if compiled:
            write_compiled(work, model)
            load(work, compiled=True)
        if onnx:
            write_onnx(work, model)
        if pt2:
            write_pt2(work, model.plain(tables.addresses(), in_memory=True))

    sample = _sample(like, model, spec, tables.addresses(), growing)
    return write_export(output, model, origin, sample, finish)


def _labelled_set(
    scored: "AnyPath | None",
    split: str | None,
    row_format: "RowFormat",
    like: "Manifest",
    data: "DataConfig",
) -> "Manifest | None":
    """Return the set to score: ``scored`` or, by default, the run's set if it exists and has test
    rows.

    Raises ConfigError if ``scored``, ``split``, or low-precision rows are requested, and there are
    no rows to score.
    """
    from sbpflow.data import load_manifest
    from sbpflow.data.predictions import check_ids, check_split
    from sbpflow.run.export.export import check_unscored

    path = data.path if scored is None else scored
    if path is None or (scored is None and isinstance(path, Path) and not path.is_dir()):
        check_unscored(row_format, split, path)
        return None
    key = "data.path" if scored is None else "--score"
    manifest = load_manifest(path, key, data.cache)
    check_ids(manifest, like, key)
    usual = scored is None and split is None and row_format == "as_trained"
    if usual and not manifest.splits["test"]:
        print(f"not scored: {manifest.origin} has no test rows")
        return None
    check_split(manifest, split or "test", path)
    return manifest


def _saved_keys(tables: "GrowingTables") -> "dict[str, SavedKeys]":
    """Return the keys of each growing field by vocabulary name."""
    from sbpflow.data.bundle_input import SavedKeys

    return {
        name: SavedKeys(
            fields=features,
            num_keys=tables.num_keys(name),
            read=lambda name=name: tables.keys(name).numpy(),
        )
        for name, features in tables.vocabularies.items()
    }


def _raw_rows(like: "Manifest", growing: "Growing") -> "RawInput | None":
    """Return the format of the raw rows of a run's set, or None if the original values are
    unknown.
    """
    from sbpflow.data.bundle_input import input_content, write_vocabularies
    from sbpflow.data.format.vocabulary import HOW_TO_HAVE_VALUES
    from sbpflow.run.export.bundle import RawInput

    content = input_content(like, growing)
    if content is None:
        if growing:
            raise ConfigError(
                f"{next(iter(growing))} is a growing field, but the set was generated and has no "
                f"original text, so a bundle cannot compute keys; {HOW_TO_HAVE_VALUES}"
            )
        return None
    return RawInput(content=content, write_vocabularies=partial(write_vocabularies, like, growing))


def _sample(
    like: "Manifest",
    model: "BundleModel",
    spec: "ModelSpec",
    addresses: "Addresses",
    growing: "Growing",
) -> dict[str, Any]:
    """Return sample rows and their scores from the run's model."""
    from sbpflow.data import open_loader
    from sbpflow.data.sample_rows import encode_sample, sample_rows
    from sbpflow.run.export.export import sample_ids, sample_of

    reference = model.plain(addresses, in_memory=False)
    half = getattr(spec, "half", None) is not None or model.plan.dtype.itemsize < 4
    if model.raw is None:
        return sample_of(reference, sample_ids(reference), half=half, rows=None)
    rows = sample_rows(like, growing)
    names = [column["name"] for column in model.raw.content["columns"] if column["required"]]
    with TemporaryDirectory(prefix="sbpflow-") as folder:
        encoded = encode_sample(rows, like, Path(folder))
        loader = open_loader(
            encoded,
            split="test",
            batch_size=len(rows),
            backend="memmap",
            shuffle="none",
            crosses=model.hashed,
        )
        (batch,) = loader.epoch(0)
        raw = [{name: row[name] for name in names} for row in rows]
        arguments = reference.arguments_of(batch.ids, batch.dense)
        sample = sample_of(reference, arguments, half=half, rows=raw)
        loader.close()
    return sample


def _scores(
    manifest: "Manifest", split: str, work: Path, model: "BundleModel", batch_size: int
) -> dict[str, dict[str, float | None]]:
    """Score a labeled set with the bundle in ``work`` and, if the row format differs, with the
    original rows; print the scores.
    """
    from sbpflow.data import open_loader
    from sbpflow.run.export.bundle import write_bundle
    from sbpflow.run.export.export import score_bundle
    from sbpflow.serving.scorer import load
    from sbpflow.training.report import describe_evaluation

    bundle = load(work, check=False)
    bundles = {str(model.row_format): bundle}
    scores: dict[str, dict[str, float | None]] = {}
    with TemporaryDirectory(dir=work) as name:
        if model.row_format != "as_trained":
            original = replace(model, row_format="as_trained", raw=None)
            write_bundle(Path(name), original, {"run": "", "step": 0}, {})
            bundles["as_trained"] = replace(load(name, check=False), encoder=bundle.encoder)
        for rows, each in bundles.items():
            loader = open_loader(
                manifest,
                split=split,
                batch_size=batch_size,
                backend="memmap",
                shuffle="none",
                crosses=model.hashed,
            )
            result = score_bundle(each, loader.epoch(0))
            loader.close()
            print(f"rows {rows}: {describe_evaluation(result)} ({split} of {manifest.origin})")
            scores[rows] = {"auc": result.auc, "logloss": result.logloss}
    return scores

"""Define the commands that make and check data sets: schema, prepare, encode, synth, stats,
verify.
"""

import argparse
import errno
import json
import logging
import os
import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from sbpflow.config.yaml_text import load_yaml
from sbpflow.data.engine import add_engine, engine_options
from sbpflow.data.format.manifest import MANIFEST, Manifest, load_manifest
from sbpflow.data.format.schema import CRITEO, Schema
from sbpflow.data.format.verify import verify_set
from sbpflow.data.prepare.decompress import COMPRESSIONS
from sbpflow.data.prepare.schema_file import parse_crosses, read_schema
from sbpflow.data.prepare.split import parse_split
from sbpflow.errors import ConfigError, DataError, StoreError
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath, any_path, input_path
from sbpflow.runtime.processes.launch import ArgumentParser, errno_of, until_nobody_reads
from sbpflow.serving.cells import TRANSFORMS

_LOG = logging.getLogger(__name__)
_DISK_FACTOR = {".parquet": 4.5} | {s: each.disk_factor for s, each in COMPRESSIONS.items()}
"""Peak disk use in bytes per byte of input, by file suffix; 1.4 for all other suffixes"""

_SHARED = (
    *("schema", "crosses", "min_count", "hash_size", "dense", "seed", "spare"),
    *("keep_strings", "keys"),
)
"""Options of prepare that cannot be combined with ``--like``"""
_OF_VOCABULARIES = ("min_count", "spare", "keep_strings", "grow")
"""Options of prepare that affect only fields with a vocabulary"""


def _prepare(args: argparse.Namespace) -> Manifest | None:
    from sbpflow.data.prepare.content import options_like
    from sbpflow.data.prepare.options import PrepareOptions, parse_hash_sizes, parse_keys
    from sbpflow.data.prepare.prepare import prepare

    given = [key for key in _SHARED if getattr(args, key) is not None]
    if args.like is not None and given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')}: this option is determined by the --like set "
            f"({args.like}); remove the option, or remove --like"
        )
    if args.grow and args.like is None:
        raise ConfigError("--grow needs a set to grow from; use, for example, --like OLD --grow")
    schema = _schema_of(args)
    default = "C1xC2,C3xC4" if schema is CRITEO else "none"
    crosses = parse_crosses(default if args.crosses is None else args.crosses, schema.sparse)
    hashable = (*schema.sparse, *("x".join(pair) for pair in crosses))
    options = PrepareOptions(
        inputs=tuple(args.input),
        output=args.output,
        split=parse_split(args.split),
        crosses=crosses,
        schema=schema,
        min_count=2 if args.min_count is None else args.min_count,
        transform="log3" if args.dense is None else args.dense,
        hash_sizes=() if args.hash_size is None else parse_hash_sizes(args.hash_size, hashable),
        keys=() if args.keys is None else parse_keys(args.keys, hashable),
        workers=args.workers,
        seed=7 if args.seed is None else args.seed,
        max_bad_fraction=args.max_bad_fraction,
        overwrite=args.overwrite,
        grow=args.grow,
        spare=args.spare or 0.0,
        keep_strings=bool(args.keep_strings),
        engine=engine_options(args),
    )
    if args.like is not None:
        options = options_like(load_manifest(args.like, "--like"), options)
    useless = [key for key in _OF_VOCABULARIES if getattr(args, key)]
    if useless and not options.counted:
        advice = ""
        if len(options.keys) > 1:
            advice = f", or make a set with keys for fewer fields, such as --keys {options.keys[0]}"
        elif len(options.hash_sizes) > 1 and args.like is None:
            name = options.hash_sizes[0][0]
            advice = f", or hash fewer fields, such as --hash-size {name}=1000000"
        if options.keys:
            advice += (
                ". In training, model.fields.PATTERN.admit_count selects the keys that get rows"
            )
        raise ConfigError(
            f"--{useless[0].replace('_', '-')}: no field has a vocabulary, because all have keys, "
            f"hashed ids, or buckets; remove the option{advice}"
        )
    return prepare(options)


def _schema_of(args: argparse.Namespace) -> Schema:
    """Return the schema that the options select: one read from a file, the proposed schema, or
    Criteo's.
    """
    if args.schema == Path("auto"):
        from sbpflow.data.prepare.propose import propose

        proposal = propose(args.input)
        if not (proposal.has_label and proposal.has_sparse):
            role, remedy = "to be the label", "set label to the name of a column"
            if proposal.has_label:
                role, remedy = "to contain categories", "list at least one column under sparse"
            raise ConfigError(
                f"--schema auto: no column is likely {role}; write the schema to a file with "
                f"`sbpflow schema`, and {remedy}",
                *proposal.text.splitlines(),
            )
        _LOG.info("%s", proposal.text)
        return read_schema(load_yaml(proposal.text))
    if args.schema:
        return read_schema(args.schema)
    if args.like is None:
        from sbpflow.data.prepare.propose import refuse_guess

        refuse_guess(args.input)
    return CRITEO


def _schema(args: argparse.Namespace) -> None:
    from sbpflow.data.prepare.propose import propose

    print(propose(args.input).text, end="")


def _encode(args: argparse.Namespace) -> Manifest | None:
    from sbpflow.data.prepare.new_rows import encode

    return encode(
        args.input,
        args.output,
        like=args.like,
        workers=args.workers,
        max_bad_fraction=args.max_bad_fraction,
        overwrite=args.overwrite,
        engine=engine_options(args),
    )


def _synth(args: argparse.Namespace) -> Manifest | None:
    from sbpflow.data.synth.generate import synth
    from sbpflow.data.synth.options import SynthOptions, parse_hot, parse_skew

    same = ("rows", "output", "format", "vocab_scale", "ctr", "auc", "products", "drift", "keys")
    options = SynthOptions(
        skew=() if args.skew is None else parse_skew(args.skew),
        hot=() if args.hot is None else parse_hot(args.hot),
        split=parse_split(args.split),
        workers=args.workers,
        seed=args.seed,
        **{name: getattr(args, name) for name in same},
    )
    return synth(options)


def _stats(args: argparse.Namespace) -> None:
    from sbpflow.data.concerns import concerns
    from sbpflow.data.plots import write_png
    from sbpflow.data.profile import profile_set
    from sbpflow.data.profile_page import profile_page, profile_picture, profile_text
    from sbpflow.data.stats import compute_stats, load_stats, stats_json, stats_table

    manifest = load_manifest(args.path, "DIR")
    stats = compute_stats(manifest) if args.recount else load_stats(manifest)
    if args.png:
        write_png(stats, args.png)
    profile = profile_set(manifest)
    if args.html:
        args.html.write_text(profile_page(manifest, profile), encoding="utf-8")
    if args.picture:
        args.picture.write_text(profile_picture(manifest, profile), encoding="utf-8")
    if args.json:
        content = {**asdict(profile), "warnings": concerns(profile), "tables": stats_json(stats)}
        print(json.dumps(content))
    else:
        print(f"{profile_text(manifest, profile)}\n\n{stats_table(stats)}")


def _verify(args: argparse.Namespace) -> Manifest:
    manifest = load_manifest(args.path, "DIR")
    verify_set(manifest, os.cpu_count() or 1)
    return manifest


def _removed_part(text: str) -> str:
    raise argparse.ArgumentTypeError(
        f"{text} is no longer supported; run one command with --engine ray or --engine dask, and "
        "pass the address of your cluster with --address"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-bad-fraction", type=float, default=0.001, help="fraction of bad lines to tolerate "
        "(default %(default)s)")  # fmt: skip
    add("--overwrite", action="store_true", help="replace an existing set")
    add_engine(parser)
    add("--part", type=_removed_part, help=argparse.SUPPRESS)


def _add_synth(synth: argparse.ArgumentParser) -> None:
    add = synth.add_argument
    add("--rows", type=int, required=True, help="number of rows")
    add("--output", type=local_path, required=True, metavar="PATH", help="folder, or file for tsv")
    add("--format", choices=("prepared", "tsv"), default="prepared", help="a set, or Criteo text "
        "for prepare (default %(default)s)")  # fmt: skip
    add("--vocab-scale", type=float, default=1.0, help="size relative to Criteo's vocabularies, "
        "up to 1")  # fmt: skip
    add("--ctr", type=float, default=0.2562, help="click-through rate (default %(default)s)")
    add("--auc", type=float, default=0.80, help="best possible AUC (default %(default)s)")
    add(
        "--products",
        type=float,
        default=0.0,
        help="share of the logit's variance due to vector products",
    )
    add("--skew", help="exponent applied to frequencies: 1.2 for all columns, or C3=1.2,C1=0.5")
    add("--drift", type=float, default=0.0, help="share of values replaced per million rows, in "
        "columns with many values")  # fmt: skip
    add("--keys", action="store_true", help="write 64-bit keys instead of ids")
    add("--hot", help="number of ids per row: mlperf, mlperf-ragged, or C1=3,C20=0-12")
    add("--split", default="time:0.8,0.1,0.1", help="by row order (default %(default)s)")
    add("--seed", type=int, default=7, help="seed of all rows (default %(default)s)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="number of concurrent tasks "
        "(default: all CPUs)")  # fmt: skip
    synth.set_defaults(run=_synth)


def parser() -> ArgumentParser:
    """Return the parser for all commands; the parsed arguments contain ``run``, the function that
    runs the command.
    """
    parser = ArgumentParser(prog="sbpflow", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="turn raw rows into a prepared set")
    add = prepare.add_argument
    add("--input", nargs="+", action="extend", type=input_path, required=True, metavar="PATH",
        help=f"text files (.tsv, .txt, or .csv; plain, {', '.join(COMPRESSIONS)}), Parquet or "
        "Arrow files, or folders of files, in time order; also fsspec URLs (s3://)")  # fmt: skip
    add("--output", type=any_path, required=True, metavar="DIR", help="folder of the set, which is "
        "built in DIR.work first, or a URL, to which the finished set is uploaded")  # fmt: skip
    add("--split", default="time:0.8,0.1,0.1", help="by row order (time:TRAIN,VAL,TEST), by date "
        "(time:COLUMN<DATE,COLUMN<DATE, the first times of val and test), at random "
        "(ratio:TRAIN,VAL,TEST), or by file (file:val=PATTERN,test=PATTERN) (default %(default)s)",
        )  # fmt: skip
    add("--min-count", type=int, help="values with fewer lookups in train share id 1 (default 2)")
    add("--crosses", help="pairs of columns for the wide part, or none (default none; "
        "C1xC2,C3xC4 for Criteo)")  # fmt: skip
    add("--hash-size", help="table rows of hashed fields: N for all, or C3=N,C12=N")
    add("--keys", nargs="?", const="*", metavar="FIELDS", help="fields whose ids are replaced "
        "by 64-bit keys, so that their tables can grow (C1,C2; without FIELDS, all)")  # fmt: skip
    add("--dense", help=f"transform of the dense values: {', '.join(TRANSFORMS)} (default log3)")
    add("--schema", type=local_path, metavar="FILE|auto", help="YAML with label, dense, sparse, "
        "columns (default: Criteo); auto accepts the proposal of `sbpflow schema`")  # fmt: skip
    add("--seed", type=int, help="seed of the ids and of a ratio split (default 7)")
    add(
        "--like",
        type=any_path,
        metavar="SET",
        help="use the ids, schema and constants of this set",
    )
    add("--grow", action="store_true", help="assign ids to values without an id in --like")
    add("--spare", type=float, help="unused ids for growth, as a fraction of the values (default "
        "0)")  # fmt: skip
    add("--keep-strings", action="store_true", default=None, help="store the original string "
        "of every id of string columns")  # fmt: skip
    _add_common(prepare)
    prepare.set_defaults(run=_prepare)
    schema = commands.add_parser("schema", help="propose a schema for a table with column names")
    schema.add_argument("input", nargs="+", type=input_path, metavar="PATH", help="files or "
        "folders as in prepare, with column names")  # fmt: skip
    schema.set_defaults(run=_schema)
    encode = commands.add_parser("encode", help="encode new rows with the ids of a set")
    add = encode.add_argument
    add("--like", type=any_path, required=True, metavar="SET", help="set that provides the ids")
    add("--input", nargs="+", action="extend", type=input_path, required=True, metavar="PATH",
        help="files as in prepare; labels are optional")  # fmt: skip
    add("--output", type=any_path, required=True, metavar="DIR", help="as in prepare")
    _add_common(encode)
    encode.set_defaults(run=_encode)
    _add_synth(commands.add_parser("synth", help="generate rows with a known best AUC"))
    stats = commands.add_parser("stats", help="describe the splits and tables of a set")
    add = stats.add_argument
    add("path", type=any_path, metavar="DIR", help="folder or URL of the set")
    add("--json", action="store_true", help="machine-readable output")
    add("--html", type=local_path, metavar="FILE", help="also write an HTML page")
    add("--picture", type=local_path, metavar="FILE", help="also write the charts as an SVG file")
    add("--png", type=local_path, help="also write two heat maps of lookups to this file")
    add("--recount", action="store_true", help="count lookups instead of reading the manifest")
    stats.set_defaults(run=_stats)
    verify = commands.add_parser("verify", help="check every file of a set, and its labels, "
        "dense values and ids")  # fmt: skip
    verify.add_argument("path", type=any_path, metavar="DIR", help="folder or URL of the set")
    verify.set_defaults(run=_verify)
    return parser


def _summary(manifest: Manifest) -> str:
    rows = " ".join(f"{name} {count:,}" for name, count in manifest.splits.items())
    num_keyed = sum(field.keyed for field in manifest.fields)
    tables = f"{len(manifest.fields) - num_keyed} tables with "
    tables += f"{sum(field.rows for field in manifest.fields):,} rows"
    tables += f", {num_keyed} fields with keys" if num_keyed else ""
    text = f"{manifest.origin}: rows {rows}; {tables}; fingerprint {manifest.fingerprint[:16]}"
    if manifest.bayes:
        bayes = manifest.bayes
        text += f"\nbest possible on {bayes.split}: AUC {bayes.auc:.4f}, "
        text += f"logloss {bayes.logloss:.4f}"
    return text


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _disk_space(args: argparse.Namespace, number: int) -> str:
    """If a local output cannot be written for lack of space, return a note on the free space and,
    for a command with inputs, on the space needed; otherwise, return "".
    """
    output: AnyPath | None = getattr(args, "output", None)
    if not isinstance(output, Path) or number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ""
    folder = next((path for path in (output, *output.parents) if path.is_dir()), Path())
    free = f"{_size(shutil.disk_usage(folder).free)} is free in {folder}"
    if not (inputs := getattr(args, "input", None)):
        return f"; {free}"
    files = [f for path in inputs for f in ([path] if path.is_file() else path.iterdir())]
    files = [f for f in files if f.is_file()]
    size = sum(f.stat().st_size * _DISK_FACTOR.get(f.suffix.lower(), 1.4) for f in files)
    return (
        f"; the command needs about {_size(size)} at its peak, including finished parts, but "
        f"{free}; free some space and rerun the command to resume, or choose another output"
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit status (2 for user errors)."""
    return until_nobody_reads(partial(_main, argv))


def _run(args: argparse.Namespace, words: list[str]) -> Manifest | None:
    """Run a command; if the output is a URL, first make the set in a local folder."""
    like: AnyPath | None = getattr(args, "like", None)
    if like is not None and args.output.resolve() == like.resolve():
        # A command that is killed while it replaces the set could not be repeated.
        raise ConfigError(
            f"--output {args.output}: this folder contains the --like set, which the new set would "
            f"replace; choose another folder, such as {args.output}-2"
        )
    if not isinstance(getattr(args, "output", None), RemotePath):
        return args.run(args)
    from sbpflow.data.remote_output import make_remote

    def make(folder: Path) -> Manifest | None:
        return args.run(argparse.Namespace(**{**vars(args), "output": folder}))

    others: list[AnyPath] = [] if like is None else [like / MANIFEST]
    others += [] if (schema := getattr(args, "schema", None)) is None else [schema]
    return make_remote(args.output, words, args.input, others, make, overwrite=args.overwrite)


def _main(argv: list[str] | None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        args = parser().parse_args(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.command in ("prepare", "encode"):
        from sbpflow.runtime.compute.malloc import keep_freed_memory

        keep_freed_memory()
    try:
        manifest = _run(args, sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:  # not a disk error; ``until_nobody_reads`` ends the command
        raise
    except (ConfigError, DataError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # Errors from writing to a full disk do not contain a file name.
        where = getattr(args, "output", None) if error.filename is None else error.filename
        number = errno_of(error)
        reason = os.strerror(number) if number else str(error) or "cannot be used"
        print(
            f"error: {where or args.command}: {reason.lower()}{_disk_space(args, number)}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        resumes = "; rerun the command to resume"
        hints = {"prepare": resumes, "encode": resumes, "synth": "; a rerun starts over"}
        print(f"stopped{hints.get(args.command, '')}", file=sys.stderr)
        return 130
    if manifest is not None:
        print(_summary(manifest))
    return 0


if __name__ == "__main__":
    sys.exit(main())

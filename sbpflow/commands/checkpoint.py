"""``sbpflow checkpoint``: list, verify, compare, rewrite, and remove checkpoints."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from sbpflow.commands.saved_run import add_optimizer
from sbpflow.errors import ConfigError
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.files.remote_path import AnyPath, any_path
from sbpflow.runtime.processes.launch import ArgumentParser

if TYPE_CHECKING:
    from sbpflow.data.format.manifest import Manifest


def checkpoint(argv: Sequence[str]) -> int:
    """List, verify, compare, rewrite, and remove checkpoints."""
    parser = ArgumentParser(prog="sbpflow checkpoint", description=checkpoint.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    path_help = "a checkpoint, a folder of checkpoints, or a run folder"
    for name, text in (("ls", "show one line per checkpoint"), ("verify", "check every byte")):
        command = commands.add_parser(name, help=text)
        command.add_argument("path", type=any_path, help=path_help)
    diff = commands.add_parser("diff", help="show how two checkpoints differ")
    diff.add_argument("left", type=any_path, help=path_help)
    diff.add_argument("right", type=any_path, help=path_help)
    prune = commands.add_parser("prune", help="keep only the best and the newest valid checkpoints")
    prune.add_argument("path", type=any_path, help=path_help)
    prune.add_argument("--keep", type=int, required=True, help="number of checkpoints to keep")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    compact = commands.add_parser("compact", help="turn the newest delta into a full checkpoint")
    compact.add_argument("path", type=any_path, help=path_help)
    erase = commands.add_parser("erase", help="rewrite the newest checkpoint without some keys")
    erase.add_argument("path", type=any_path, help=path_help)
    erase.add_argument("--field", required=True, help="a growing field")
    erase.add_argument("--keys", type=local_path, required=True, metavar="FILE",
                       help="text file with one value of the field per line")  # fmt: skip
    to_keys = commands.add_parser("to-keys", help="turn fitted fields into growing tables")
    to_keys.add_argument("path", type=any_path, help=path_help)
    to_keys.add_argument("--data", type=any_path, required=True, metavar="SET",
                         help="a set with keys, prepared with --keys")  # fmt: skip
    to_keys.add_argument("--output", type=any_path, required=True, metavar="FOLDER",
                         help="folder for the new checkpoint")  # fmt: skip
    for command in (erase, to_keys):
        add_optimizer(command)
    args = parser.parse_args(argv)

    from sbpflow.checkpoint import commands as run

    if names := getattr(args, "optimizer", ()):
        from sbpflow.run.saved.keys import import_optimizers

        import_optimizers(names)

    good = True
    if args.command == "ls":
        text = run.list_text(args.path)
    elif args.command == "verify":
        text, good = run.verify_text(args.path)
    elif args.command == "diff":
        text, good = run.diff_text(args.left, args.right)
    elif args.command == "prune":
        text = "\n".join(run.prune(args.path, args.keep, dry_run=args.dry_run))
    elif args.command == "compact":
        text = run.compact(args.path)
    elif args.command == "erase":
        text = _erase(args.path, args.field, args.keys)
    elif args.command == "to-keys":
        text = _to_keys(args.path, args.data, args.output)
    else:
        raise ValueError(
            f"checkpoint has no command {args.command}; use one of {', '.join(commands.choices)}"
        )
    print(text)
    return 0 if good else 1


def _erase(path: AnyPath, field: str, file: Path) -> str:
    from sbpflow.checkpoint.commands import checkpoints_of
    from sbpflow.checkpoint.folder import checked
    from sbpflow.data.values import keys_of_values
    from sbpflow.run.saved.keys import check_grows, erase
    from sbpflow.runtime.files.json_file import JsonError, read_text

    checkpoint = checkpoints_of(path)[0]
    plan = check_grows(checked(checkpoint), field)
    manifest = _manifest_of(checkpoint)
    try:
        text = read_text(file).removeprefix("\ufeff")  # some editors write a byte order mark
    except JsonError as error:
        raise ConfigError(f"--keys: {error}; use a text file with one value per line") from error
    # `splitlines` would also divide values at characters such as U+2028.
    values = [line.removesuffix("\n") for line in StringIO(text, newline=None)]
    # ``field`` may be the name of a vocabulary, whose features have values of the same kind.
    feature = field if field in plan.features else plan.features[0]
    return erase(path, field, keys_of_values(manifest, feature, values))


def _to_keys(path: AnyPath, data: AnyPath, output: AnyPath) -> str:
    from sbpflow.checkpoint.commands import checkpoints_of
    from sbpflow.checkpoint.folder import checked
    from sbpflow.data.format.manifest import load_manifest
    from sbpflow.data.values import values_with_keys
    from sbpflow.run.saved.keys import Values, to_keys

    checkpoint, keyed = checked(checkpoints_of(path)[0]), load_manifest(data, "--data")
    trained = _manifest_of(checkpoint.path)
    values = values_with_keys(trained, keyed)
    if keyed.transforms != trained.transforms:
        raise ConfigError(
            f"--data: the dense columns of {data} have other transforms or constants than those of "
            f"the training set of {checkpoint.path}, so the same number would mean something else "
            "to the model; prepare the training rows with the same options and --keys"
        )
    # No data set has this fingerprint and row digest, so a run that resumes from this checkpoint
    # starts a new epoch.
    facts = {
        "path": str(keyed.origin),
        "fingerprint": "",
        "content_id": "",
        "vocabulary_digest": keyed.vocabulary_digest,
        "transforms_digest": keyed.transforms_digest,
    }
    given = {name: Values(*arrays) for name, arrays in values.items()}
    return to_keys(checkpoint, given, facts, output)


def _manifest_of(checkpoint: AnyPath) -> "Manifest":
    """Return the training set's manifest, which is saved in the run folder."""
    from sbpflow.checkpoint.folder import data_folder
    from sbpflow.data.format.manifest import load_manifest

    return load_manifest(data_folder(checkpoint))

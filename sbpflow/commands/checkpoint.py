"""``sbpflow checkpoint``: list, verify, compare, compact, and remove checkpoints."""

from collections.abc import Sequence

from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser


def checkpoint(argv: Sequence[str]) -> int:
    """List, verify, compare, compact, and remove checkpoints."""
    parser = ArgumentParser(prog="sbpflow checkpoint", description=checkpoint.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    path_help = "a checkpoint, a folder of checkpoints, or a run folder"
    for name, text in (("ls", "show one line per checkpoint"), ("verify", "check every byte")):
        command = commands.add_parser(name, help=text)
        command.add_argument("path", type=local_path, help=path_help)
    diff = commands.add_parser("diff", help="show how two checkpoints differ")
    diff.add_argument("left", type=local_path)
    diff.add_argument("right", type=local_path)
    prune = commands.add_parser("prune", help="remove all but the newest good checkpoints")
    prune.add_argument("path", type=local_path)
    prune.add_argument("--keep", type=int, required=True, help="number of checkpoints to keep")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    compact = commands.add_parser("compact", help="turn the newest delta into a full checkpoint")
    compact.add_argument("path", type=local_path, help=path_help)
    args = parser.parse_args(argv)

    from sbpflow.checkpoint import commands as run

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
    else:
        raise ValueError(f"checkpoint {args.command}; use ls, verify, diff, prune or compact")
    print(text)
    return 0 if good else 1

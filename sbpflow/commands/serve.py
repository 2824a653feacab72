"""``sbpflow serve``: answer HTTP requests with the scores of exported models."""

import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from sbpflow.errors import ConfigError
from sbpflow.runtime.files.local_path import PathError, local_path
from sbpflow.runtime.processes.launch import ArgumentParser, raise_file_limit

_MOST_SECONDS = 10**9  # the system rejects much longer waits
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def _arguments(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        prog="sbpflow serve", description="Answer HTTP requests with the scores of exported models."
    )
    add = parser.add_argument
    text = (
        "an exported model, or a folder of exports (export.dir), whose newest one is served; with "
        "several models, name each one (the first is the default)"
    )
    add("models", nargs="+", metavar="[NAME=]DIR", help=text)
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, default=8000, help="port, or 0 for any free port (default 8000)")
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=int, default=cores, help="processes (default: one per core)")
    add(
        "--shadow",
        metavar="NAME",
        help="model that also scores the other models' requests, after they are answered",
    )
    add(
        "--compiled",
        action="store_true",
        help="also load compiled dense parts (dense.pt2), which contain code",
    )
    add(
        "--max-body-bytes",
        type=int,
        default=4 << 20,
        help="maximum request body size (default 4 MiB)",
    )
    add("--max-rows", type=int, default=8192, help="maximum rows per request (default 8192)")
    add("--batch-rows", type=int, default=1024, help="maximum rows scored together (default 1024)")
    add(
        "--poll-seconds",
        type=float,
        default=1.0,
        help="time between checks for new deltas (default 1)",
    )
    add(
        "--grace-seconds",
        type=int,
        default=10,
        help="time to finish open requests after SIGTERM (default 10)",
    )
    args = parser.parse_args(argv)
    least = {"poll_seconds": 0.001, "grace_seconds": 0}
    for name in ("workers", "max_body_bytes", "max_rows", "batch_rows", *least):
        value, low, key = getattr(args, name), least.get(name, 1), name.replace("_", "-")
        most = _MOST_SECONDS if name in least else sys.maxsize
        if not low <= value <= most:
            raise ConfigError(
                f"--{key} must be between {low} and {most:,}, got {value}; for example, --{key} 1"
            )
    if not args.host:  # the system would listen on all addresses
        raise ConfigError("--host is empty; use 127.0.0.1, or 0.0.0.0 for all addresses")
    if args.port not in range(1 << 16):
        raise ConfigError(f"--port must be between 0 and 65535, got {args.port}")
    return args


def folders_of(models: Sequence[str]) -> dict[str, Path]:
    """Return the folders of models by name; raise ConfigError for bad or repeated names."""
    folders: dict[str, Path] = {}
    for text in models:
        name, given, path = text.partition("=")
        if "/" in name:  # a path such as out/day=7, because a name has no slash
            given = ""
        try:
            folder = local_path(path if given else text)
        except PathError as error:
            raise ConfigError(f"[NAME=]DIR: {error}") from error
        name = name if given else folder.resolve().name
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{text}: {name!r} cannot be part of a path; use only letters, digits, and the "
                f"characters ._- (for example, main={folder})"
            )
        if name in folders:
            raise ConfigError(
                f"{text}: the name {name!r} is used twice; name each model differently, as in "
                "NAME=DIR"
            )
        folders[name] = folder
    return folders


def serve(argv: Sequence[str]) -> int:
    """Answer HTTP requests with the scores of exported models."""
    args = _arguments(argv)
    folders = folders_of(args.models)
    if args.shadow is not None and args.shadow not in list(folders)[1:]:
        others = " or ".join(list(folders)[1:]) or "a second model, as in a=DIR b=DIR --shadow b"
        raise ConfigError(f"--shadow must name a second model, got {args.shadow!r}; use {others}")
    try:
        from sbpflow.serving.app import Limits
        from sbpflow.serving.server import Settings, run_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; run pip install 'sbpflow[serve]'") from error
    raise_file_limit()
    limits = Limits(body_bytes=args.max_body_bytes, rows=args.max_rows, batch_rows=args.batch_rows)
    return run_server(
        folders,
        Settings(
            host=args.host,
            port=args.port,
            workers=args.workers,
            shadow=args.shadow,
            compiled=args.compiled,
            limits=limits,
            poll_s=args.poll_seconds,
            grace_s=args.grace_seconds,
        ),
    )

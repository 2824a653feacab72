"""``sbpflow embedding-server``: keep the rows of cached tables in memory for the ranks of a run."""

import argparse
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Sequence

from sbpflow.errors import ConfigError
from sbpflow.runtime.processes.launch import raise_file_limit

_INDEX = re.compile(r"(\d{1,5})/(\d{1,5})")
_BACKLOG = 1024
_MAX_MEMORY_GB = 1e9


def embedding_server(argv: Sequence[str]) -> int:
    """Listen on one of the addresses in ``parallel.storage`` until the process is stopped."""
    from sbpflow.commands.train import config_parser

    parser = config_parser(
        "sbpflow embedding-server", "Keep rows of cached tables in memory for the ranks of a run."
    )
    add = parser.add_argument
    add("--index", required=True, metavar="K/N", help="this is server K of N; K starts at 0")
    add("--memory-gb", type=float, help="limit for all rows (default: the memory of the machine "
        "or, if lower, the limit of its control groups)")  # fmt: skip
    add(
        "--listener",
        type=int,
        metavar="FD",
        help=argparse.SUPPRESS,  # an inherited socket; the server ends when stdin is closed
    )
    args = parser.parse_intermixed_args(argv)
    if args.memory_gb is not None and not 0 < args.memory_gb <= _MAX_MEMORY_GB:
        raise ConfigError(
            f"--memory-gb must be above 0 and at most {_MAX_MEMORY_GB:,.0f}, got "
            f"{args.memory_gb}; for example, --memory-gb 64"
        )
    from sbpflow.config.load import load_config
    from sbpflow.config.storage_rules import named_servers
    from sbpflow.models.registry import MODELS
    from sbpflow.run.execution.servers import make_server
    from sbpflow.runtime.compute.devices import memory_bytes

    config = load_config(args.config, args.overrides, models=MODELS)
    named = named_servers(config.parallel.storage)
    key, addresses, _ = named
    index = _index_of(args.index, len(addresses), key)
    if args.memory_gb is None:
        memory = memory_bytes("cpu")
        limit = sys.maxsize if memory is None else memory
    else:
        limit = int(args.memory_gb * 1e9)
    server = make_server(named, limit)
    raise_file_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s embedding server: %(message)s")
    if args.listener is None:
        listener = _listen(addresses[index], f"{key}.addresses")
    else:
        listener = socket.socket(fileno=args.listener)
        threading.Thread(target=_exit_after_stdin, daemon=True).start()
    with listener:
        logging.info("server %s listens on %s:%d", args.index, *listener.getsockname()[:2])
        server.serve(listener)
    return 0


def _index_of(text: str, count: int, key: str) -> int:
    match = _INDEX.fullmatch(text)
    if match is None or int(match[2]) != count or int(match[1]) >= count:
        raise ConfigError(
            f"--index must be K/{count} with K below {count}, because {key}.addresses lists "
            f"{count} servers, got {text!r}; for example, --index 0/{count}"
        )
    return int(match[1])


def _listen(address: tuple[str, int], key: str) -> socket.socket:
    """Listen on exactly this address."""
    try:
        family, kind, *_, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)  # fails if another server began to listen after the bind
    except OSError as error:
        raise ConfigError(
            f"{key}: this server cannot listen on {address[0]}:{address[1]} ({error.strerror}); "
            "use an address of this machine and a free port"
        ) from error
    return listener


def _exit_after_stdin() -> None:
    """End the process when the pipe to stdin closes, because the launcher has then ended."""
    sys.stdin.buffer.read()
    os._exit(0)

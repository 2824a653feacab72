"""Runs the ``sbpflow`` command: dispatches to the subcommand named by the first argument.

As a composition root, this module may import every package.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from sbpflow.runtime.processes.launch import dispatch, run_main

Command = Callable[[Sequence[str]], int]


def _own(name: str) -> Command:
    def run(argv: Sequence[str]) -> int:
        return getattr(import_module(f"sbpflow.commands.{name}"), name)(argv)

    return run


def _of_data(name: str) -> Command:
    def run(argv: Sequence[str]) -> int:
        from sbpflow.data.__main__ import main

        return main([name, *argv])

    return run


def _of_planner(name: str) -> Command:
    def run(argv: Sequence[str]) -> int:
        from sbpflow.planner.__main__ import COMMANDS

        return COMMANDS[name](argv)

    return run


_DATA = ("schema", "prepare", "encode", "synth", "stats", "verify")
COMMANDS: dict[str, Command] = {
    **{name: _of_data(name) for name in _DATA},
    **{name: _own(name) for name in ("train", "explain")},
    **{name: _of_planner(name) for name in ("calibrate", "plan", "compare", "measure", "clusters")},
    "explain-plan": _of_planner("explain"),
    "embedding-server": _own("embedding_server"),
    **{name: _own(name) for name in ("predict", "export", "serve", "embeddings")},
    **{name: _own(name) for name in ("checkpoint", "report", "doctor")},
}


def main() -> int:
    """Dispatch to the subcommand named by the first argument."""
    # Add the working folder to the path so that users' own classes (package.module:Class) can be
    # imported. It comes last so that a user's file never shadows an installed module.
    if "" not in sys.path:
        sys.path.append("")
    return dispatch("sbpflow", COMMANDS, sys.argv[1:])


def entry() -> None:
    """Run the command as the console script does; the entry point of the installed package."""
    run_main(main)


if __name__ == "__main__":
    entry()

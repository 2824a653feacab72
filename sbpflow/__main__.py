"""Runs the ``sbpflow`` command: dispatches to the subcommand named by the first argument.

As a composition root, this module may import every package.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from sbpflow.runtime.compute.versions import SBPFLOW_VERSION
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


_WITH_HELP: dict[str, tuple[str, Command]] = {
    "schema": ("propose a schema for a table", _of_data("schema")),
    "prepare": ("turn tables into a set for training", _of_data("prepare")),
    "encode": ("encode new rows with the ids of a set", _of_data("encode")),
    "synth": ("generate a table or a set", _of_data("synth")),
    "stats": ("show the statistics and problems of a set", _of_data("stats")),
    "verify": ("check every file and value of a set", _of_data("verify")),
    "train": ("train a model on one or more ranks", _own("train")),
    "explain": ("show layouts, memory, and transfers of a run", _own("explain")),
    "calibrate": ("measure this machine for the planner", _of_planner("calibrate")),
    "plan": ("choose layouts for the tables", _of_planner("plan")),
    "compare": ("compare the plans of all planners", _of_planner("compare")),
    "measure": ("time plans; `plan --measure` starts it", _of_planner("measure")),
    "clusters": ("predict the step time on other machines", _of_planner("clusters")),
    "explain-plan": ("show the costs of a plan", _of_planner("explain")),
    "embedding-server": ("serve rows of tables to ranks", _own("embedding_server")),
    "predict": ("score rows with a checkpoint", _own("predict")),
    "export": ("write a self-contained model", _own("export")),
    "serve": ("answer requests with exported models", _own("serve")),
    "embeddings": ("write the vectors of a table", _own("embeddings")),
    "checkpoint": ("list, verify, compare, rewrite, and remove checkpoints", _own("checkpoint")),
    "report": ("write a page that compares runs", _own("report")),
    "doctor": ("check this installation", _own("doctor")),
}
"""The subcommands, each with its line of help"""
COMMANDS = {name: run for name, (_, run) in _WITH_HELP.items()}


def main() -> int:
    """Dispatch to the subcommand named by the first argument."""
    # Add the working folder to the path so that users' own classes (package.module:Class) can be
    # imported. The folder comes last so that a user's file never shadows an installed module.
    if "" not in sys.path:
        sys.path.append("")
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"sbpflow {SBPFLOW_VERSION}\n")
        return 0
    lines = {name: line for name, (line, _) in _WITH_HELP.items()}
    return dispatch("sbpflow", COMMANDS, sys.argv[1:], lines)


def entry() -> None:
    """Run the command; the console script of the installed package calls this function."""
    run_main(main)


if __name__ == "__main__":
    entry()

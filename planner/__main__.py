"""``sbpflow calibrate | plan | explain-plan | compare | measure | clusters``.

Each command imports its dependencies only when it runs.
"""

import os
import sys
from collections.abc import Callable, Sequence

from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser, dispatch, parse_seed, run_main


def calibrate(argv: Sequence[str]) -> int:
    """Measure ranks on this machine, and write the profile that planners use to price plans."""
    parser = ArgumentParser(
        prog="sbpflow calibrate",
        description="Measure the engine on this machine and write a profile of its costs.",
    )
    parser.add_argument(
        "--ranks", type=int, help="number of processes; default: one per GPU, or 2 on CPU"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="device of the ranks; default: auto, which is cuda if there is a GPU",
    )
    parser.add_argument("--seconds", type=float, help="limit on the total time; default: 270")
    parser.add_argument(
        "--rounds", type=int, help="how often to measure each plan of a task; default: 2"
    )
    parser.add_argument(
        "--optimizer",
        default="rowwise_adagrad",
        help="optimizer of the tables; default: %(default)s",
    )
    parser.add_argument("--seed", type=parse_seed, default=0, help="seed of the tasks; default: 0")
    parser.add_argument(
        "--quick", action="store_true", help="calibrate briefly with small tables, for tests"
    )
    parser.add_argument(
        "--output", type=local_path, help="the profile to write; default: in the user's cache"
    )
    args = parser.parse_args(argv)

    from sbpflow.planner.calibration.calibrate import default_ranks, run_calibration
    from sbpflow.runtime.processes.start_ranks import start_ranks

    if "RANK" not in os.environ:
        ranks = default_ranks(args.device) if args.ranks is None else args.ranks
        return start_ranks(["calibrate", *argv], ranks, "--ranks")
    if text := run_calibration(args):
        print(text)
    return 0


def _planning(name: str) -> Callable[[Sequence[str]], int]:
    """Run a command of ``planner.plan_command``; import the module only when the command runs."""

    def run(argv: Sequence[str]) -> int:
        from sbpflow.planner import plan_command

        if text := getattr(plan_command, name)(argv):
            print(text)
        return 0

    return run


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "calibrate": calibrate,
    "plan": _planning("plan"),
    "explain": _planning("explain"),
    "compare": _planning("compare"),
    "measure": _planning("measure"),
    "clusters": _planning("clusters"),
}


def main() -> int:
    """Run the command named by the first argument."""
    return dispatch("sbpflow", COMMANDS, sys.argv[1:])


if __name__ == "__main__":
    run_main(main)

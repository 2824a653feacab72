"""Calibrates the planner over a link of a given rate between two network namespaces.

    python -m benchmarks.planner_link --link 1gbit --output FILE [--ranks 4] [--rounds 2]

Pass the resulting FILE as ``--profile`` to the ``sbpflow`` commands.
"""

import argparse
import sys

from benchmarks.network import start_ranks
from sbpflow.planner.__main__ import calibrate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--link", default="1gbit", help="a rate in tc's notation")
    parser.add_argument("--ranks", type=int, default=2, help="half of the ranks on each host")
    parser.add_argument("--output", required=True)
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    words = ["--output", args.output, "--seconds", str(args.seconds), "--seed", str(args.seed)]
    words += ["--rounds", str(args.rounds)]
    if args.worker:
        sys.exit(calibrate(words))
    start_ranks("benchmarks.planner_link", args.ranks, words, link=args.link)


if __name__ == "__main__":
    main()

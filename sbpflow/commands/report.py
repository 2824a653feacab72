"""``sbpflow report``: compare several runs on one page."""

from collections.abc import Sequence

from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser


def report(argv: Sequence[str]) -> int:
    """Write a page of curves and tables for one or more runs, and print its path."""
    parser = ArgumentParser(
        prog="sbpflow report",
        description="Write a self-contained HTML file that compares runs.",
    )
    parser.add_argument(
        "runs", nargs="+", type=local_path, metavar="RUN", help="run folder (its run.dir)"
    )
    parser.add_argument(
        "--output", type=local_path, help="output file (default: report.html in the first RUN)"
    )
    args = parser.parse_args(argv)

    from sbpflow.run.report.page import write_report

    print(write_report(args.runs, args.output))
    return 0

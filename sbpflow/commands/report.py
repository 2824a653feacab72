"""``sbpflow report``: runs side by side on one page."""

from collections.abc import Sequence

from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser


def report(argv: Sequence[str]) -> int:
    """Write a page of curves and tables of one or more runs, and say where."""
    parser = ArgumentParser(
        prog="sbpflow report",
        description="Write one HTML file that shows runs side by side and needs no network.",
    )
    parser.add_argument(
        "runs", nargs="+", type=local_path, metavar="RUN", help="folder of a run (its run.dir)"
    )
    parser.add_argument(
        "--output", type=local_path, help="the file; RUN/report.html of the first run"
    )
    args = parser.parse_args(argv)

    from sbpflow.run.report.page import write_report

    print(write_report(args.runs, args.output))
    return 0

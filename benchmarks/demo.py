"""Prints the last lines of ``make demo``: the test AUC of both runs and the best possible AUC.

    python -m benchmarks.demo .demo/wdl .demo/wide [--record]

``--record`` also writes benchmarks/results/demo.jsonl, which the README and docs/first_run.md
quote.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.record import Results


def final(folder: Path) -> dict[str, float]:
    """Return the ``final`` event of a run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="ascii").splitlines()
    event = json.loads(lines[-1])
    if event["event"] != "final":
        sys.exit(f"{folder}: the run did not reach its end")
    return event


def lines(wide_deep: dict[str, float], wide: dict[str, float]) -> str:
    """Format the three AUC values, one per line."""
    rows = {
        "best possible": wide_deep["best_auc"],
        "wide & deep": wide_deep["auc"],
        "wide alone": wide["auc"],
    }
    return "".join(f"{name:<14} test AUC {auc:.4f}\n" for name, auc in rows.items())


def main() -> None:
    """Print the AUC values and, if requested, record the values."""
    parser = argparse.ArgumentParser(prog="benchmarks.demo", description=__doc__)
    parser.add_argument("wide_deep", type=Path, help="the folder of the run with both parts")
    parser.add_argument("wide", type=Path, help="the folder of the run with only the wide part")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    events = {"wide & deep": final(args.wide_deep), "wide alone": final(args.wide)}
    sys.stdout.write(lines(*events.values()))
    if args.record:
        results = Results("demo")
        for name, event in events.items():
            figures = {key: event[key] for key in ("auc", "best_auc", "logloss", "steps")}
            results.add(benchmark="demo", run=name, **figures)


if __name__ == "__main__":
    main()

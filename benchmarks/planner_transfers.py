"""Measures errors of a calibration's fit on held-out tasks, with and without transfers timed alone.

    python -m benchmarks.planner_transfers JOURNAL [--link 1gbit]

JOURNAL is the ``.measured.jsonl`` file next to the profile of ``sbpflow calibrate`` or of
``benchmarks.planner_link``.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.record import Results
from sbpflow.planner.calibration.calibrate import Journal
from sbpflow.planner.calibration.design import draw_sample
from sbpflow.planner.calibration.fit import held_out_errors
from sbpflow.planner.calibration.records import Record, record_of
from sbpflow.planner.costs.transfers import as_lines

SEEDS = (0, 1)  # seeds of the fits; the errors are averaged


def records_of(journal: Journal, facts: dict[str, str]) -> list[Record]:
    """Return all plans that the calibration measured."""
    size, backend = facts["world"].split()
    records: list[Record] = []
    for (number, _), entry in sorted(journal.entries.items()):
        sample = draw_sample(
            number + 1000 * int(facts["seed"]),
            int(size),
            "cuda" if backend == "nccl" else "cpu",
            facts["optimizer"],
            most_rows=int(facts["most_rows"]),
        )
        records.append(record_of(entry, sample.task))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("journal", type=Path)
    parser.add_argument("--link", default="loopback", help="the link between the ranks")
    args = parser.parse_args()
    facts = json.loads(args.journal.read_text().splitlines()[-1])["facts"]
    journal = Journal(args.journal, facts)
    transfers = journal.transfers
    if not transfers:
        raise SystemExit(f"{args.journal}: no transfers timed alone; run calibrate again")
    print("\n".join(as_lines(transfers)))
    records = records_of(journal, facts)
    backend = facts["world"].split()[1]
    results = Results("planner_transfers", benchmark=args.link)
    results.add(transfers=[asdict(transfer) for transfer in transfers])
    for used in ([], transfers):
        dense = journal.dense or ()
        errors = [held_out_errors(records, backend, seed, used, dense) for seed in SEEDS]
        mean = {name: round(float(np.mean([e[name] for e in errors])), 4) for name in errors[0]}
        results.add(alone=bool(used), plans=len(records), errors=mean)


if __name__ == "__main__":
    main()

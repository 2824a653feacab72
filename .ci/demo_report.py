"""The last lines of ``make demo``: test AUC of both runs and the best possible AUC."""

import json
import sys
from pathlib import Path


def final(folder: Path) -> dict[str, float]:
    """The ``final`` event of a run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="ascii").splitlines()
    event = json.loads(lines[-1])
    if event["event"] != "final":
        sys.exit(f"{folder}: the run did not finish")
    return event


def main(wide_deep: Path, wide: Path) -> None:
    """Print the three AUCs, one per line."""
    both, alone = final(wide_deep), final(wide)
    rows = {
        "best possible": both["best_auc"],
        "wide & deep": both["auc"],
        "wide alone": alone["auc"],
    }
    for name, auc in rows.items():
        sys.stdout.write(f"{name:<14} test AUC {auc:.4f}\n")


if __name__ == "__main__":
    main(*(Path(folder) for folder in sys.argv[1:3]))

"""Tests whether models learn from generated rows as well as the manifest promises:
``python -m benchmarks.faithful``.

For each given vocabulary scale, the program trains Wide & Deep with train_wdl.py on 2,000,000
generated rows. It reports the test AUC, the best possible AUC from the manifest, and the smallest
and largest share of lookups in the first half of a large table. With default rows, scales, ranks,
and settings, it writes benchmarks/results/faithful.jsonl; otherwise it only prints the results.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import Results
from sbpflow.data import Manifest
from sbpflow.data.stats import count_lookups
from sbpflow.data.synth.generate import synth
from sbpflow.data.synth.options import SynthOptions

_SETTINGS = (
    "data.batch_size=2048",
    "data.shuffle=rows",
    "model.embedding_dim=8",
    "model.hidden=[64,64]",
    "model.dropout=0.0",
    "train.eval_every=0",
)
_LARGE_ROWS = 1000


def halves(manifest: Manifest) -> tuple[float, float]:
    """Return the smallest and largest share of lookups in the first half of a large table."""
    large = [field for field in manifest.fields if field.rows >= _LARGE_ROWS]
    counts = count_lookups(manifest, [field.name for field in large])
    shares = [
        float(counts[f.name][: (f.rows + 1) // 2].sum() / counts[f.name].sum()) for f in large
    ]
    return min(shares), max(shares)


def train(folder: Path, run: Path, ranks: int, settings: list[str]) -> dict[str, float]:
    """Return the ``final`` line of a run on the set in ``folder``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["train_wdl.py", "--config", "configs/scheme1.yaml", *_SETTINGS, *settings]
    command += [f"data.path={folder}", f"run.dir={run}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])


def main(argv: list[str] | None = None) -> None:
    """Generate rows, train on them, and compare the AUC."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--vocab-scale", type=float, nargs="+", default=[0.01, 1.0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="for train_wdl.py")
    args = parser.parse_intermixed_args(argv)
    results = Results("faithful", recorded=args == parser.parse_intermixed_args([]))
    for scale in args.vocab_scale:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "set"
            manifest = synth(SynthOptions(rows=args.rows, output=folder, vocab_scale=scale))
            assert manifest is not None
            assert manifest.bayes is not None
            least, most = halves(manifest)
            began = time.monotonic()
            final = train(folder, Path(scratch) / "run", args.ranks, args.settings)
            results.add(
                benchmark="wdl_on_generated_rows",
                rows=args.rows,
                vocab_scale=scale,
                table_rows=sum(field.rows for field in manifest.fields),
                auc=final["auc"],
                best_auc=manifest.bayes.auc,
                below_best=manifest.bayes.auc - final["auc"],
                logloss=final["logloss"],
                best_logloss=manifest.bayes.logloss,
                first_half_least=least,
                first_half_most=most,
                run_s=time.monotonic() - began,
                ranks=args.ranks,
                settings=[*_SETTINGS, *args.settings],
            )


if __name__ == "__main__":
    main()

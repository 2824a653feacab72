"""Tests that a model four times as large as the memory limit trains on 2 ranks with a file store,
and fails without the store.

The limit is RLIMIT_DATA, which covers the private memory of a process but not mapped files. Each of
the two ranks has this limit and stores half of the model, which takes twice as many bytes as the
limit allows.
"""

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.faults import launch
from benchmarks.record import Results
from sbpflow.data import load_manifest

DATA = resource.RLIMIT_DATA
RANKS, STEPS, BATCH, DIM = 2, 30, 1024, 32
LIMIT = 2 << 30
ROW_BYTES = 3 * DIM * 4  # lazy Adam
VOCABULARY = 0.7  # factor that scales Criteo's vocabularies to 24.2 million rows


def _train(data: Path, folder: Path, *more: str) -> tuple[list[int], str]:
    """Return the exit codes and the output of a run whose processes have the limit."""
    words = [
        f"data.path={data}", f"run.dir={folder}", f"data.batch_size={BATCH}",
        f"model.embedding_dim={DIM}", "model.hidden=[64]", "train.eval_every=0",
        f"train.max_steps={STEPS}", "checkpoint.every=0", *more,
    ]  # fmt: skip
    log = folder.with_suffix(".log")
    ranks = launch(words, log, RANKS, {}, partial(resource.setrlimit, DATA, (LIMIT, LIMIT)))
    return ranks.codes(600), log.read_text()


def _losses(folder: Path) -> list[float]:
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


def measure(results: Results, disk: Path | None) -> None:
    """Record both runs; raise SystemExit if the first run fails or the second run succeeds."""
    with tempfile.TemporaryDirectory(dir=disk) as name:
        base = Path(name)
        words = ["synth", "--rows", "60000", "--vocab-scale", str(VOCABULARY)]
        words += ["--split", "time:1,0,0", "--output", str(base / "set")]
        subprocess.run([sys.executable, "-m", "data", *words], check=True, stdout=sys.stderr)
        rows = sum(field.rows for field in load_manifest(base / "set").sparse)
        size = rows * ROW_BYTES
        if size < 4 * LIMIT:
            raise SystemExit(
                f"the rows take {size} bytes, less than four times the limit of {LIMIT}"
            )
        storage = '{"deep.*": {kind: file, cache: 1%}}'
        start = time.perf_counter()
        codes, text = _train(base / "set", base / "cached", f"parallel.storage={storage}")
        if any(codes):
            raise SystemExit(f"the cached run ended with exit codes {codes}:\n{text[-3000:]}")
        losses, seconds = _losses(base / "cached"), time.perf_counter() - start
        refused, text = _train(base / "set", base / "device")
        found = re.search(r"[^\n]*[\d.]+ [GM]i?B[^\n]*", text)
        if not any(refused) or found is None:
            raise SystemExit(
                "the run without a store did not fail with a message about memory: exit codes "
                f"{refused}:\n{text[-3000:]}"
            )
    results.add(
        ranks=RANKS, limit_bytes=LIMIT, rows=rows, model_bytes=size, times_the_limit=size / LIMIT,
        cache="1%", steps=len(losses), first_loss=losses[0], last_loss=losses[-1],
        run_s=seconds, refused_with=sorted(refused), refusal=found[0].strip(),
    )  # fmt: skip

"""How fast the data plane is: ``python -m benchmarks.data prepare|synth|loader|learn``.

One JSON line per measurement, with the machine, its load and the versions; correctness is asserted
before anything is timed. ``prepare`` needs some disk in ``--scratch`` and compares with a
straightforward pandas version of the same job, which needs pandas.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from data import Manifest, load_manifest, open_loader
from data.feeds import FEEDS, Backend
from data.order import SHUFFLES, Shuffle
from data.schema import CRITEO
from data.shards import SplitRows
from data.signal import CROSS_TERMS
from data.synth import synth
from data.synth_options import SynthOptions

BATCH_SIZE = 16384
STEP_MS = 8.0
_PARSE = """
import sys, polars as pl
rows = pl.scan_csv(sys.argv[1], separator="\\t", has_header=False, quote_char=None,
                   schema_overrides=[pl.Int32] * 14 + [pl.String] * 26)
rows.select(pl.all().null_count()).collect(engine="streaming")
"""


def record(question: str, value: float, unit: str, **facts: object) -> None:
    """Print one measurement."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    line = {"question": question, "value": round(value, 4), "unit": unit, **facts}
    line |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "cpu": _cpu_name()}
    line |= {"python": platform.python_version(), "numpy": np.__version__}
    line |= {
        "torch": torch.__version__,
        "commit": commit,
        "time": time.strftime("%FT%TZ", time.gmtime()),
    }
    print(json.dumps(line), flush=True)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


@dataclass(frozen=True)
class _Cost:
    """What a command took; CPU seconds tell more on a machine shared with others."""

    wall_s: float
    cpu_s: float
    peak_memory_gb: float


def _run(arguments: list[str]) -> _Cost:
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    subprocess.run(command, check=True, stdout=sys.stderr, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Cost(time.monotonic() - began, cpu_s, after.ru_maxrss * 1024 / 1e9)


def prepare(scratch: Path, gigabytes: float, pandas_gigabytes: float) -> None:
    """MB of TSV per second and peak memory; the same smaller file through pandas."""
    big = scratch / "big.tsv"
    if not big.exists():
        rows = int(gigabytes * 1e9 / 243)
        began = time.monotonic()
        synth(SynthOptions(rows=rows, output=big, format="tsv"))
        record("synth tsv", rows / (time.monotonic() - began) / 1e6, "M rows/s", rows=rows)
    size = big.stat().st_size
    cost = _run(_command(big, scratch / "big-set"))
    record("prepare", size / cost.wall_s / 1e6, "MB/s", gigabytes=size / 1e9, **asdict(cost))
    parse = _run(["-c", _PARSE, str(big)])
    record("bare parse by Polars", size / parse.wall_s / 1e6, "MB/s", **asdict(parse))
    small = scratch / "small.tsv"
    with big.open("rb") as source, small.open("wb") as target:
        target.write(source.read(int(pandas_gigabytes * 1e9)))
        target.write(source.readline())
    size = small.stat().st_size
    ours = _run(_command(small, scratch / "small-set"))
    theirs = _run(["-m", "benchmarks.data", "pandas", "--scratch", str(scratch)])
    _assert_same(load_manifest(scratch / "small-set"), np.load(scratch / "pandas.npy"))
    facts = {"megabytes": size / 1e6, "prepare": asdict(ours), "pandas": asdict(theirs)}
    record("prepare against pandas", theirs.wall_s / ours.wall_s, "x", **facts)


def _command(source: Path, output: Path) -> list[str]:
    arguments = ["--input", str(source), "--output", str(output), "--max-bad-fraction", "0"]
    return ["-m", "data", "prepare", *arguments, *(["--overwrite"] if output.exists() else [])]


def _assert_same(manifest: Manifest, theirs: "np.ndarray[Any, np.dtype[np.int32]]") -> None:
    """Equal label and dense bits, and as many distinct ids per field in the train part."""
    rows = SplitRows(manifest, "train")
    ours = np.empty((rows.num_rows, rows.num_words), dtype=np.int32)
    rows.read(0, rows.num_rows, ours)
    theirs = theirs[: rows.num_rows]
    floats = [words[:, :14].view(np.float32) for words in (ours, theirs)]
    assert np.allclose(*floats, atol=1e-5)
    for column in range(14, ours.shape[1]):
        assert len(np.unique(ours[:, column])) == len(np.unique(theirs[:, column]))


def with_pandas(scratch: Path) -> None:
    """The same job the way a notebook does it: whole columns in memory, factorize, map."""
    import pandas as pd

    text = dict.fromkeys(CRITEO.sparse, str)
    frame = pd.read_csv(scratch / "small.tsv", sep="\t", names=list(CRITEO.columns), dtype=text)
    train = round(0.8 * len(frame))
    for pair in ("C1xC2", "C3xC4"):
        left, right = pair.split("x")
        frame[pair] = frame[left] + frame[right]
    words = np.empty((len(frame), 14 + 26 + 2), dtype=np.int32)
    words[:, 0] = frame["label"].to_numpy(np.float32).view(np.int32)
    for place, name in enumerate(CRITEO.dense, start=1):
        dense = np.log(frame[name].clip(lower=-2) + 3).fillna(0).to_numpy(np.float32)
        words[:, place] = dense.view(np.int32)
    for place, name in enumerate([*CRITEO.sparse, "C1xC2", "C3xC4"], start=14):
        counts = frame[name].iloc[:train].value_counts()
        kept = counts.index[counts >= 2]
        ids = pd.Series(np.arange(2, len(kept) + 2), index=kept)
        words[:, place] = frame[name].map(ids).fillna(1).where(frame[name].notna(), 0)
    np.save(scratch / "pandas.npy", words)


def synthetic(scratch: Path, rows: int) -> None:
    """Generated rows per second, written as a prepared set."""
    output = scratch / f"synth-{rows}-{os.getpid()}"
    arguments = ["-m", "data", "synth", "--vocab-scale", "0.05", "--output", str(output)]
    start = _run([*arguments, "--rows", "1000"])
    subprocess.run(["rm", "-r", str(output)], check=True)
    cost = _run([*arguments, "--rows", str(rows)])
    facts = {"rows": rows, "start_s": start.wall_s, "start_cpu_s": start.cpu_s, **asdict(cost)}
    record("synth prepared", rows / (cost.wall_s - start.wall_s) / 1e6, "M rows/s", **facts)


def loader(scratch: Path, rows: int) -> None:
    """Rows per second into torch tensors, page cache warm, and the share of the ideal at 8 ms."""
    folder = scratch / f"loader-{rows}"
    if not folder.exists():
        synth(SynthOptions(rows=rows, output=folder, vocab_scale=0.01))
    manifest = load_manifest(folder)
    copy = _copy_rate(manifest)
    for backend in FEEDS:
        for shuffle in SHUFFLES:
            _one_loader(manifest, backend, shuffle, copy)


def _copy_rate(manifest: Manifest) -> float:
    """M rows/s of the plain copy of one batch from the page cache, the baseline of all of these."""
    rows = SplitRows(manifest, "train")
    out = np.empty((BATCH_SIZE, rows.num_words), dtype=np.int32)
    times: list[float] = []
    for _ in range(3):
        for start in range(0, rows.num_rows - BATCH_SIZE, BATCH_SIZE):
            began = time.perf_counter()
            rows.read(start, start + BATCH_SIZE, out)
            times.append(time.perf_counter() - began)
    return BATCH_SIZE / float(np.median(times)) / 1e6


def _one_loader(manifest: Manifest, backend: Backend, shuffle: Shuffle, copy: float) -> None:
    reader = open_loader(
        manifest, batch_size=BATCH_SIZE, backend=backend, shuffle=shuffle, tail="drop"
    )
    rates: list[float] = []
    cpu = time.process_time()
    for epoch in range(6):
        began, done = time.perf_counter(), 0
        for batch in reader.epoch(epoch):
            done += batch.num_rows
            batch.labels.sum()
        rates.append(done / (time.perf_counter() - began) / 1e6)
    cpu = (time.process_time() - cpu) / (6 * reader.num_steps)
    began = time.perf_counter()
    for _ in reader.epoch(6):
        time.sleep(STEP_MS / 1e3)
    share = reader.num_steps * STEP_MS / 1e3 / (time.perf_counter() - began)
    record(
        "loader",
        float(np.median(rates[1:])),
        "M rows/s",
        best=round(max(rates), 2),
        backend=backend,
        shuffle=shuffle,
        cpu_us_per_batch=round(cpu * 1e6),
        row_bytes=4 * manifest.num_words,
        share_of_ideal_at_8ms=round(share, 4),
        plain_copy_m_rows_per_s=round(copy, 1),
    )


class _WideAndDeep(nn.Module):
    """Plain Wide & Deep on one process, to see whether the planted signal can be learned."""

    def __init__(self, manifest: Manifest, dim: int = 16, width: int = 256) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Embedding(f.rows, 1, sparse=True) for f in manifest.crosses)
        self.deep = nn.ModuleList(nn.Embedding(f.rows, dim, sparse=True) for f in manifest.sparse)
        for table in (*self.wide, *self.deep):
            nn.init.normal_(table.weight, std=0.01)
        size = len(manifest.dense) + dim * len(manifest.sparse)
        self.top = nn.Sequential(
            nn.Linear(size, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.long()
        rows = [table(ids[:, k]) for k, table in enumerate(self.deep)]
        out = self.top(torch.cat([dense, *rows], dim=1))[:, 0]
        for k, table in enumerate(self.wide, start=len(self.deep)):
            out = out + table(ids[:, k])[:, 0]
        return out


def learn(scratch: Path, rows: int) -> None:
    """Test AUC of one epoch of Wide & Deep on generated rows, against the best possible."""
    folder = scratch / f"learn-{rows}"
    if not folder.exists():
        synth(SynthOptions(rows=rows, output=folder, vocab_scale=0.01))
    manifest = load_manifest(folder)
    torch.manual_seed(0)
    model = _WideAndDeep(manifest)
    tables = [t.weight for t in (*model.wide, *model.deep)]
    optimizers = [torch.optim.SparseAdam(tables), torch.optim.Adam(model.top.parameters())]
    reader = open_loader(manifest, batch_size=1024, shuffle="rows", backend="memmap")
    for batch in reader.epoch(0):
        logits = model(batch.dense, batch.ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    assert manifest.bayes is not None
    auc = _test_auc(model, manifest)
    facts = {"best_possible": manifest.bayes.auc, "crosses": str(CROSS_TERMS), "rows": rows}
    record("wide & deep on generated rows, test AUC", auc, "AUC", **facts)


@torch.no_grad()
def _test_auc(model: nn.Module, manifest: Manifest) -> float:
    reader = open_loader(manifest, split="test", batch_size=8192, shuffle="none", backend="memmap")
    batches = [(b.labels.clone(), model(b.dense, b.ids)) for b in reader.epoch(0)]
    labels, scores = (torch.cat(part).numpy() for part in zip(*batches, strict=True))
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    clicks = labels.sum()
    return float(
        (ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / clicks / (len(labels) - clicks)
    )


def main() -> None:
    """Run one question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=("prepare", "synth", "loader", "learn", "pandas"))
    parser.add_argument("--scratch", type=Path, default=None, help="kept between runs when given")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--pandas-gigabytes", type=float, default=0.25)
    parser.add_argument("--rows", type=int, default=2_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        if args.question == "prepare":
            prepare(scratch, args.gigabytes, args.pandas_gigabytes)
        elif args.question == "pandas":
            with_pandas(scratch)
        else:
            run = {"synth": synthetic, "loader": loader, "learn": learn}[args.question]
            run(scratch, args.rows)


if __name__ == "__main__":
    main()

"""Measures the speed of the data plane: ``python -m benchmarks.data
prepare|vocabulary|synth|loader``.

The program writes benchmarks/results/data.jsonl. Every line contains the machine's load and the
time; on a shared machine, CPU seconds are more reliable than wall-clock time. ``prepare`` needs 6
GB in ``--scratch``, and pandas for a simple pandas version of the same job. Results of both
versions are compared before times are recorded.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.proc import status_bytes
from benchmarks.record import Results
from sbpflow.data import Manifest, load_manifest, open_loader
from sbpflow.data.format.schema import CRITEO
from sbpflow.data.format.shards import SplitRows
from sbpflow.data.read.feeds import FEEDS, Backend
from sbpflow.data.read.order import SHUFFLES, Shuffle
from sbpflow.data.synth.generate import synth
from sbpflow.data.synth.options import SynthOptions

BATCH_SIZE = 16384
STEP_MS = 8.0
_PARSE = """
import sys, polars as pl
rows = pl.scan_csv(sys.argv[1], separator="\\t", has_header=False, quote_char=None,
                   schema_overrides=[pl.Int32] * 14 + [pl.String] * 26)
rows.select(pl.all().null_count()).collect(engine="streaming")
"""


@dataclass(frozen=True)
class _Cost:
    """The cost of a command; on a shared machine, CPU seconds are the most reliable value."""

    wall_s: float
    cpu_s: float
    peak_memory_gb: float
    """Includes pages of memory-mapped files, which the system can reclaim at any time."""
    peak_own_memory_gb: float
    """Excludes pages of memory-mapped files."""


def _run(arguments: list[str]) -> _Cost:
    command = [sys.executable, *arguments]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=sys.stderr, stderr=subprocess.DEVNULL)
    own = 0
    while True:
        number, status, used = os.wait4(process.pid, os.WNOHANG)
        if number:
            break
        own = max(own, status_bytes("RssAnon", process.pid))
        time.sleep(0.05)
    wall_s = time.monotonic() - began
    if status:
        raise subprocess.CalledProcessError(status, command)
    whole = used.ru_maxrss * 1024 / 1e9
    return _Cost(wall_s, used.ru_utime + used.ru_stime, whole, own / 1e9)


def _load() -> float:
    """Return the average number of runnable processes over the last minute."""
    return round(os.getloadavg()[0], 1)


def prepare(results: Results, scratch: Path, gigabytes: float, pandas_gigabytes: float) -> None:
    """Measure how many MB of TSV are prepared per second, and the peak memory; compare the costs
    with those of pandas on a smaller file.
    """
    big = scratch / "big.tsv"
    rows = int(gigabytes * 1e9 / 243)
    if not big.exists():
        synth(SynthOptions(rows=rows, output=big, format="tsv"))
    size = big.stat().st_size
    load = _load()
    cost = _prepare(big, scratch / "big-set")
    parse = _run(["-c", _PARSE, str(big)])
    results.add(
        megabytes=size / 1e6,
        mb_per_s=size / cost.wall_s / 1e6,
        mb_per_cpu_s=size / cost.cpu_s / 1e6,
        **asdict(cost),
        bare_polars_parse_mb_per_s=size / parse.wall_s / 1e6,
        load=load,
    )
    small = scratch / "small.tsv"
    with big.open("rb") as source, small.open("wb") as target:
        target.write(source.read(int(pandas_gigabytes * 1e9)))
        target.write(source.readline())
    load = _load()
    ours = _prepare(small, scratch / "small-set")
    theirs = _run(["-m", "benchmarks.data", "pandas", "--scratch", str(scratch)])
    _assert_same(load_manifest(scratch / "small-set"), np.load(scratch / "pandas.npy"))
    results.add(
        megabytes=small.stat().st_size / 1e6,
        times_as_fast_as_pandas=theirs.wall_s / ours.wall_s,
        times_less_cpu=theirs.cpu_s / ours.cpu_s,
        prepare=asdict(ours),
        pandas=asdict(theirs),
        load=load,
    )


def _prepare(source: Path, output: Path) -> _Cost:
    """Prepare into a new folder, with the input in the page cache and no pending disk writes."""
    if output.exists():
        _remove(output)
    with source.open("rb") as file:
        while file.read(1 << 24):
            pass
    os.sync()
    arguments = ["--input", str(source), "--output", str(output), "--max-bad-fraction", "0"]
    return _run(["-m", "data", "prepare", *arguments])


def vocabulary(results: Results, scratch: Path, values: int) -> None:
    """Measure memory and time for preparing a field with many distinct values, each of which gets
    an id.
    """
    source, schema, output = (scratch / name for name in ("many.tsv", "many.yaml", "many-set"))
    if not source.exists():
        _write_distinct(source, values)
    schema.write_text("columns: [label, C1]\nsparse: {C1: hex}\n", encoding="ascii")
    if output.exists():
        _remove(output)
    arguments = ["--input", str(source), "--schema", str(schema), "--output", str(output)]
    load = _load()
    cost = _run(["-m", "data", "prepare", *arguments, "--min-count", "1", "--split", "time:1,0,0"])
    assert load_manifest(output).field("C1").rows == values + 2
    results.add(values=values, megabytes=source.stat().st_size / 1e6, **asdict(cost), load=load)


def _write_distinct(target: Path, values: int) -> None:
    """Write one row for each of ``values`` distinct keys, in scrambled order."""
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    with target.open("wb") as file:
        for start in range(0, values, 1 << 20):
            numbers = np.arange(start, min(start + (1 << 20), values), dtype=np.uint64)
            # an odd factor, so that all keys differ
            keys = (numbers * np.uint64(2_654_435_761)).astype(np.uint32)
            lines = np.empty((len(keys), 11), dtype=np.uint8)
            lines[:, 0], lines[:, 1], lines[:, 10] = ord("0") + numbers % 2, ord("\t"), ord("\n")
            for place in range(8):
                lines[:, 2 + place] = digits[(keys >> np.uint32(28 - 4 * place)) & np.uint32(15)]
            file.write(lines.tobytes())


def _assert_same(manifest: Manifest, theirs: "np.ndarray[Any, np.dtype[np.int32]]") -> None:
    """Check that both sets have equal labels and dense values (up to 1e-5), and the same number of
    distinct ids per field in train.
    """
    rows = SplitRows(manifest, "train")
    ours = np.empty((rows.num_rows, rows.num_words), dtype=np.int32)
    rows.read(0, rows.num_rows, ours)
    theirs = theirs[: rows.num_rows]
    floats = [words[:, :14].view(np.float32) for words in (ours, theirs)]
    assert np.allclose(*floats, atol=1e-5)
    for column in range(14, ours.shape[1]):
        assert len(np.unique(ours[:, column])) == len(np.unique(theirs[:, column]))


def with_pandas(scratch: Path) -> None:
    """Do the same job as a typical notebook would: load whole columns into memory, factorize, and
    map.
    """
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


def synthetic(results: Results, scratch: Path, rows: int) -> None:
    """Measure how many rows per second are generated, with Criteo's vocabularies, as a prepared set
    and as text.
    """
    for form in ("prepared", "tsv"):
        output = scratch / f"synth-{os.getpid()}"
        arguments = ["-m", "data", "synth", "--format", form, "--output", str(output)]
        start = _run([*arguments, "--rows", "1000"])
        _remove(output)
        load = _load()
        cost = _run([*arguments, "--rows", str(rows)])
        _remove(output)
        results.add(
            format=form,
            rows=rows,
            m_rows_per_s=rows / (cost.wall_s - start.wall_s) / 1e6,
            m_rows_per_s_with_start=rows / cost.wall_s / 1e6,
            start_s=start.wall_s,
            **asdict(cost),
            load=load,
        )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def loader(results: Results, scratch: Path, rows: int) -> None:
    """Measure how many rows per second are read into torch tensors with a warm page cache, and the
    speed of a loop with 8 ms steps as a share of the ideal.
    """
    folder = scratch / f"loader-{rows}"
    if not folder.exists():
        synth(SynthOptions(rows=rows, output=folder, vocab_scale=0.01))
    manifest = load_manifest(folder)
    copy = _copy_rate(manifest)
    for backend in FEEDS:
        for shuffle in SHUFFLES:
            _one_loader(results, manifest, backend, shuffle, copy)


def _copy_rate(manifest: Manifest) -> float:
    """Return how many million rows per second are copied from the page cache, as a baseline for the
    loaders.
    """
    rows = SplitRows(manifest, "train")
    out = np.empty((BATCH_SIZE, rows.num_words), dtype=np.int32)
    times: list[float] = []
    for _ in range(3):
        for start in range(0, rows.num_rows - BATCH_SIZE, BATCH_SIZE):
            began = time.perf_counter()
            rows.read(start, start + BATCH_SIZE, out)
            times.append(time.perf_counter() - began)
    return BATCH_SIZE / float(np.median(times)) / 1e6


def _one_loader(
    results: Results, manifest: Manifest, backend: Backend, shuffle: Shuffle, copy: float
) -> None:
    reader = open_loader(
        manifest, batch_size=BATCH_SIZE, backend=backend, shuffle=shuffle, tail="drop"
    )
    # Reading one value per page ensures that the whole batch has arrived. Reading every label would
    # take 0.1 to 0.3 ms and dominate the measurement.
    page = -(-4096 // (4 * manifest.num_words))
    rates: dict[int, list[float]] = {page: [], 1: []}
    cpu = time.process_time()
    for epoch in range(12):
        stride = (page, 1)[epoch % 2]
        began, done = time.perf_counter(), 0
        for batch in reader.epoch(epoch):
            done += batch.batch_size
            batch.labels[::stride].sum()
        if epoch > 1:
            rates[stride].append(done / (time.perf_counter() - began) / 1e6)
    cpu = (time.process_time() - cpu) / (12 * reader.num_steps)
    began = time.perf_counter()
    for _ in reader.epoch(12):
        time.sleep(STEP_MS / 1e3)
    share = reader.num_steps * STEP_MS / 1e3 / (time.perf_counter() - began)
    results.add(
        backend=backend,
        shuffle=shuffle,
        m_rows_per_s=float(np.median(rates[page])),
        best_m_rows_per_s=max(rates[page]),
        m_rows_per_s_reading_labels=float(np.median(rates[1])),
        share_of_ideal_at_8ms=share,
        cpu_us_per_batch=cpu * 1e6,
        row_bytes=4 * manifest.num_words,
        plain_copy_m_rows_per_s=copy,
        load=_load(),
    )


def main() -> None:
    """Run the benchmark that the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=("prepare", "vocabulary", "synth", "loader", "pandas"))
    parser.add_argument(
        "--scratch", type=Path, default=None, help="folder that is kept between runs"
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--pandas-gigabytes", type=float, default=0.25)
    parser.add_argument("--rows", type=int, help="default 2,000,000 (synth), 8,000,000 (loader)")
    parser.add_argument(
        "--values", type=int, default=50_000_000, help="distinct values (vocabulary)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        if args.question == "pandas":
            with_pandas(scratch)
            return
        results = Results("data", args.question)
        if args.question == "prepare":
            prepare(results, scratch, args.gigabytes, args.pandas_gigabytes)
        elif args.question == "vocabulary":
            vocabulary(results, scratch, args.values)
        else:
            ask, rows = {"synth": (synthetic, 2_000_000), "loader": (loader, 8_000_000)}[
                args.question
            ]
            ask(results, scratch, args.rows or rows)


if __name__ == "__main__":
    main()

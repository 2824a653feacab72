"""A run killed at random moments and started again, until it is through: is it the same run?

    python -m benchmarks.faults                 50 kills of runs on 2 ranks
    python -m benchmarks.faults --kills 7       one of each kind

Kinds: SIGKILL of one rank, of all, while a checkpoint is written, while a run starts (imports, the
meeting of the ranks, loading, the first rows); SIGTERM and SIGINT to all ranks. The losses of
every step and the final scores must equal, bit for bit, those of a run that nobody interrupts.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.record import Results

ROOT = Path(__file__).parents[1]
KINDS = ("one", "all", "save", "start", "term", "interrupt", "one")
STEPS, EVERY = 160, 10
START_S, END_S = 120.0, 60.0  # limits: for a first step, and for ranks to leave after a kill


@dataclass
class Ranks:
    """The processes of one start."""

    processes: list[subprocess.Popen[bytes]]
    log: Path

    def signal(self, number: int, *ranks: int) -> None:
        """To these ranks, or to all."""
        for rank in ranks or range(len(self.processes)):
            if self.processes[rank].poll() is None:
                self.processes[rank].send_signal(number)

    def over(self) -> bool:
        """Whether all have ended."""
        return all(process.poll() is not None for process in self.processes)

    def codes(self, limit_s: float) -> list[int]:
        """Exit codes; RuntimeError if a rank stays."""
        end = time.monotonic() + limit_s
        try:
            return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            self.signal(signal.SIGKILL)
            raise RuntimeError(f"a rank stayed behind:\n{self.log.read_text()[-3000:]}") from error


def make_set(folder: Path) -> None:
    """A small prepared set."""
    words = ["synth", "--rows", "4000", "--vocab-scale", "0.0005", "--output", str(folder)]
    subprocess.run([sys.executable, "-m", "data", *words], check=True, cwd=ROOT)


def start(data: Path, folder: Path, log: Path, size: int, *more: str) -> Ranks:
    """Begin or go on with the run in ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "--config",
        "configs/scheme3.yaml",
        f"data.path={data}",
        f"run.dir={folder}",
        "parallel.device=cpu",
        "parallel.timeout_s=20",
        "data.loader=memmap",
        "data.batch_size=200",
        "model.hidden=[16]",
        "model.dropout=0.3",
        "optimizer.sparse.name=lazy_adam",
        "train.log_every=1",
        "train.eval_every=45",
        "train.epochs=20",
        f"train.max_steps={STEPS}",
        f"checkpoint.every={EVERY}",
        *more,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    with log.open("ab") as sink:
        processes = [
            subprocess.Popen(
                [sys.executable, "train.py", *words],
                cwd=ROOT,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=sink,
                stderr=sink,
            )
            for rank in range(size)
        ]
    return Ranks(processes, log)


def events(folder: Path) -> list[dict[str, object]]:
    """What the run reported, without times."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
    kept = ("event", "step", "loss", "auc", "logloss", "val_auc", "split", "steps")
    return [{key: event[key] for key in kept if key in event} for event in map(json.loads, lines)]


def steps_done(folder: Path) -> int:
    """The last step that was reported."""
    return max((int(str(e["step"])) for e in events(folder) if e["event"] == "step"), default=0)


def wait(ranks: Ranks, ready: Callable[[], bool], limit_s: float) -> bool:
    """Whether it came before the ranks ended; RuntimeError if neither did."""
    end = time.monotonic() + limit_s
    while not ready():
        if ranks.over():
            return False
        if time.monotonic() > end:
            ranks.signal(signal.SIGKILL)
            raise RuntimeError(f"nothing happened:\n{ranks.log.read_text()[-3000:]}")
        time.sleep(0.002)
    return True


@dataclass
class Campaign:
    """Kills of one run, and what came of them."""

    data: Path
    folder: Path
    size: int
    chance: random.Random
    killed: Counter[str] = field(default_factory=Counter[str])
    leaving_s: list[float] = field(default_factory=list[float])

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def kill(self, kind: str) -> None:
        """Start, and kill once; a run that was through before does not count."""
        before = steps_done(self.folder)
        ranks = start(self.data, self.folder, self.log, self.size)
        if kind == "start":
            time.sleep(self.chance.uniform(0.5, 12.0))
        else:
            target = before + self.chance.randint(1, STEPS // 4)
            # The file is cut to the checkpoint first; one step more is certainly a new one.
            if not wait(ranks, lambda: steps_done(self.folder) >= target, START_S):
                return
            if kind == "save" and not wait(ranks, self._is_saving, START_S):
                return
            time.sleep(self.chance.uniform(0.0, 0.02))
        if ranks.over():
            return
        numbers = {"term": signal.SIGTERM, "interrupt": signal.SIGINT}
        one = (self.chance.randrange(self.size),) if kind == "one" else ()
        at = time.monotonic()
        ranks.signal(numbers.get(kind, signal.SIGKILL), *one)
        ranks.codes(END_S)
        self.leaving_s.append(time.monotonic() - at)
        self.killed[kind] += 1

    def _is_saving(self) -> bool:
        return any(self.folder.glob("checkpoints/.step-*.partial-*"))

    def finish(self) -> None:
        """Let it run to its end; RuntimeError if it fails."""
        codes = start(self.data, self.folder, self.log, self.size).codes(300.0)
        if any(codes):
            raise RuntimeError(f"exit codes {codes}:\n{self.log.read_text()[-4000:]}")

    def left_over(self) -> list[str]:
        """Files that a complete run does not leave."""
        return sorted(
            path.name
            for path in (self.folder / "checkpoints").iterdir()
            if path.name.startswith(".")
        )


def uninterrupted(data: Path, folder: Path, size: int) -> list[dict[str, object]]:
    """What a run reports that nobody interrupts."""
    Campaign(data, folder, size, random.Random(0)).finish()
    return events(folder)


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description="Kill a run at random moments, and go on.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    results = Results("faults", recorded=args.kills >= 20)
    chance, killed, leaving = random.Random(args.seed), Counter[str](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make_set(base / "set")
        expected = uninterrupted(base / "set", base / "whole", args.ranks)
        number = equal = 0
        while killed.total() < args.kills:
            number += 1
            run = Campaign(base / "set", base / f"run{number}", args.ranks, chance)
            for place in range(5):
                run.kill(KINDS[(5 * number + place) % len(KINDS)])
            run.finish()
            killed, leaving = killed + run.killed, leaving + run.leaving_s
            same, left = events(run.folder) == expected, run.left_over()
            equal += same
            sys.stderr.write(f"run {number}: {dict(run.killed)}, equal: {same}, left: {left}\n")
            if not same or left:
                raise SystemExit(f"run {number} is not the one that nobody interrupted")
    results.add(
        ranks=args.ranks,
        kills=killed.total(),
        by_kind=dict(killed),
        runs=number,
        runs_equal_bit_for_bit=equal,
        longest_until_all_ranks_left_s=max(leaving),
    )


if __name__ == "__main__":
    main()

"""Tests that a run that is killed at random moments and restarted gives the results of an
uninterrupted run.

    python -m benchmarks.faults                 50 kills of runs on 2 ranks
    python -m benchmarks.faults --kills 8       at least one of each kind
    python -m benchmarks.faults --storage file --kills 20
                                tables in files; the uninterrupted run has them on the device
    python -m benchmarks.faults --storage servers --kills 40
                                tables on embedding servers; half of the kills hit servers
    python -m benchmarks.faults --deltas 4 --kills 20
                                each full checkpoint is followed by 4 deltas
    python -m benchmarks.faults --keys --deltas 4 --kills 20
                                all tables grow, and keys are evicted
    python -m benchmarks.faults --folder F --limit-s 400
                                as many runs as can start in that time; repeat it to continue

Most kills send SIGKILL, either to one rank during training or to all ranks. All ranks are killed
during training, while a checkpoint is written or loaded, while the first rows are read, or at any
moment of the start (imports, rendezvous). The other kills send SIGTERM or SIGINT to all ranks,
which then save and exit. The losses of every step and the final scores must be bit-identical to the
losses and scores of an uninterrupted run. No complete checkpoint may be lost, every rank must exit,
and a finished run must leave behind neither processes nor temporary files. Each start uses a random
``train.lookahead`` and, with ``--storage file`` or ``servers``, a random cache size. With
``--storage servers``, three servers run throughout; each start uses one, two, or three of them, and
servers are killed while rows are trained, loaded, read, or saved.
"""

import argparse
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.network import free_port
from benchmarks.record import Results
from benchmarks.server_processes import ServerProcesses
from sbpflow.checkpoint.folder import checked, list_checkpoints, step_of

ROOT = Path(__file__).parents[1]
KINDS = ("one", "all", "save", "load", "read", "start", "term", "interrupt")
# Kinds of kills with embedding servers; "server_KIND" kills a server when KIND would kill ranks.
SERVER_KINDS = (
    *("server_one", "one", "server_load", "all", "server_save"),
    *("save", "server_one", "load", "server_read", "start"),
)
NUM_SERVERS = 3
KILLS_OF_A_RUN = 5
STEPS, EVERY = 160, 10
LOOKAHEADS = {"device": (0, 1, 4, 16), "file": (2, 4, 16), "servers": (2, 4, 16)}
# With servers, rows must be evicted in every step, so caches hold fewer than the 27% of the rows
# that the train split uses.
SERVER_CACHES = ("10%", "14%", "18%")
CACHES = ("25%", "40%", "70%")  # percentage of rows; two batches use up to 20% of the rows
# The limits are low, so a key's row is freed after two steps without use.
GROWING = (
    "model.fields={'*': {vocabulary: dynamic, admit_count: 2, forget_after_samples: 600, "
    "evict: {max_rows: 65536, idle_samples: 400}}}"
)
START_S, END_S = 120.0, 60.0  # time limits for ranks to start, and to exit after a kill


@dataclass
class Ranks:
    """Controls the processes of one launch."""

    processes: list[subprocess.Popen[bytes]]
    log: Path

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to these ranks, or to all ranks."""
        for rank in ranks or range(len(self.processes)):
            if self.processes[rank].poll() is None:
                self.processes[rank].send_signal(number)

    def over(self) -> bool:
        """Return whether all ranks have exited."""
        return all(process.poll() is not None for process in self.processes)

    def loading(self) -> bool:
        """Return whether a rank has opened a file in a complete checkpoint."""
        for process in self.processes:
            for path in Path(f"/proc/{process.pid}/fd").glob("*"):
                try:
                    opened = os.readlink(path)
                except OSError:  # the file has been closed, or the process has exited
                    continue
                if "/checkpoints/step-" in opened:
                    return True
        return False

    def codes(self, limit_s: float) -> list[int]:
        """Return the exit codes; raise RuntimeError if a rank does not exit."""
        end = time.monotonic() + limit_s
        try:
            return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            self.signal(signal.SIGKILL)
            raise RuntimeError(f"a rank did not exit:\n{self.log.read_text()[-3000:]}") from error


def make_set(folder: Path, *, keys: bool = False) -> None:
    """Make a small prepared set, with keys if all tables are to grow."""
    words = ["synth", "--rows", "4000", "--vocab-scale", "0.0005", "--output", str(folder)]
    words += ["--keys", "--drift", "300"] if keys else []
    subprocess.run([sys.executable, "-m", "data", *words], check=True, cwd=ROOT)


def start(data: Path, folder: Path, log: Path, size: int, *more: str) -> Ranks:
    """Start or continue the run in ``folder``."""
    words = [
        f"data.path={data}",
        f"run.dir={folder}",
        "parallel.timeout_s=20",
        "data.batch_size=200",
        "model.hidden=[16]",
        "model.dropout=0.3",
        "optimizer.sparse.name=lazy_adam",
        "train.eval_every=45",
        "train.epochs=20",
        f"train.max_steps={STEPS}",
        f"checkpoint.every={EVERY}",
        *more,
    ]
    scratch = folder.with_name(f"{folder.name}-tmp")
    scratch.mkdir(exist_ok=True)
    environment = {
        "TMPDIR": str(scratch),
        "TORCHINDUCTOR_CACHE_DIR": str(folder.with_name("cache")),  # torch creates it on import
    }
    return launch(words, log, size, environment)


def launch(
    words: Sequence[str],
    log: Path,
    size: int,
    environment: Mapping[str, str],
    before: Callable[[], None] | None = None,
) -> Ranks:
    """Start ``size`` ranks that train on the CPU; ``before`` runs first in each process."""
    fixed = ["--config", "configs/scheme3.yaml", "parallel.device=cpu", "data.loader=memmap"]
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        **environment,
    }
    with log.open("ab") as sink:
        processes = [
            subprocess.Popen(
                [sys.executable, "train_wdl.py", *fixed, "train.log_every=1", *words],
                cwd=ROOT,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=sink,
                stderr=sink,
                preexec_fn=before,
            )
            for rank in range(size)
        ]
    return Ranks(processes, log)


def events(folder: Path) -> list[dict[str, object]]:
    """Return the events of the run, without times."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
    kept = ("event", "step", "loss", "auc", "logloss", "val_auc", "split", "steps")
    every = map(json.loads, lines)
    # The step at which the ranks' times are reported depends on the machine's load.
    return [
        {k: event[k] for k in kept if k in event} for event in every if event["event"] != "ranks"
    ]


def steps_done(folder: Path) -> int:
    """Return the last reported step."""
    return max((int(str(e["step"])) for e in events(folder) if e["event"] == "step"), default=0)


def wait(ranks: Ranks, ready: Callable[[], bool], limit_s: float) -> bool:
    """Wait until ``ready()`` is true; return False if the ranks exit first. Raise RuntimeError if
    neither happens within the limit.
    """
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
    """Kills one run repeatedly and records the results."""

    data: Path
    folder: Path
    size: int
    chance: random.Random
    storage: str = "device"
    deltas: int = 0
    keys: bool = False
    servers: ServerProcesses | None = None
    used: list[int] = field(default_factory=list[int])  # servers used since the last start
    logged: int = 0  # characters in the log before the last start
    killed: Counter[str] = field(default_factory=Counter[str])
    leaving_s: list[float] = field(default_factory=list[float])

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def _start(self) -> Ranks:
        """Start the run; the lookahead and the cache may differ for every start."""
        self.logged = len(self.log.read_text()) if self.log.exists() else 0
        more = [f"train.lookahead={self.chance.choice(LOOKAHEADS[self.storage])}"]
        more.append(f"checkpoint.deltas={self.deltas}")
        more += [GROWING] if self.keys else []
        if self.storage == "file":
            cache = self.chance.choice(CACHES)
            more.append(f'parallel.storage={{"deep.*": {{kind: file, cache: {cache}}}}}')
        if self.servers is not None:
            self.used = self.chance.sample(range(NUM_SERVERS), self.chance.randint(1, NUM_SERVERS))
            rule = self.servers.rule(self.chance.choice(SERVER_CACHES), self.used)
            more.append(f'parallel.storage={{"deep.*": {rule}}}')
        return start(self.data, self.folder, self.log, self.size, *more)

    def saved(self) -> int:
        """Return the step of the newest checkpoint after verifying all bytes, or 0 if there is no
        checkpoint.
        """
        checkpoints = list_checkpoints(self.folder / "checkpoints")
        if checkpoints:
            checked(checkpoints[0]).verify()
        return step_of(checkpoints[0]) if checkpoints else 0

    def kill(self, kind: str) -> None:
        """Start the run and kill it once; a run that ends before the kill does not count."""
        before, saved = steps_done(self.folder), self.saved()
        if kind.endswith(("load", "read")) and not saved:
            # Without a checkpoint, there is nothing to load or read.
            kind = kind.replace("load", "one").replace("read", "one")
        resumptions = self._num_resumptions()
        ranks = self._start()
        if not self._came(kind.removeprefix("server_"), ranks, before, resumptions):
            ranks.signal(signal.SIGKILL)
            ranks.codes(END_S)
            return
        gentle = {"term": signal.SIGTERM, "interrupt": signal.SIGINT}
        one = (self.chance.randrange(self.size),) if kind == "one" else ()
        at = time.monotonic()
        if kind.startswith("server_") and self.servers is not None:
            server = self.chance.choice(self.used)
            self.servers.kill(server)
            self._check_lost(server, ranks)
            self.servers.start(server)
        else:
            ranks.signal(gentle.get(kind, signal.SIGKILL), *one)
        codes = ranks.codes(END_S)
        self.leaving_s.append(time.monotonic() - at)
        self._check(kind, codes, saved)
        self.killed[kind] += 1

    def _check_lost(self, server: int, ranks: Ranks) -> None:
        """Wait until the ranks have exited; check that their message names the killed server."""
        codes = ranks.codes(END_S)
        name = f"embedding server {self.used.index(server)} of {len(self.used)} at "
        # After the message, torch may print long reports about its closed store.
        last = self.log.read_text()[self.logged :]
        if codes != [3] * self.size or f"error: {name}" not in last:
            raise RuntimeError(
                f"no error names the killed {name}...; exit codes {codes}:\n{last[-3000:]}"
            )

    def _came(self, kind: str, ranks: Ranks, before: int, resumptions: int) -> bool:
        """Wait for the moment at which a kill of this kind is due; return whether the ranks were
        still running then.
        """
        if kind == "start":
            time.sleep(self.chance.uniform(0.5, 8.0))
        elif kind == "load":
            return wait(
                ranks, lambda: ranks.loading() or self._num_resumptions() > resumptions, START_S
            ) and (ranks.loading() and not ranks.over())
        elif kind == "read":
            if not wait(ranks, lambda: self._num_resumptions() > resumptions, START_S):
                return False
            time.sleep(self.chance.uniform(0.0, 0.1))
        else:
            # The file contains steps of the previous start until the first new step truncates it.
            target = before + self.chance.randint(1, STEPS // 4)
            if not wait(ranks, lambda: steps_done(self.folder) >= target, START_S):
                return False
            if kind == "save" and not wait(ranks, self._is_saving, START_S):
                return False
            time.sleep(self.chance.uniform(0.0, 0.02))
        return not ranks.over()

    def _check(self, kind: str, codes: list[int], saved: int) -> None:
        """Raise RuntimeError unless the run ended as expected."""
        now = self.saved()
        if now < saved:
            raise RuntimeError(f"the checkpoint of step {saved} is lost; the newest is {now}")
        if kind in ("term", "interrupt"):
            done = steps_done(self.folder)
            if codes != [130] * self.size or now != done:
                raise RuntimeError(
                    f"{kind}: exit codes {codes} (expected 130), saved step {now} (expected {done})"
                )
        elif kind == "one" and sorted(codes) != [-9, *[3] * (self.size - 1)]:
            raise RuntimeError(f"exit codes {codes}:\n{self.log.read_text()[-3000:]}")

    def _num_resumptions(self) -> int:
        return self.log.read_text().count("resuming after step") if self.log.exists() else 0

    def _is_saving(self) -> bool:
        return any(self.folder.glob("checkpoints/.step-*.partial-*"))

    def finish(self) -> None:
        """Let the run finish; raise RuntimeError if it fails."""
        codes = self._start().codes(300.0)
        if any(codes):
            raise RuntimeError(f"exit codes {codes}:\n{self.log.read_text()[-4000:]}")

    def left_over(self) -> list[str]:
        """List files and processes that a finished run must not leave behind."""
        hidden = [path for path in self.folder.rglob("*") if path.name.startswith(".")]
        scratch = list(self.folder.with_name(f"{self.folder.name}-tmp").rglob("*"))
        return [*(str(path) for path in (*hidden, *scratch)), *self._processes()]

    def _processes(self) -> list[str]:
        mine = f"run.dir={self.folder}".encode()
        return [
            f"process {path.parent.name}"
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if mine in _bytes_of(path)
        ]


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has exited
        return b""


def uninterrupted(
    data: Path, folder: Path, size: int, *, keys: bool = False
) -> list[dict[str, object]]:
    """Return the events of an uninterrupted run, which is executed once per folder."""
    end = folder / "report.json"
    if not end.exists():
        Campaign(data, folder, size, random.Random(0), keys=keys).finish()
        end.write_text(json.dumps(events(folder)))
    return json.loads(end.read_text())


def one_run(base: Path, number: int, args: argparse.Namespace) -> dict[str, object]:
    """Kill one run several times; raise SystemExit if it differs from the uninterrupted run."""
    expected = uninterrupted(base / "set", base / "whole", args.ranks, keys=args.keys)
    with ExitStack() as opened:
        servers = None
        if args.storage == "servers":
            servers = ServerProcesses.on_loopback(base, NUM_SERVERS)
            opened.callback(servers.close)
        return _killed_and_finished(base, number, args, expected, servers)


def _killed_and_finished(
    base: Path,
    number: int,
    args: argparse.Namespace,
    expected: list[dict[str, object]],
    servers: ServerProcesses | None,
) -> dict[str, object]:
    kinds = KINDS if servers is None else SERVER_KINDS
    run = Campaign(
        base / "set",
        base / f"run{number}",
        args.ranks,
        random.Random(args.seed * 1000 + number),
        args.storage,
        args.deltas,
        args.keys,
        servers,
    )
    for place in range(KILLS_OF_A_RUN):
        run.kill(kinds[(KILLS_OF_A_RUN * number + place) % len(kinds)])
    run.finish()
    same, left = events(run.folder) == expected, run.left_over()
    sys.stderr.write(f"run {number}: {dict(run.killed)}, equal: {same}, left: {left}\n")
    if not same or left:
        raise SystemExit(f"run {number} differs from the uninterrupted run")
    return {"killed": dict(run.killed), "leaving_s": run.leaving_s}


def main() -> None:
    """Kill runs until the requested number of kills is reached."""
    parser = argparse.ArgumentParser(description="Kill a run at random moments and restart it.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--storage", choices=LOOKAHEADS, default="device", help="of deep tables")
    parser.add_argument("--deltas", type=int, default=0, help="after each full checkpoint")
    parser.add_argument("--keys", action="store_true", help="let all tables grow")
    parser.add_argument(
        "--folder", type=Path, help="the folder for finished work; default: a temporary one"
    )
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="do not start any runs after this time"
    )
    args = parser.parse_args()
    begin = time.monotonic()
    least, name = {
        "device": (50, "faults"),
        "file": (20, "cache_faults"),
        "servers": (40, "server_faults"),
    }[args.storage]
    if args.keys:
        name = f"growth_{name}"
    results = Results(name, recorded=args.kills >= least and (args.keys or not args.deltas))
    with tempfile.TemporaryDirectory() as scratch:
        base: Path = args.folder or Path(scratch)
        base.mkdir(parents=True, exist_ok=True)
        # concurrent campaigns would share the servers and their secret
        in_use = (base / "lock").open("w")
        try:
            fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"--folder {base}: another campaign uses this folder; use another"
            ) from None
        done = base / "runs.jsonl"
        if not (base / "set").exists():
            make_set(base / "set", keys=args.keys)
        while True:
            lines = done.read_text().splitlines() if done.exists() else []
            runs = [json.loads(line) for line in lines]
            killed = sum((Counter[str](run["killed"]) for run in runs), Counter[str]())
            if killed.total() >= args.kills:
                break
            if time.monotonic() - begin > args.limit_s:
                raise SystemExit(
                    f"{killed.total()} of {args.kills} kills done; to continue, rerun "
                    "with the same --folder"
                )
            # Count the logs of failed runs, too, so that such a run is repeated with other kills.
            number = len(list(base.glob("run*.log")))
            outcome = one_run(base, number, args)
            with done.open("a") as file:
                file.write(json.dumps({"number": number, **outcome}) + "\n")
        tried = len(list(base.glob("run*.log")))
    results.add(
        storage=args.storage,
        deltas=args.deltas,
        keys=args.keys,
        ranks=args.ranks,
        kills=killed.total(),
        by_kind=dict(killed),
        runs=tried,
        runs_equal_bit_for_bit=len(runs),
        longest_until_all_ranks_left_s=max(max(run["leaving_s"]) for run in runs),
    )


if __name__ == "__main__":
    main()

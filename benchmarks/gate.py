"""The speed gate: runs two commits alternately and reports where the second one is slower.

    python -m benchmarks.gate --base COMMIT [--head COMMIT] [--only NAME ...] [--rounds 8]

Without ``--head``, the gate measures the working tree, including new files. The gate checks out
both commits into a temporary folder and runs both with this interpreter. Both commits use the same
inputs (created by the base) and one fresh cache, and thus the same measured kernel times. The names
for ``--only``:
  vs_torchrec, vs_torchrec_whole, vs_torchrec_link
            a training step of the model in ``benchmarks.vs_torchrec`` on 2 ranks; with every table
            whole; over a link of 1 Gbit/s (needs root, ip and tc)
  demo      the training of ``make demo``
  loader    rows of a shuffled set, read into tensors
  prepare   ``python -m data prepare`` of generated TSV
  explain   ``python -m sbpflow explain``
  start     a run of 2 steps on 2 ranks: launch to the first step, and its CPU time
Every row includes the CPU time, which depends less on other work than wall-clock time.

The first turn warms up and checks that both commits do the same work: losses must agree up to
float32 rounding. Then each round runs both commits, in alternating order (A B, then B A). A ratio
is the cost of head divided by the cost of base in one round; the interval is the 95 % interval of
Student's t on the logarithms of the ratios. A figure is slower if the interval is above 1 and the
median is above 1.02. The limit for the median is above 1, because paths, environment, and memory
addresses shift the times of identical code, and rounds do not average out these shifts (Mytkowicz
et al., "Producing Wrong Data Without Doing Anything Obviously Wrong!", ASPLOS 2009). With 17
figures, about one run of the gate in three would report a slower figure by chance alone. Slower
rows are therefore measured again with the same number of rounds, and a figure is reported only if
it is slower both times.

The exit status is 1 if a figure is slower, or if a row does different work or fails; otherwise, it
is 0. For a figure that is not reported, the upper end of the interval limits the slowdown that may
have been missed; more ``--rounds`` lower this limit.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.network import start_ranks
from benchmarks.planner_worker import difference
from benchmarks.record import Results, provenance

REPOSITORY = Path(__file__).resolve().parent.parent
WORKING_TREE = "working tree"
PACKAGES = ("sbpflow", "models", "data", "planner", "benchmarks")
MARGIN = 1.02
SLOWER, FASTER, SAME = "slower", "faster", "no significant difference"
# Different kernels and orders of summation change losses by up to 5e-5 after an epoch
# (benchmarks/results/cpu_criteo.jsonl). The row and click counts of a loader are integers, and must
# be equal for both commits.
WORK_TOLERANCE = 5e-5
LINK = "1gbit"


class Measured(NamedTuple):
    """One run: its figures, whose names end in their unit, and ``work``, numbers that both commits
    must agree on.
    """

    figures: dict[str, float]
    work: dict[str, float]


class Verdict(NamedTuple):
    """One figure compared between head and base: the medians, and the cost ratio with its
    interval.
    """

    name: str
    figure: str
    base: float
    head: float
    cost_ratio: float
    low: float
    high: float
    verdict: str


def judge(name: str, figure: str, base: Sequence[float], head: Sequence[float]) -> Verdict:
    """Compare the values of the rounds; figures with ``_per_`` are rates, and other figures are
    costs.
    """
    old, new = (head, base) if "_per_" in figure else (base, head)
    mean, half = difference(new, old)
    low, high = (1 + mean) * math.exp(-half), (1 + mean) * math.exp(half)
    ratio = statistics.median(b / a for a, b in zip(old, new, strict=True))
    verdict = SAME
    if low > 1 and ratio > MARGIN:
        verdict = SLOWER
    elif high < 1 and ratio < 1 / MARGIN:
        verdict = FASTER
    medians = statistics.median(base), statistics.median(head)
    return Verdict(name, figure, *medians, ratio, low, high, verdict)


def confirmed(first: Sequence[Verdict], again: Sequence[Verdict]) -> list[Verdict]:
    """Combine the verdicts with a second measurement of the slower rows. Figures that were measured
    again get their second values, and count as slower only if they were slower both times.
    """
    second = {(verdict.name, verdict.figure): verdict for verdict in again}
    verdicts: list[Verdict] = []
    for verdict in first:
        repeat = second.get((verdict.name, verdict.figure), verdict)
        both = verdict.verdict == repeat.verdict
        verdicts.append(repeat if both else repeat._replace(verdict=SAME))
    return verdicts


def different_work(base: Mapping[str, float], head: Mapping[str, float]) -> str:
    """Describe the first amount of work that differs between base and head; return "" if none
    does.
    """
    shared = [key for key in base if key in head]
    if base and not shared:
        return (
            f"base and head have no key in common: base has {', '.join(base)}, and head has "
            f"{', '.join(head)}"
        )
    for key in shared:
        if not abs(base[key] - head[key]) <= WORK_TOLERANCE:
            return f"{key} is {base[key]:.7g} in base and {head[key]:.7g} in head"
    return ""


def git(*words: str, **environment: str) -> str:
    """Run git in this repository and return its output; exit the program if it fails."""
    done = subprocess.run(
        ["git", *words],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def resolve(name: str, scratch: Path) -> str:
    """Return the hash of a commit; for the working tree, create a commit outside all branches."""
    if name != WORKING_TREE:
        return git("rev-parse", "--verify", f"{name}^{{commit}}")
    index = {"GIT_INDEX_FILE": str(scratch / "index")}
    git("add", "--all", **index)
    who = ("-c", "user.name=gate", "-c", "user.email=gate@localhost")
    return git(*who, "commit-tree", git("write-tree", **index), "-p", "HEAD", "-m", WORKING_TREE)


@contextmanager
def checkout(commit: str, folder: Path) -> Iterator[Path]:
    """Check out a commit into a worktree that imports its own packages; add the gate worker."""
    git("worktree", "add", "--detach", str(folder), commit)
    try:
        worker = Path(__file__).with_name("gate_worker.py")
        shutil.copy(worker, folder / "benchmarks" / worker.name)
        assert_isolated(folder)
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def assert_isolated(root: Path) -> None:
    """Raise SystemExit if Python, started in a checkout, imports a package from elsewhere. An
    editable installation adds its own checkout to the path, but the measured checkout must come
    first.
    """
    packages = [name for name in PACKAGES if (root / name / "__init__.py").exists()]
    code = f"import {', '.join(packages)}\nfor m in ({', '.join(packages)},): print(m.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    files = [Path(line) for line in done.stdout.splitlines()]
    if done.returncode or any(not file.is_relative_to(root) for file in files):
        raise SystemExit(f"{root} imports {files}, not its own packages {packages}\n{done.stderr}")


class Bench:
    """Measures a checkout. The base's code creates all inputs once."""

    def __init__(self, scratch: Path, base: Path, *, quick: bool) -> None:
        self.scratch, self.base, self.quick = scratch, base, quick
        self.rows: dict[str, Callable[[Path], Measured]] = {
            "vs_torchrec": lambda root: self._steps(root, "unique", None),
            "vs_torchrec_whole": lambda root: self._steps(root, "whole", None),
            "vs_torchrec_link": lambda root: self._steps(root, "unique", LINK),
            "demo": self._demo,
            "loader": self._loader,
            "prepare": self._prepare,
            "explain": self._explain,
            "start": self._start,
        }

    def measure(self, name: str, root: Path) -> Measured:
        measured = self.rows[name](root)
        numbers = ", ".join(f"{key} {value:.5g}" for key, value in measured.figures.items())
        print(f"  {name} {root.name}: {numbers}", file=sys.stderr, flush=True)
        return measured

    def _steps(self, root: Path, layout: str, link: str | None) -> Measured:
        words = ["--question", "steps", "--layout", layout, *(["--quick"] if self.quick else [])]
        with tempfile.TemporaryDirectory(dir=self.scratch) as output:
            words += ["--output", output]
            start_ranks("benchmarks.gate_worker", 2, words, link=link, folder=root)
            ranks = [json.loads(path.read_text()) for path in sorted(Path(output).iterdir())]
        cpu = sum(rank["figures"]["step_cpu_ms"] for rank in ranks)
        figures = {"step_ms": ranks[0]["figures"]["step_ms"], "step_cpu_ms": cpu}
        return Measured(figures, ranks[0]["work"])

    def _loader(self, root: Path) -> Measured:
        rows = 100_000 if self.quick else 1_000_000
        words = ["--question", "loader", *(["--quick"] if self.quick else [])]
        words += ["--set", str(self._synth("loader", rows)), "--data-package", data_package(root)]
        with tempfile.TemporaryDirectory(dir=self.scratch) as output:
            _run(root, "-m", "benchmarks.gate_worker", *words, "--output", output)
            return Measured(**json.loads((Path(output) / "0.json").read_text()))

    def _demo(self, root: Path) -> Measured:
        events, _, cost = self._train(root)
        losses = {f"loss of step {e['step']}": e["loss"] for e in events if e["event"] == "step"}
        return Measured({**cost, "samples_per_s": events[-1]["samples_per_s"]}, losses)

    def _start(self, root: Path) -> Measured:
        events, began, cost = self._train(root, "train.max_steps=2")
        first = next(event["time"] for event in events if event["event"] == "step")
        seconds = datetime.fromisoformat(first).timestamp() - began
        return Measured({"first_step_s": seconds, "cpu_s": cost["cpu_s"]}, {})

    def _train(
        self, root: Path, *words: str
    ) -> tuple[list[dict[str, Any]], float, dict[str, float]]:
        """Return the events, the launch time, and the cost of a demo run."""
        source = self._demo_set()
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            job = ("train_wdl.py", "--config", "configs/demo.yaml", f"run.dir={folder}/run")
            began = time.time()
            cost = _run(root, *launch, *job, f"data.path={source}", *words)
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], began, cost

    def _explain(self, root: Path) -> Measured:
        words = ("--config", "configs/demo.yaml", "-n", "64")
        source = f"data.path={self._demo_set()}"
        return Measured(_run(root, "-m", "sbpflow", "explain", *words, source), {})

    def _prepare(self, root: Path) -> Measured:
        source = self._synth("tsv", 50_000 if self.quick else 1_000_000, "--format", "tsv")
        size = len(source.read_bytes()) / 1e6  # reading loads the file into the page cache
        os.sync()  # first flush the writes of the previous turn
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            words = ("--input", str(source), "--output", f"{folder}/set", "--max-bad-fraction", "0")
            cost = _run(root, "-m", data_package(root), "prepare", *words)
        figures = {"mb_per_s": size / cost["wall_s"], "mb_per_cpu_s": size / cost["cpu_s"]}
        return Measured(figures, {})

    def _demo_set(self) -> Path:
        return self._synth("demo", 40_000 if self.quick else 300_000)

    def _synth(self, name: str, rows: int, *words: str) -> Path:
        output = self.scratch / name
        if not output.exists():
            size = ("--rows", str(rows), "--vocab-scale", "0.002", "--output", str(output))
            _run(self.base, "-m", data_package(self.base), "synth", *size, *words)
        return output


def data_package(root: Path) -> str:
    """Return the name of the package with the loader, which depends on the commit."""
    return "data" if (root / "data" / "__init__.py").exists() else "sbpflow.data"


def _run(root: Path, *words: str) -> dict[str, float]:
    """Return the wall-clock and CPU seconds of a Python command in a checkout, including child
    processes.
    """
    command = [sys.executable, *words]
    began = time.perf_counter()
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(command, cwd=root, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            output.seek(0)
            text = output.read().decode(errors="replace")
            raise SystemExit(f"{root.name}: python {' '.join(words)}\n{text}")
    return {"wall_s": wall, "cpu_s": used.ru_utime + used.ru_stime}


def measure_rounds(bench: Bench, head: Path, names: Sequence[str], rounds: int) -> list[Verdict]:
    """Run every row in each round: both commits, one after the other, in alternating order."""
    values: dict[tuple[str, str], dict[Path, list[float]]] = {}
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
        order = (bench.base, head) if turn % 2 == 0 else (head, bench.base)
        for name in names:
            for root in order:
                for figure, value in bench.measure(name, root).figures.items():
                    both = values.setdefault((name, figure), {bench.base: [], head: []})
                    both[root].append(value)
    return [judge(*key, both[bench.base], both[head]) for key, both in values.items()]


def compare_work(bench: Bench, head: Path, names: Sequence[str]) -> dict[str, str]:
    """Return, by name, a description of the difference for each row in which base and head do
    different work. This run also compiles kernels, fills caches, and creates inputs.
    """
    print("warm-up", file=sys.stderr)
    differences: dict[str, str] = {}
    for name in names:
        base_work, head_work = (bench.measure(name, root).work for root in (bench.base, head))
        if text := different_work(base_work, head_work):
            differences[name] = text
    return differences


def _report(verdicts: Sequence[Verdict], different: Mapping[str, str]) -> None:
    print(f"{'':18}{'':15}{'base':>11}{'head':>11}{'cost ratio':>12}   95 % interval")
    for v in verdicts:
        print(
            f"{v.name:18}{v.figure:15}{v.base:11.5g}{v.head:11.5g}{v.cost_ratio:12.3f}   "
            f"{v.low:.3f} to {v.high:.3f}   {v.verdict}"
        )
    for name, text in different.items():
        print(f"{name}: the work differs: {text}")


def _arguments() -> argparse.Namespace:
    names = list(Bench(Path(), Path(), quick=False).rows)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="a commit")
    parser.add_argument("--head", default=WORKING_TREE, help="a commit; default: the working tree")
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--quick", action="store_true", help="use tiny sizes, to test the gate itself"
    )
    parser.add_argument("--output", help="also write benchmarks/results/OUTPUT.jsonl")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: an interval needs 2 rounds or more")
    if args.quick and args.output:
        parser.error("--quick --output: tiny sizes are not recorded; remove one of the two options")
    return args


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs cleanup
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the Makefile
    facts = provenance()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary).resolve()
        os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
        base, head = (resolve(name, scratch) for name in (args.base, args.head))
        print(f"{facts['device']}, {facts['cores']} cores, Python {facts['python']}, ", end="")
        print(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
        for side, name, commit in (("base", args.base, base), ("head", args.head, head)):
            print(f"{side}: {name} ({commit[:12]}, {git('log', '-1', '--format=%s', commit)})")
        with checkout(base, scratch / "base") as old, checkout(head, scratch / "head") as new:
            bench = Bench(scratch, old, quick=args.quick)
            different = compare_work(bench, new, args.only)
            verdicts = measure_rounds(bench, new, args.only, args.rounds)
            slower = {verdict.name for verdict in verdicts if verdict.verdict == SLOWER}
            if suspects := [name for name in args.only if name in slower]:
                print(f"measuring slower rows again: {', '.join(suspects)}", file=sys.stderr)
                again = measure_rounds(bench, new, suspects, args.rounds)
                verdicts = confirmed(verdicts, again)
    _report(verdicts, different)
    if args.output:
        results, load = Results(args.output), round(os.getloadavg()[0], 1)
        for verdict in verdicts:
            work = different.get(verdict.name, "")
            commits = {"base_commit": base, "head_commit": head}
            sizes = {"rounds": args.rounds, "load": load, "different_work": work}
            results.add(benchmark="gate", **verdict._asdict(), **commits, **sizes)
    sys.exit(1 if different or any(v.verdict == SLOWER for v in verdicts) else 0)


if __name__ == "__main__":
    main()

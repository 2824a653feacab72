"""Measures the server's CPU time and latency per request, and tests it with deltas and faults.

    python -m benchmarks.serving build --folder F [--rows 300000]
    python -m benchmarks.serving cost --folder F [G ..]
    python -m benchmarks.serving latency --folder F [--wrk wrk]
    python -m benchmarks.serving delta --folder F [--changed 500000] [--deltas 12]
    python -m benchmarks.serving soak --folder F [--seconds 600] [--every 10]

``build`` generates rows, trains Wide & Deep for some steps, and exports the bundle ``F/model``.
``cost`` divides the CPU time of a worker (/proc) by its requests, for one or more models.
``latency`` runs wrk, which must be installed, and compares the server with an ASGI application that
only returns a fixed answer. ``delta`` compares the latencies before and during the application of a
delta. ``soak`` sends valid and malformed requests while deltas and new bundles arrive (including a
damaged delta) and a worker is killed; every response must match the version that it names.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.cpu_criteo import run
from benchmarks.proc import cpu_s
from benchmarks.record import Results
from benchmarks.serving_load import Answers, LoadProcess, load, request
from benchmarks.serving_tools import Chain, memory_mb, name_of, serving
from sbpflow.serving.bodies import JSON, TEXT
from sbpflow.serving.scorer import Model
from sbpflow.serving.scorer import load as load_bundle

SIZES = (1, 64, 1024)
CONNECTIONS = 8
# Scores of different model versions differ by far more than this tolerance. Between batch sizes,
# rounding changes scores by more than 1e-6, because the random values in the deltas are larger than
# trained values.
_TOLERANCE = 1e-5
_DELTAS = 24  # the default number of deltas per bundle
EMPTY = """
import sys
import uvicorn

START = {"type": "http.response.start", "status": 200,
         "headers": [(b"content-type", b"text/plain"), (b"content-length", b"20")]}

async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send(START)
    await send({"type": "http.response.body", "body": b"0.12345678901234567\\n"})

uvicorn.run(app, port=int(sys.argv[1]), http="httptools", lifespan="off", log_level="warning",
            access_log=False, server_header=False, ws="none")
"""


def build(folder: Path, rows: int, hidden: str) -> None:
    """Create ``folder/model`` and ``folder/rows.tsv``."""
    folder.mkdir(parents=True)
    source, data = folder / "all.tsv", folder / "set"
    run("-m", "data", "synth", "--rows", str(rows), "--vocab-scale", "0.3", "--format", "tsv",
        "--output", str(source))  # fmt: skip
    with source.open() as file, (folder / "rows.tsv").open("w") as out:
        out.writelines(line for line, _ in zip(file, range(4096), strict=False))
    run("-m", "data", "prepare", "--input", str(source), "--output", str(data),
        "--min-count", "1")  # fmt: skip
    source.unlink()
    run("train_wdl.py", "--config", "configs/scheme1.yaml", f"data.path={data}",
        f"run.dir={folder / 'run'}", "train.max_steps=50", "train.eval_every=0",
        f"model.hidden={hidden}")  # fmt: skip
    run("-m", "sbpflow", "export", "--checkpoint", str(folder / "run"), "--output",
        str(folder / "model"))  # fmt: skip
    shutil.rmtree(data)
    shutil.rmtree(folder / "run")


def bodies_of(folder: Path, size: int) -> dict[str, list[bytes]]:
    """Return, for each content type, request bodies with ``size`` rows each."""
    lines = (folder / "rows.tsv").read_bytes().splitlines(keepends=True)
    model = load_bundle(folder / "model", check=False)
    names = [column.name for column in model.columns]
    chunks = [lines[at : at + size] for at in range(0, min(len(lines), 64 * size), size)]
    rows = [
        [dict(zip(names, line.decode().rstrip("\n").split("\t"), strict=True)) for line in chunk]
        for chunk in chunks
    ]
    required = {column.name for column in model.columns if column.required}
    cells = [[{n: c for n, c in row.items() if n in required} for row in part] for part in rows]
    return {
        TEXT: [b"".join(chunk) for chunk in chunks],
        JSON: [json.dumps(part).encode() for part in cells],
    }


@contextmanager
def empty_application() -> Iterator[tuple[int, int]]:
    """Start the application that only returns a fixed response; yield its port and process ID."""
    with tempfile.TemporaryDirectory() as scratch:
        file, port = Path(scratch) / "empty.py", 18700 + os.getpid() % 1000
        file.write_text(EMPTY)
        process = subprocess.Popen([sys.executable, str(file), str(port)])
        try:
            _wait_for_port(port)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait()


def _wait_for_port(port: int) -> None:
    for _ in range(200):
        try:
            load(port, [request("/", b"")], 0.01, 1)
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"nothing answers on port {port}")


def _mean_cpu(
    port: int, pid: int, requests: list[bytes], seconds: float, connections: int = 1
) -> dict[str, float]:
    load(port, requests, 0.5, connections)  # warm-up
    start = cpu_s(pid)
    answers = load(port, requests, seconds, connections)
    used, count = 1e3 * (cpu_s(pid) - start), len(answers.latency)
    assert {status for _, _, status, _ in answers.bodies} == {200}
    return {
        "requests": count,
        "cpu_ms": round(used / count, 4),
        "p50_ms": round(float(np.median(answers.latency)) * 1000, 4),
        "p99_ms": round(float(np.quantile(answers.latency, 0.99)) * 1000, 4),
    }


def hidden_of(folder: Path) -> list[int]:
    """Return the widths of the hidden layers of a model."""
    weights = load_bundle(folder / "model", check=False).weights.values()
    return [len(weight) for weight in weights if weight.ndim == 2 and len(weight) > 1]


def cost(folders: Sequence[Path], seconds: float, results: Results) -> None:
    """Measure the CPU time of one worker per request, with one and with many connections.

    With a single connection, the worker waits between requests, and the CPU caches become cold.
    """
    with empty_application() as (port, pid):
        found = _mean_cpu(port, pid, [request("/", b"x" * 200)], seconds)
        results.add(benchmark="cost", server="empty", connections=1, **found)
    for folder in folders:
        _cost(folder, seconds, results)


def _cost(folder: Path, seconds: float, results: Results) -> None:
    hidden = hidden_of(folder)
    with serving(folder / "model") as server:
        (pid,) = server.workers()
        for size in SIZES:
            for kind, bodies in bodies_of(folder, size).items():
                requests = [request("/score", body, kind) for body in bodies]
                for number in (1, CONNECTIONS):
                    found = _mean_cpu(server.port, pid, requests, seconds, number)
                    results.add(
                        benchmark="cost", server="sbpflow", hidden=hidden, connections=number,
                        rows=size, format=kind, **found,
                    )  # fmt: skip
    with serving(folder / "model", workers=2) as server:
        requests = [request("/score", body) for body in bodies_of(folder, 64)[TEXT]]
        load(server.port, requests, 2.0, 8)
        size = (folder / "model" / "model.safetensors").stat().st_size
        workers = [memory_mb(pid) for pid in server.workers()]
        results.add(benchmark="memory", hidden=hidden, model_mb=round(size / 2**20, 1),
                    workers=workers, supervisor=memory_mb(server.process.pid))  # fmt: skip


def _wrk(wrk: str, port: int, body: bytes, connections: int, seconds: int) -> dict[str, float]:
    """Run wrk once; return latency percentiles in ms and requests per second."""
    with tempfile.TemporaryDirectory() as scratch:
        data, script = Path(scratch) / "body", Path(scratch) / "post.lua"
        data.write_bytes(body)
        script.write_text(
            f'wrk.method = "POST"\nwrk.headers["Content-Type"] = "{TEXT}"\n'
            f'local file = io.open("{data}", "rb")\nwrk.body = file:read("*a")\n'
            "done = function(summary, latency)\n"
            '  io.write(string.format("%f %f %f %d\\n", latency:percentile(50),\n'
            "    latency:percentile(99), summary.requests / summary.duration * 1e6,\n"
            "    summary.errors.status + summary.errors.read + summary.errors.timeout))\nend\n"
        )
        words = [wrk, "-t1", f"-c{connections}", f"-d{seconds}", "-s", str(script)]
        done = subprocess.run(
            [*words, f"http://127.0.0.1:{port}/score"], capture_output=True, text=True, check=True
        )
    p50, p99, rate, errors = map(float, done.stdout.split("\n")[-2].split())
    assert errors == 0, done.stdout
    return {
        "p50_ms": round(p50 / 1000, 3), "p99_ms": round(p99 / 1000, 3),
        "requests_per_s": round(rate),
    }  # fmt: skip


def latency(folder: Path, seconds: float, wrk: str, results: Results) -> None:
    """Compare the latency of scoring one row with that of an application that returns a fixed
    response, in alternating runs.
    """
    (body, *_) = bodies_of(folder, 1)[TEXT]
    with empty_application() as (port, _), serving(folder / "model") as server:
        for connections in (1, CONNECTIONS):
            for _ in range(3):
                for name, at in (("empty", port), ("sbpflow", server.port)):
                    found = _wrk(wrk, at, body, connections, int(seconds))
                    results.add(
                        benchmark="latency", server=name, rows=1, connections=connections,
                        client="wrk", **found,
                    )  # fmt: skip


def delta(folder: Path, changed: int, number: int, results: Results) -> None:
    """Measure the latency of scoring one row before and while large deltas are applied: from the
    publication of a delta to the first answer of the new version. The last result is that of the
    requests of all deltas together.
    """
    with (
        _copy(folder) as served,
        _copy(folder) as chain,  # deltas are written here, and published later
        serving(served.bundle, "--poll-seconds", "0.2") as server,
    ):
        requests = [request("/score", body) for body in bodies_of(folder, 1)[TEXT]]
        total = sum(table["rows"] for table in chain.model.content["tables"].values())
        (served.bundle / "deltas").mkdir()
        idle: list[np.ndarray] = []
        during: list[np.ndarray] = []
        for seed in range(number):
            chain.write(seed, changed)
            client = LoadProcess(server.port, requests, 8.0, 1, 400.0)
            time.sleep(5.0)
            name = f"deltas/{chain.number:06d}"
            shutil.copytree(chain.bundle / name, served.bundle / f"{name}.copy")
            start = time.time()
            (served.bundle / f"{name}.copy").rename(served.bundle / name)
            answers = client.result()
            end = answers.first[name_of(chain.model)]
            idle.append(answers.latency[answers.at < start - 1.0])
            during.append(answers.latency[(answers.at >= start) & (answers.at <= end)])
            results.add(
                benchmark="delta", deltas=1, changed_rows=min(changed, total),
                apply_s=round(end - start, 2), **_latencies(idle[-1], during[-1]),
            )  # fmt: skip
        results.add(
            benchmark="delta", deltas=number, changed_rows=min(changed, total),
            **_latencies(np.concatenate(idle), np.concatenate(during)),
        )  # fmt: skip


def _latencies(idle: np.ndarray, during: np.ndarray) -> dict[str, float]:
    """Return the latencies before and during deltas in ms, and the number of requests during
    them.
    """
    return {
        "idle_p50_ms": _quantile(idle, 0.5), "idle_p99_ms": _quantile(idle, 0.99),
        "during_p50_ms": _quantile(during, 0.5), "during_p99_ms": _quantile(during, 0.99),
        "during_max_ms": _quantile(during, 1.0), "requests": len(during),
    }  # fmt: skip


def _quantile(latency: np.ndarray, share: float) -> float:
    return round(float(np.quantile(latency, share)) * 1000, 3)


@contextmanager
def _copy(folder: Path) -> Iterator[Chain]:
    """Copy the bundle with hard links to its large files, and yield a delta writer for the copy."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        bundle = Path(scratch) / "step-50"
        bundle.mkdir()
        for file in (folder / "model").iterdir():
            os.link(file, bundle / file.name)
        yield Chain(bundle, load_bundle(bundle))


def soak(folder: Path, seconds: float, every: float, results: Results) -> None:
    """Run the server for a long time with deltas and faults, and check every answer.

    As in the exports of a training run, a new bundle follows after 24 deltas.
    """
    bodies = [*bodies_of(folder, 1)[TEXT][:4], *bodies_of(folder, 64)[TEXT][:2]]
    good = [request("/score", body) for body in bodies]
    bad = [
        request("/score", b"1\t2\n"), request("/score", b"[1", JSON), request("/none", b""),
        request("/score", b" " * (5 << 20)), b"GARBAGE\r\n\r\n",
    ]  # fmt: skip
    statuses = [200] * len(good) + [400, 400, 404, 413, 400]
    every = min(every, seconds / 6)
    with _copy(folder) as chain, serving(chain.bundle.parent, workers=2) as server:
        versions = {name_of(chain.model): chain.model}
        memory: list[list[dict[str, float]]] = []
        count = 0
        client = LoadProcess(server.port, [*good * 8, *bad], seconds, 8, 400.0)
        begin = time.time()
        killed = 0.0
        while time.time() - begin < seconds - every:
            time.sleep(every)
            if count == 2:
                killed, (pid, _) = time.time(), server.workers()
                os.kill(pid, signal.SIGKILL)
                while pid in server.workers() or len(server.workers()) < 2:
                    time.sleep(0.01)
            if count == 4:
                _publish_damaged(chain)
                time.sleep(every)
                shutil.rmtree(chain.bundle / "deltas" / f"{chain.number + 1:06d}")
            if chain.number == _DELTAS:
                changed = chain.start_again()
            else:
                changed, count = chain.write(count, 5000), count + 1
            versions[name_of(changed)] = changed
            memory.append([memory_mb(pid) for pid in server.workers()])
        answers = client.result()
        counts = server.metrics()
    wrong = _check(answers, [*good * 8, *bad], bodies, statuses, versions)
    late = [at for at, _ in answers.lost if not 0 <= at - killed < 1.0]
    assert not wrong, wrong[:5]
    assert not late, f"{len(late)} requests were lost although no worker had just been killed"
    errors = next(n for name, n in counts.items() if name.startswith("sbpflow_delta_errors"))
    results.add(
        benchmark="soak", seconds=seconds, requests=len(answers.latency),
        versions_seen=len({version for _, version, _, _ in answers.bodies if version}),
        deltas=count, bundles=len(versions) - count, refused_deltas=errors,
        lost_with_killed_worker=len(answers.lost),
        restarts=counts["sbpflow_worker_restarts_total"], wrong_answers=0,
        p50_ms=_quantile(answers.latency, 0.5), p99_ms=_quantile(answers.latency, 0.99),
        **_memory_over_time("pss_mb", memory), **_memory_over_time("private_mb", memory),
    )  # fmt: skip


def _memory_over_time(kind: str, workers: list[list[dict[str, float]]]) -> dict[str, float]:
    """Return the total memory of all workers after five deltas and at the end, and its maximum from
    the fifth delta on.
    """
    sums = [round(sum(worker[kind] for worker in each), 1) for each in workers]
    first = min(5, len(sums) - 1)
    later = {"after_5_deltas": sums[first], "highest": max(sums[first:]), "at_end": sums[-1]}
    return {f"{kind}_{when}": value for when, value in later.items()}


def _publish_damaged(chain: Chain) -> None:
    """Publish a damaged copy of the last delta under the next number."""
    source = chain.bundle / "deltas" / f"{chain.number:06d}"
    work = chain.bundle / "deltas" / ".damaged"
    shutil.copytree(source, work)
    values = bytearray((work / "values.safetensors").read_bytes())
    values[-1] ^= 1
    (work / "values.safetensors").write_bytes(values)
    work.rename(chain.bundle / "deltas" / f"{chain.number + 1:06d}")


def _check(
    answers: Answers, sent: list[bytes], bodies: list[bytes], statuses: list[int],
    versions: dict[str, Model],
) -> list[object]:  # fmt: skip
    """Return the answers that differ from the expected answer of the stated version."""
    num_bad = len(statuses) - len(bodies)
    wrong: list[object] = []
    for number, version, status, body in answers.bodies:
        good = number < len(sent) - num_bad
        kind = number % len(bodies) if good else len(bodies) + number - (len(sent) - num_bad)
        if status != statuses[kind]:
            wrong.append((number, status, body[:200]))
        elif good:
            wanted = versions[version].score(bodies[kind])
            found = np.array([float(line) for line in body.split()])
            if found.shape != wanted.shape or not np.allclose(
                found, wanted, rtol=0, atol=_TOLERANCE
            ):
                wrong.append((number, version, found[:3], wanted[:3]))
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("build", "cost", "latency", "delta", "soak"))
    parser.add_argument("--folder", type=Path, nargs="+", required=True)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--hidden", default="[400, 400]", help="dense layers of the model")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between deltas")
    parser.add_argument("--changed", type=int, default=500_000)
    parser.add_argument("--deltas", type=int, default=12)
    parser.add_argument("--wrk", default="wrk")
    args = parser.parse_args()
    folder, *others = args.folder
    if others and args.what != "cost":
        parser.error(f"{args.what} needs one --folder")
    if args.what == "build":
        build(folder, args.rows, args.hidden)
        return
    results = Results(f"serving_{args.what}")
    if args.what == "cost":
        cost(args.folder, args.seconds or 3.0, results)
    elif args.what == "latency":
        latency(folder, args.seconds or 3.0, args.wrk, results)
    elif args.what == "delta":
        delta(folder, args.changed, args.deltas, results)
    else:
        soak(folder, args.seconds or 600.0, args.every, results)


if __name__ == "__main__":
    sys.exit(main())

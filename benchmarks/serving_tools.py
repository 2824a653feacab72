"""Starts servers for bundles, writes deltas with random values, and reads the workers' /proc
files.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import torch

from sbpflow.runtime.files.tensors_file import TensorsFile
from sbpflow.serving.deltas import DeltaHead, DeltaWriter, digest_of
from sbpflow.serving.row_store import Tensors
from sbpflow.serving.scorer import Model, file_digest, load

ROOT = Path(__file__).resolve().parents[1]
Body = bytes | str | Iterator[bytes] | None


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Server:
    """A running server; ``request`` sends one request on a new connection."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def request(self, method: str, path: str, body: Body = None, kind: str = "") -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            headers = {"Content-Type": kind} if kind else {}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name and labels."""
        lines = self.request("GET", "/metrics").body.decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(number) for name, _, number in pairs}

    def workers(self) -> list[int]:
        """Return the process IDs of the workers."""
        pid = self.process.pid
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def serve_version(self, model: Model) -> bool:
        """Return whether all workers serve this version of the first model."""
        version = name_of(model)
        key = re.compile(rf'sbpflow_model_workers\{{model="[^"]+",version="{version}"\}}')
        found = [number for name, number in self.metrics().items() if key.fullmatch(name)]
        return found[:1] == [len(self.workers())]


def name_of(model: Model) -> str:
    """Return the version of a model in the server's format."""
    return "-".join(map(str, model.version))


@contextlib.contextmanager
def serving(*words: object, workers: int = 1, **environment: str) -> Iterator[Server]:
    """Start ``sbpflow serve`` on a free port, and kill it at the end."""
    command = [sys.executable, "-m", "sbpflow", "serve", "--port", "0", *map(str, words)]
    process = subprocess.Popen(
        [*command, "--workers", str(workers)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        printed = ""
        while (found := re.search(r"serving on http://[\d.]+:(\d+)", printed)) is None:
            line = process.stdout.readline()
            printed += line
            if not line:
                raise RuntimeError(printed)
        server = Server(process, int(found[1]))
        while len(server.workers()) < workers:  # the workers start after the message
            time.sleep(0.01)
        yield server
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Chain:
    """Writes deltas for a bundle; ``model`` is the model that servers are expected to hold once
    they have applied the last delta.
    """

    def __init__(self, bundle: Path, model: Model) -> None:
        self.bundle, self.model = bundle, model
        self.base = self.last = digest_of(bundle)
        self.number, self.step = 0, model.version.step

    def write(self, seed: int, num_rows: int = 40, noise: float = 0.125) -> Model:
        """Write a delta with random values for about ``num_rows`` rows and with noisy dense
        weights.
        """
        random = torch.Generator().manual_seed(seed)
        tables = self.model.content["tables"]
        total = sum(table["rows"] for table in tables.values())
        tensors: dict[str, torch.Tensor] = {}
        for name, table in tables.items():
            count = -(-num_rows * table["rows"] // total)
            rows = torch.randperm(table["rows"], generator=random)[:count].sort().values
            tensors[f"tables/{name}/rows"] = rows
            tensors[f"tables/{name}"] = torch.randn(len(rows), table["dim"], generator=random) / 8
        for name, value in self.model.weights.items():
            change = torch.randn(value.shape, generator=random) * noise
            tensors[f"dense/{name}"] = value + change.to(value.dtype)
        self.number += 1
        self.step += 1
        head = DeltaHead(
            number=self.number,
            base=self.base,
            previous=self.last,
            run=self.model.version.run,
            step=self.step,
            time=1e9 + self.number,
        )
        sizes = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
        writer = DeltaWriter(self.bundle, head, sizes)
        for name, value in tensors.items():
            writer.append(name, value)
        self.last = writer.close()
        changed = {
            name: (tensors[f"tables/{name}/rows"].numpy(), tensors[f"tables/{name}"].numpy())
            for name in tables
        }
        dense = {name: tensors[f"dense/{name}"].numpy() for name in self.model.weights}
        origin = self.model.version._replace(step=self.step, delta=self.number)
        self.model = self.model.with_changes(changed, dense, origin)
        return self.model

    def start_again(self) -> Model:
        """Write a bundle with the current values, remove the old one, and start a new chain, as an
        export does after its last delta.
        """
        old, model = self.bundle, self.model
        self.step += 1
        work = old.with_name(".partial")
        work.mkdir()
        for file in old.iterdir():
            if file.is_file() and file.name != "model.safetensors":
                shutil.copyfile(file, work / file.name)
        entries = Tensors(old / "model.safetensors").entries
        sizes = {name: (entry["dtype"], entry["shape"]) for name, entry in entries.items()}
        with TensorsFile(work / "model.safetensors", sizes) as file:
            for name in entries:
                kind, _, rest = name.partition("/")
                value = model.weights[rest] if kind == "dense" else self._rows(rest)
                file.put(name, 0, value.numpy())
        content = json.loads((work / "model.json").read_text())
        content["origin"] = {"run": model.version.run, "step": self.step}
        content["sha256"]["model.safetensors"] = file_digest(work / "model.safetensors")
        (work / "model.json").write_text(json.dumps(content))
        scores = model.score(model.sample["rows"]).tolist()
        (work / "sample.json").write_text(json.dumps({**model.sample, "scores": scores}))
        self.bundle, self.number = old.with_name(f"step-{self.step}"), 0
        work.rename(self.bundle)
        shutil.rmtree(old)
        self.base = self.last = digest_of(self.bundle)
        self.model = load(self.bundle)
        return self.model

    def _rows(self, name: str) -> torch.Tensor:
        table = self.model.content["tables"][name]
        rows = torch.arange(table["first"], table["first"] + table["rows"])
        return self.model.stores[table["store"]].gather(rows)


def memory_mb(pid: int) -> dict[str, float]:
    """Return the resident, proportional, private, and anonymous memory of a process in MB.

    Private memory includes pages of mapped files that no other process has read; anonymous memory
    does not.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    named = {
        "rss": kilobytes["Rss"],
        "pss": kilobytes["Pss"],
        "private": private,
        "anonymous": kilobytes["Anonymous"],
    }
    return {f"{name}_mb": round(value / 1024, 1) for name, value in named.items()}

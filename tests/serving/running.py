"""Exports a small bundle, starts servers for bundles, and sends requests to them."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sbpflow.runtime.ranks.world import World
from sbpflow.serving.deltas import DeltaHead, DeltaWriter, digest_of
from sbpflow.serving.scorer import Model
from tests.deadlines import output_of
from tests.serving.bundles import MODELS, config_of, export, make_set, train

ROOT = Path(__file__).resolve().parents[2]


def run_and_export(world: World, folder: Path, name: str) -> None:
    """Prepare a set, train a model, and export it to ``folder/model``."""
    prepared = make_set(folder)
    config = config_of(prepared, MODELS[name])
    train(world, folder / "run", config)
    export(folder / "run", config, folder / "model")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Server:
    """A running server; ``request`` sends one request on a new connection."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def request(self, method: str, path: str, body: Any = None, kind: str = "") -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            headers = {"Content-Type": kind} if kind else {}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())

    def stop(self) -> str:
        """Send SIGTERM, and return what the server printed."""
        self.process.terminate()
        return output_of(self.process, 30)

    def workers(self) -> list[int]:
        """Return the process IDs of the workers."""
        pid = self.process.pid
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def serving(*words: object, workers: int = 1) -> Iterator[Server]:
    """Start ``sbpflow serve`` on a free port."""
    command = [sys.executable, "-m", "sbpflow", "serve", "--port", "0", *map(str, words)]
    process = subprocess.Popen(
        [*command, "--workers", str(workers)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed = ""
        while (found := re.search(r"serving on http://[\d.]+:(\d+)", printed)) is None:
            line = process.stdout.readline()
            printed += line
            assert line, printed
        yield Server(process, int(found[1]))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Chain:
    """Writes deltas of a bundle; ``write`` returns the model that a server must have after it."""

    def __init__(self, bundle: Path, model: Model) -> None:
        self.bundle, self.model = bundle, model
        self.base = self.last = digest_of(bundle)
        self.number, self.step = 0, model.version.step

    def write(self, seed: int, num_rows: int = 5) -> Model:
        """Write a delta with random rows and dense weights."""
        random = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, table in self.model.content["tables"].items():
            rows = torch.randperm(table["rows"], generator=random)[:num_rows].sort().values
            tensors[f"tables/{name}/rows"] = rows
            tensors[f"tables/{name}"] = torch.randn(len(rows), table["dim"], generator=random)
        for name, value in self.model.weights.items():
            noise = torch.randn(value.shape, generator=random) / 4
            tensors[f"dense/{name}"] = value + noise.to(value.dtype)
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
            for name in self.model.content["tables"]
        }
        dense = {n: tensors[f"dense/{n}"] for n in self.model.weights}
        origin = self.model.version._replace(step=self.step, delta=self.number)
        self.model = self.model.with_changes(changed, dense, origin)
        return self.model

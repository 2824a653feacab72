"""Measures training with rows on embedding servers behind links with a limited rate.

The trainer and each server run in their own network namespaces, connected to one switch.
``systems`` trains with the rows on one server, at two rates: fetching all rows on demand, with an
LRU cache, and with lookahead. All losses must equal those of training with all rows on the device.
``scaling`` reads rows from one to four servers whose links have a third of the trainer's rate.
"""

import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import torch

from benchmarks.cache_store import (
    CAPACITY,
    MEASURED,
    WARM_UP,
    Array,
    Setup,
    genuine_batches,
    make_job,
    train,
)
from benchmarks.network import switched_hosts
from benchmarks.record import Results
from benchmarks.server_processes import RunningServers, ServerProcesses
from sbpflow.embedding.cache.records import RecordLayout, RecordStore
from sbpflow.embedding.cache.remote_records import RemoteRecords, Servers
from sbpflow.embedding.cache.server_protocol import MAX_ROWS
from sbpflow.runtime.compute.malloc import keep_freed_memory
from sbpflow.runtime.ranks.world import World

RATES = ("100mbit", "1gbit")
SERVER_RATE, TRAINER_RATE = "100mbit", "300mbit"
RECORD_BYTES = 192
NUM_ROWS, READ_ROWS, READ_S = 200_000, 4 * MAX_ROWS, 4.0


class CountedRecords:
    """Counts the rows that a store reads and writes."""

    def __init__(self, inner: RecordStore) -> None:
        self._inner = inner
        self.num_rows = 0  # read and written

    @property
    def num_bytes(self) -> int:
        """Return the size of all records."""
        return self._inner.num_bytes

    def read(self, rows: Array, out: Array) -> None:
        """Read and count."""
        self.num_rows += rows.size
        self._inner.read(rows, out)

    def write(self, rows: Array, records: Array) -> None:
        """Write and count."""
        self.num_rows += rows.size
        self._inner.write(rows, records)


class RecordsOnServers:
    """Creates ``CountedRecords`` on embedding servers."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._made: list[CountedRecords] = []

    def __call__(self, num_rows: int, layout: RecordLayout) -> RecordStore:
        number = len(self._made)
        records = RemoteRecords(self._servers, number, num_rows, layout.empty(0))
        self._made.append(CountedRecords(records))
        return self._made[-1]

    def num_rows(self) -> int:
        """Return the number of rows read and written so far."""
        return sum(records.num_rows for records in self._made)


def _servers(addresses: list[str], secret_file: str) -> Servers:
    """Begin a session on the servers."""
    places = [address.rpartition(":") for address in addresses]
    servers = Servers(
        key="parallel.storage.deep.*",
        addresses=tuple((host, int(port)) for host, _, port in places),
        secret=Path(secret_file).read_bytes().strip(),
        session=uuid.uuid4().bytes,
        rank=0,
        machine="benchmark",
        limit_s=60.0,
    )
    servers.begin()
    return servers


def _measure_systems(rate: str, folder: Path, servers: RunningServers) -> None:
    """Train with each system; raise SystemExit if any loss differs."""
    results = Results("cache_servers", f"systems, {rate}")
    torch.set_num_threads(1)
    keep_freed_memory()
    with World.start("cpu") as world:
        batches, fields = genuine_batches(folder, world)
        losses: list[float] = []
        for system in ("device", "uncached", "LRU", "lookahead"):
            made = RecordsOnServers(_servers(servers.addresses, servers.secret_file))
            capacity = 12_000 if system == "uncached" else CAPACITY
            setup = Setup(system=system, capacity=capacity)
            job, stores = make_job(world, fields, setup, folder, made)
            before, cpu_s = made.num_rows(), servers.cpu_s()
            found = train(job, stores, batches, WARM_UP, MEASURED)
            rows, cpu_s = made.num_rows() - before, servers.cpu_s() - cpu_s
            losses = losses or found.losses
            if found.losses != losses:
                raise SystemExit(f"{system}: losses differ from those with all rows on the device")
            results.add(
                system=system, link=rate, servers=len(servers.addresses), capacity=capacity,
                losses_equal=len(losses), step_ms=found.step_ms, exposed_wait_ms=found.wait_ms,
                cpu_ms=found.cpu_ms, mover_cpu_ms=found.mover_cpu_ms,
                fetched_per_step=found.fetched, rows_moved=rows,
                server_cpu_us_per_row=1e6 * cpu_s / rows if rows else None,
            )  # fmt: skip


def _measure_scaling(servers: RunningServers) -> None:
    """Read random rows from one server, from two, and so on up to all servers."""
    results = Results("cache_servers", "scaling")
    draw = np.random.default_rng(1)
    for count in range(1, len(servers.addresses) + 1):
        named = _servers(servers.addresses[:count], servers.secret_file)
        out = np.empty((READ_ROWS, RECORD_BYTES // 8), np.int64)
        records = RemoteRecords(named, 0, NUM_ROWS, out)
        wanted = [draw.integers(0, NUM_ROWS, READ_ROWS) for _ in range(64)]
        records.read(wanted[0], out)
        cpu_s, number, begin = servers.cpu_s(), 0, time.perf_counter()
        while time.perf_counter() < begin + READ_S:
            records.read(wanted[number % len(wanted)], out)
            number += 1
        seconds = time.perf_counter() - begin
        rows = number * READ_ROWS
        results.add(
            servers=count, server_link=SERVER_RATE, trainer_link=TRAINER_RATE,
            record_bytes=RECORD_BYTES, rows_per_read=READ_ROWS, rows_per_s=rows / seconds,
            mbit_per_s=rows * RECORD_BYTES * 8e-6 / seconds,
            server_cpu_us_per_row=1e6 * (servers.cpu_s() - cpu_s) / rows,
        )  # fmt: skip


def measure(folder: Path, rates: tuple[str, ...] = RATES) -> None:
    """Run ``systems`` at each rate, and then ``scaling``, each in new namespaces."""
    for rate in rates:
        _in_namespaces([rate, rate], "systems", rate, str(folder.resolve()))
    _in_namespaces([TRAINER_RATE] + 4 * [SERVER_RATE], "scaling")


def _in_namespaces(rates: list[str], *words: str) -> None:
    """Start servers, and run this module in the namespace of the trainer."""
    with switched_hosts(rates) as (prefixes, addresses), tempfile.TemporaryDirectory() as scratch:
        places = [f"{address}:7070" for address in addresses[1:]]
        servers = ServerProcesses(Path(scratch), places, prefixes[1:])
        try:
            done = subprocess.run(
                [
                    *(*prefixes[0], sys.executable, "-m", "benchmarks.cache_servers", "--worker"),
                    *(servers.running.to_text(), *words),
                ],
                check=False,
            )
        finally:
            servers.close()
    if done.returncode:
        raise SystemExit(f"{words}: the trainer ended with status {done.returncode}")


def main() -> None:
    """Run the trainer of ``benchmarks.cache servers``."""
    if len(sys.argv) < 4 or sys.argv[1] != "--worker":
        raise SystemExit("run python -m benchmarks.cache servers")
    servers = RunningServers.from_text(sys.argv[2])
    if sys.argv[3] == "systems":
        _measure_systems(sys.argv[4], Path(sys.argv[5]), servers)
    else:
        _measure_scaling(servers)


if __name__ == "__main__":
    main()

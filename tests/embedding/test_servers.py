"""Tests embedding servers in this process: values, sessions, secrets, versions, bad messages."""

import gc
import random
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from sbpflow.embedding.cache import remote_records, server, server_protocol
from sbpflow.embedding.cache.records import MappedRecords
from sbpflow.embedding.cache.remote_records import WRITES_IN_FLIGHT, RemoteRecords, Servers
from sbpflow.embedding.cache.server import EmbeddingServer
from sbpflow.embedding.cache.server_protocol import MAGIC, MAX_ROWS, OPEN, PROTOCOL
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.storage.store import WEIGHTS
from sbpflow.errors import ConfigError, ServerLostError
from tests.embedding.test_cached_store import REQUEST, ROWS, batches, initial, train
from tests.quick import quick

SECRET = b"0123456789abcdef"
WORDS = 3


def records_like(words, word="i8"):
    return np.empty((0, words), word)


class SlowServer(EmbeddingServer):
    """Answers requests after random delays, in any order across connections."""

    def _answer(self, sock, purpose):
        draw = random.Random(purpose.store)
        inner = self._sessions[purpose.session].blocks[purpose.rank, purpose.store].records

        class Slow(MappedRecords):
            def read(self, rows, out):
                time.sleep(draw.choice((0, 0, 0.002)))
                inner.read(rows, out)

            def write(self, rows, records):
                time.sleep(draw.choice((0, 0.001, 0.005)))
                inner.write(rows, records)

        blocks = self._sessions[purpose.session].blocks
        block = blocks[purpose.rank, purpose.store]
        blocks[purpose.rank, purpose.store] = block._replace(records=Slow(inner._records))
        super()._answer(sock, purpose)


@contextmanager
def running(count, kind=EmbeddingServer, memory=10**9, secret=SECRET) -> Iterator[Servers]:
    """Run servers in threads; yield rank 0's view of them."""
    with ExitStack() as opened:
        listeners = [
            opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        for listener in listeners:

            def serve(listener=listener):
                with suppress(OSError):  # the listener is closed after the test
                    kind(secret, memory).serve(listener)

            threading.Thread(target=serve, daemon=True).start()
        yield Servers(
            key="parallel.storage.t",
            addresses=tuple(listener.getsockname() for listener in listeners),
            secret=SECRET,
            session=bytes(16),
            rank=0,
            machine="here",
            limit_s=20.0,
        )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_servers_return_what_was_written(count):
    rows, draw = 3 * MAX_ROWS, np.random.default_rng(count)
    with running(count) as servers:
        servers.begin()
        records = RemoteRecords(servers, 0, rows, records_like(WORDS))
        expected = draw.integers(0, 2**60, (rows, WORDS))
        records.write(np.arange(rows), expected)
        for size in (1, 2, 50, 3000, rows, 0) * 4:
            wanted = draw.permutation(rows)[:size].astype(draw.choice(("i4", "i8")))
            out = np.empty((size, WORDS), np.int64)
            records.read(wanted, out)
            assert (out == expected[wanted]).all()
            changed = draw.permutation(rows)[: size // 2]
            expected[changed] = draw.integers(0, 2**60, (changed.size, WORDS))
            records.write(changed, expected[changed])
            records.read(wanted, out)  # some of these rows are still being written
            assert (out == expected[wanted]).all()


def test_a_server_compiles_its_copies_before_ranks_connect(monkeypatch):
    compiled = []
    monkeypatch.setattr(server, "warm_up_copies", lambda block: compiled.append(block.dtype))
    EmbeddingServer(SECRET, 1000)
    assert compiled == [np.dtype(word) for word in ("i8", "i4", "i2", "i1")]


def test_a_slow_server_does_not_bring_back_old_rows():
    """The newer write of a row goes to one server; the older write also goes to a second, slow
    server.
    """
    released = threading.Event()

    class HeldServer(EmbeddingServer):
        """Until ``released`` is set, delays writes if this server has a single row."""

        def _answer(self, sock, purpose):
            blocks = self._sessions[purpose.session].blocks
            block = blocks[purpose.rank, purpose.store]

            class Held(MappedRecords):
                def write(self, rows, records):
                    released.wait(20)
                    super().write(rows, records)

            if block.num_rows == 1:
                held = Held(block.records._records)
                blocks[purpose.rank, purpose.store] = block._replace(records=held)
            super()._answer(sock, purpose)

    with running(2, HeldServer) as servers:
        servers.begin()
        records, reader = (RemoteRecords(servers, 0, 3, records_like(WORDS)) for _ in range(2))
        row, out = np.array([0]), np.zeros((1, WORDS), np.int64)
        records.write(np.arange(3), np.zeros((3, WORDS), np.int64))
        records.write(row, np.ones((1, WORDS), np.int64))
        while not out.all():  # wait until the fast server has both writes
            reader.read(row, out)
        for _ in range(30):  # reads still return the new row after its write is confirmed
            time.sleep(0.005)
            records.read(row, out)
            assert out.all()
        released.set()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("word", "words"),
    quick(
        [("u1", 17), ("u1", 24), ("i2", 9), ("i4", 5), ("i4", 6), ("i8", 24)], lambda n: n % 2 == 0
    ),
)
def test_records_may_have_any_size(word, words):
    """The server may use larger words than the rank: six words of 4 bytes are three of 8 bytes."""
    with running(2) as servers:
        servers.begin()
        records = RemoteRecords(servers, 0, 40, records_like(words, word))
        size = 40 * words * np.dtype(word).itemsize
        written = np.random.default_rng(1).bytes(size)
        written = np.frombuffer(written, word).reshape(40, words)
        records.write(np.arange(40)[::-1], written)
        out = np.empty_like(written)
        records.read(np.arange(40), out)
        assert (out[::-1] == written).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_cached_store_is_exact_under_any_timing(seed):
    draw, before = random.Random(seed), set(threading.enumerate())
    with running(1 + seed % 3, SlowServer) as servers:
        servers.begin()
        store = CachedStore(
            REQUEST,
            lambda rows, layout: RemoteRecords(servers, 0, rows, layout.empty(0)),
            draw.choice((35, 50, 90)),
        )
        expected = initial(torch.arange(ROWS))[WEIGHTS]
        train(store, batches(seed), draw.choice((1, 2, 6, 30)), expected)
        assert torch.equal(store.read(slice(0, ROWS))[WEIGHTS], expected)
        assert store.counts.written > 50
        assert store.counts.fetched > store.counts.new > 0
        del store
    gc.collect()
    names = {"row writer", "row mover"}
    wait_until(
        lambda: not any(t.name in names for t in set(threading.enumerate()) - before),
        "a thread outlives its store",
    )


def test_several_writes_are_in_flight_before_one_waits():
    opens, started = threading.Event(), []

    class Blocked(EmbeddingServer):
        def _answer(self, sock, purpose):
            started.append(purpose)
            if len(started) == 2:  # the connection for writes
                opens.wait(20)
            super()._answer(sock, purpose)

    with running(1, Blocked) as servers:
        servers.begin()
        records = RemoteRecords(servers, 0, 100, records_like(1))
        done = []

        def write():
            for value in range(WRITES_IN_FLIGHT + 1):
                records.write(np.arange(value, 50), np.full((50 - value, 1), value))
                done.append(value)

        thread = threading.Thread(target=write)
        thread.start()
        end = time.monotonic() + 10
        while len(done) < WRITES_IN_FLIGHT and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(done) == WRITES_IN_FLIGHT
        out = np.empty((5, 1), np.int64)
        records.read(np.array([0, 1, 2, 3, 49]), out)  # the newest unconfirmed value of each row
        assert out[:, 0].tolist() == [0, 1, 2, 3, 3]
        opens.set()
        thread.join(10)
        records.read(np.array([0, 1, 2, 3, 49]), out)
        assert out[:, 0].tolist() == [0, 1, 2, 3, 4]


def wait_until(condition, message, limit_s=20):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.01)


def write_until_refused(records, num_rows=10):
    for _ in range(500):
        records.write(np.arange(num_rows), np.ones((num_rows, 1), np.int64))
        time.sleep(0.01)


def test_a_new_session_drops_rows_and_refuses_earlier_connections():
    with running(2) as servers:
        servers.begin()
        old, writer = (RemoteRecords(servers, store, 10, records_like(1)) for store in range(2))
        old.write(np.arange(10), np.ones((10, 1), np.int64))
        old.read(np.arange(10), np.empty((10, 1), np.int64))
        new = replace(servers, session=bytes(15) + b"1")
        with pytest.raises(ServerLostError, match="refused: it is serving another launch"):
            RemoteRecords(new, 0, 10, records_like(1))  # this session has not begun
        new.begin()
        new.begin()  # harmless
        RemoteRecords(new, 0, 7, records_like(3))
        with pytest.raises(
            ServerLostError, match=r"embedding server 0 of 2 at 127.* refused: it is serving"
        ):
            old.read(np.arange(10), np.empty((10, 1), np.int64))
        with pytest.raises(ServerLostError, match="refused: it is serving another launch"):
            write_until_refused(writer)
        for late in (servers.begin, lambda: RemoteRecords(servers, 0, 10, records_like(1))):
            with pytest.raises(ServerLostError, match="refused: it is serving another launch"):
                late()


def test_sizes_are_checked_before_rows_are_allocated():
    with running(1, memory=1000) as servers:
        servers.begin()
        RemoteRecords(servers, 0, 100, records_like(1))
        with pytest.raises(ConfigError, match=r"limit is 0\.00 GB; use servers on"):
            RemoteRecords(servers, 1, 100, records_like(1))
        with pytest.raises(ServerLostError, match="store 0 of rank 0 already exists"):
            RemoteRecords(servers, 0, 50, records_like(1))
        with pytest.raises(ServerLostError, match="died or cannot be reached"):
            servers.connect(0, OPEN, num_rows=2**40, record_bytes=1)


def test_a_wrong_secret_is_named_on_both_sides(caplog):
    with running(1, secret=b"another secret, with 16 bytes") as servers:
        with pytest.raises(
            ConfigError, match=r"secret_file: embedding server 0 of 1 .* has a different secret"
        ):
            servers.begin()
        wait_until(lambda: "its secret differs" in caplog.text, "the server logs nothing")


def test_an_impostor_without_the_secret_gets_no_rows(monkeypatch):
    monkeypatch.setattr(server_protocol.hmac, "compare_digest", lambda a, b: len(a) != 32)
    with running(1) as servers, pytest.raises(ConfigError, match=r"secret_file"):
        servers.begin()


@pytest.mark.parametrize(
    "hello", [struct.pack("<8sI32s", MAGIC, PROTOCOL + 1, bytes(32)), b"x" * 44]
)
def test_a_server_of_another_version_is_named(hello):
    with socket.create_server(("127.0.0.1", 0)) as listener, running(1) as servers:
        servers = replace(servers, addresses=(listener.getsockname(),))

        def answer():
            sock, _ = listener.accept()
            with closing(sock):
                sock.sendall(hello)
                sock.recv(100)

        threading.Thread(target=answer).start()
        with pytest.raises(ConfigError, match="is not an embedding server of this version"):
            servers.begin()


class Hanging(EmbeddingServer):
    """Does not answer after the start of a session."""

    def _answer(self, sock, purpose):
        time.sleep(3)


def short_waits(records):
    """Make requests time out early, but leave time to connect, which may take longer on a busy
    machine.
    """
    for sock in (*records._readers, *(writer._sock for writer in records._writers)):
        sock.settimeout(0.3)
    return records


def test_a_server_that_does_not_answer_is_named_in_time(monkeypatch):
    monkeypatch.setattr(remote_records, "_PAUSE_S", 0.05)
    match = r"embedding server [01] of 2 at .* does not answer within"
    with running(2, Hanging) as servers:
        servers.begin()
        records = short_waits(RemoteRecords(servers, 0, 10, records_like(1)))
        with pytest.raises(ServerLostError, match=match):
            records.read(np.arange(10), np.empty((10, 1), np.int64))
        records = short_waits(RemoteRecords(servers, 1, 10, records_like(1)))
        with pytest.raises(ServerLostError, match=match):
            write_until_refused(records)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, but does not answer
        places = (silent.getsockname(), servers.addresses[1])
        with pytest.raises(ServerLostError, match=rf"{match} 0\.5 s"):
            replace(servers, addresses=places, limit_s=0.5).begin()
    with socket.socket() as free:  # bound, but not listening
        free.bind(("127.0.0.1", 0))
        places = (free.getsockname(), servers.addresses[1])
        with pytest.raises(ServerLostError, match=rf"{match} 0\.5 s.*start it with"):
            replace(servers, addresses=places, limit_s=0.5).begin()


class Watched(EmbeddingServer):
    """Is accessible to a test as ``started[-1]``."""

    started: ClassVar[list[EmbeddingServer]] = []

    def __init__(self, secret, memory):
        super().__init__(secret, memory)
        self.started.append(self)


def test_a_new_session_frees_the_rows_and_closes_earlier_connections():
    every = np.arange(5 * MAX_ROWS)  # more than one request
    with running(1, Watched) as servers:
        servers.begin()
        old, writer = (RemoteRecords(servers, n, 5 * MAX_ROWS, records_like(1)) for n in range(2))
        old.write(every, np.ones((every.size, 1), np.int64))
        session = Watched.started[-1]._sessions[servers.session]
        rows, sockets = weakref.ref(session.blocks[0, 0].records), list(session.sockets)
        assert len(sockets) == 4
        replace(servers, session=bytes(15) + b"1").begin()
        wait_until(lambda: rows() is None, "the rows of the earlier session are kept")
        wait_until(lambda: all(s.fileno() < 0 for s in sockets), "a connection is open")
        with pytest.raises(ServerLostError, match="refused: it is serving another launch"):
            old.read(every, np.empty((every.size, 1), np.int64))
        with pytest.raises(ServerLostError, match="refused: it is serving another launch"):
            write_until_refused(writer, every.size)


def test_a_rank_that_hangs_keeps_neither_rows_nor_connections(monkeypatch):
    monkeypatch.setattr(server, "GREET_S", 3.0)
    request = struct.pack("<BxxxI", 1, MAX_ROWS) + np.arange(MAX_ROWS, dtype="<i4").tobytes()
    with running(1, Watched) as servers:
        servers.begin()
        with servers.connect(0, OPEN, num_rows=MAX_ROWS, record_bytes=1 << 13) as sock:
            sock.sendall(request)
            sock.recv(1)  # the server is sending a reply of 32 MB, which no buffer can hold
            session = Watched.started[-1]._sessions[servers.session]
            rows, (connection,) = weakref.ref(session.blocks[0, 0].records), session.sockets
            replace(servers, session=bytes(15) + b"1").begin()
            wait_until(lambda: rows() is None, "the rows are kept", limit_s=1.5)
            wait_until(lambda: connection.fileno() < 0, "the connection is open")


def test_a_server_at_two_addresses_is_refused():
    with running(1) as servers:
        twice = replace(servers, addresses=servers.addresses * 2)
        match = r"t: embedding server 1 of 2 .* also server 0, .*list each server once"
        with pytest.raises(ConfigError, match=match):
            twice.begin()
    with running(2) as servers:
        servers.begin()
        other = replace(servers, rank=1, addresses=servers.addresses[::-1])
        with pytest.raises(ConfigError, match=r"server 0 of 2 .* rank 0 reached it as server 1"):
            RemoteRecords(other, 0, 10, records_like(1))


def test_no_late_reply_is_read_as_other_rows(monkeypatch):
    def late(sock, kind, count, *, more=False):
        time.sleep(0.6 if more else 0)  # replies to reads come after the time limit
        server_protocol.send_header(sock, kind, count, more=more)

    monkeypatch.setattr(server, "send_header", late)
    with running(1) as servers:
        servers.begin()
        records = short_waits(RemoteRecords(servers, 0, 10, records_like(1)))
        records.write(np.arange(10), np.arange(10)[:, None])
        wait_until(lambda: not records._writes._writes, "the write is not confirmed")
        for row in (1, 2):
            with pytest.raises(ServerLostError, match="does not answer within"):
                records.read(np.array([row]), np.empty((1, 1), np.int64))
            time.sleep(0.6)


def test_a_rank_may_wait_for_another_server_before_it_reads_a_reply():
    limits = []

    class Limits(EmbeddingServer):
        def _answer(self, sock, purpose):
            limits.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
            super()._answer(sock, purpose)

    with running(1, Limits) as servers:
        servers.begin()
        records = RemoteRecords(servers, 0, 10, records_like(1))
        records.read(np.arange(10), np.empty((10, 1), np.int64))
    assert set(limits) == {0}  # none


def bad_messages() -> dict[str, bytes]:
    rows = np.arange(4, dtype="<i4")
    return {
        "request": struct.pack("<BxxxI", 7, 1),
        "no rows": struct.pack("<BxxxI", 1, 0),
        "too many rows": struct.pack("<BxxxI", 1, MAX_ROWS + 1),
        "row out of range": struct.pack("<BxxxI", 1, 4) + (rows + 7).tobytes(),
        "negative row": struct.pack("<BxxxI", 2, 4) + (rows - 1).tobytes() + bytes(32),
        "cut": struct.pack("<BxxxI", 2, 4) + rows.tobytes() + bytes(31),
        **{f"random {n}": random.Random(n).randbytes(200) for n in range(5)},
    }


def received(sock) -> bytes:
    """Return all bytes received until the server closes the connection."""
    found = b""
    with suppress(OSError):  # the server may have closed the connection already
        sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(1000):
            found += part
    return found


@pytest.mark.parametrize("name", bad_messages())
def test_malformed_requests_end_only_their_connection(name):
    with running(1) as servers:
        servers.begin()
        records = RemoteRecords(servers, 0, 10, records_like(1))
        records.write(np.arange(10), np.arange(10)[:, None])
        with servers.connect(0, OPEN, num_rows=10, record_bytes=8) as sock:
            sock.sendall(bad_messages()[name])
            assert received(sock) == b""
        with socket.create_connection(servers.addresses[0], 5) as sock:
            sock.sendall(bad_messages()[name])
            received(sock)
        out = np.empty((10, 1), np.int64)
        records.read(np.arange(10), out)
        assert (out[:, 0] == np.arange(10)).all()


def test_a_rank_never_connects_to_itself(monkeypatch):
    """A socket can connect to itself if nothing listens on the port and TCP assigns the same port
    to the socket.
    """
    with running(1) as servers:
        pass
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    connect = socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda to, limit: connect(to, limit, source_address=to)
    )
    with pytest.raises(ServerLostError, match="nothing listens"):
        replace(servers, addresses=(address,), limit_s=0.1).begin()

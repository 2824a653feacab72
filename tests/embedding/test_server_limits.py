"""Tests the limits of embedding servers: connections, threads, time, and sizes."""

import gc
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from sbpflow.embedding.cache import server
from sbpflow.embedding.cache.remote_records import RemoteRecords
from sbpflow.embedding.cache.server import EmbeddingServer
from sbpflow.embedding.cache.server_protocol import MAGIC
from sbpflow.errors import ConfigError, ServerLostError
from tests.embedding.test_servers import Watched, records_like, running, wait_until


def test_a_server_with_too_many_connections_says_so(monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    with running(1, Watched) as servers:
        servers.begin()
        records = RemoteRecords(servers, 0, 10, records_like(1))
        with pytest.raises(ConfigError, match=r"refused: it has 3 connections, the maximum"):
            RemoteRecords(servers, 1, 10, records_like(1))
        del records
        gc.collect()
        session = Watched.started[-1]._sessions[servers.session]
        wait_until(lambda: not session.sockets, "a closed connection is counted")
        RemoteRecords(servers, 2, 10, records_like(1))


def test_a_server_continues_after_it_could_not_start_a_thread(monkeypatch):
    start, failures = threading.Thread.start, iter([True])

    def start_later(thread):
        if next(failures, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    with running(1, Watched) as servers:
        monkeypatch.setattr(threading.Thread, "start", start_later)
        with pytest.raises(ServerLostError, match="closed the connection"):
            servers.begin()
        servers.begin()
        slots = Watched.started[-1]._slots
        wait_until(lambda: slots._value == slots._initial_value, "a slot is not released")


def test_a_handshake_has_one_time_limit(monkeypatch):
    monkeypatch.setattr(server, "GREET_S", 0.5)
    with running(1) as servers, socket.create_connection(servers.addresses[0], 0.1) as sock:
        start = time.monotonic()
        sock.recv(100)
        with suppress(ConnectionError):
            for byte in MAGIC * 5:
                sock.sendall(bytes([byte]))
                with suppress(TimeoutError):
                    if not sock.recv(100):
                        break
        assert time.monotonic() - start < 2.5


def test_all_servers_begin_within_one_time_limit():
    class Late(EmbeddingServer):
        def _begin(self, purpose):
            time.sleep(0.8)
            return super()._begin(purpose)

    with running(1, Late) as servers, socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = (*servers.addresses, silent.getsockname())
        start = time.monotonic()
        with pytest.raises(ServerLostError, match=r"server 1 of 2 .* not answer within 1\.2 s"):
            replace(servers, addresses=addresses, limit_s=1.2).begin()
        assert time.monotonic() - start < 1.8


def test_a_run_that_does_not_fit_is_refused_before_it_ends_the_earlier_run():
    with running(2, memory=1000) as servers:
        servers.begin([(125, 8), (124, 8)])
        old = RemoteRecords(servers, 0, 10, records_like(1))
        old.write(np.arange(10), np.ones((10, 1), np.int64))
        new = replace(servers, session=bytes(15) + b"1")
        with pytest.raises(ConfigError, match=r"limit is 0\.00 GB; use servers on"):
            new.begin([(125, 8), (126, 8)])
        old.read(np.arange(10), np.empty((10, 1), np.int64))
    match = r"t\.kind: a row .* 65,544 bytes on this rank, but servers store at most 65,536"
    with pytest.raises(ConfigError, match=match):
        RemoteRecords(servers, 0, 10, records_like(2**13 + 1))

"""Tests that a batch's memory is reused once its last view is gone, but not earlier."""

import threading

import numpy as np
import pytest
import torch

from sbpflow.config.schema import DataConfig
from sbpflow.data import load_manifest, open_loader
from sbpflow.data.format.manifest import write_manifest
from sbpflow.data.read.feeds import Buffers
from sbpflow.data.read.loaders import open_loaders
from sbpflow.errors import ConfigError
from tests.data.backends import BACKENDS
from tests.data.conftest import make_set


def address(array):
    return array.ctypes.data


def test_memory_is_reused_when_its_last_view_is_gone():
    buffers = Buffers()
    array = buffers.take(1000)
    first = address(array)
    view = torch.from_numpy(array)[10:20].view(2, 5)
    del array
    other = buffers.take(900)
    assert address(other) != first
    del view
    again = buffers.take(900)
    assert address(again) == first
    part = np.asarray(again)[3:7].reshape(2, 2)
    del again
    assert address(buffers.take(10)) != first
    del part, other
    held = [buffers.take(900) for _ in range(3)]
    assert first in map(address, held)


def test_buffers_that_are_too_small_stay_available():
    buffers = Buffers()
    small = buffers.take(10)
    first = address(small)
    del small
    large = buffers.take(1000)
    assert address(large) != first
    assert address(buffers.take(10)) in {first}


def test_views_may_end_in_any_thread_at_any_time():
    buffers, errors = Buffers(), []

    def work(number):
        try:
            for _ in range(2000):
                array = buffers.take(100 + number)
                array[:] = number
                view = torch.from_numpy(array)[5:]
                del array
                assert bool((view == number).all())
        except BaseException as error:  # noqa: BLE001  (reported by the test's own thread)
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_epoch_allocates_only_for_batches_in_flight(row_set, backend, monkeypatch):
    sizes = []
    real = np.empty

    def counted(shape, *args, **kwargs):
        if isinstance(shape, int) and shape > 500:
            sizes.append(shape)
        return real(shape, *args, **kwargs)

    loader = open_loader(row_set(9000), batch_size=100, backend=backend)
    monkeypatch.setattr("sbpflow.data.read.feeds.np.empty", counted)
    monkeypatch.setattr("sbpflow.data.read.blocks.BLOCK_BYTES", 0)
    batches = loader.epoch(0)
    num_batches = 0
    for _ in batches:
        num_batches += 1
    assert num_batches == 90
    assert 1 <= len(sizes) < 12  # DALI has up to 8 batches in flight


def test_training_needs_labels(tmp_path):
    manifest = make_set(tmp_path / "set", 100)
    content = {k: v for k, v in manifest.content.items() if k != "fingerprint"}
    write_manifest(manifest.path, {**content, "labelled": False})
    with pytest.raises(ConfigError, match=r"data.path: the rows in .* have no labels"):
        open_loaders(
            load_manifest(manifest.path), DataConfig(batch_size=8), 0, 1, seed=1,
            device=torch.device("cpu"),
        )  # fmt: skip

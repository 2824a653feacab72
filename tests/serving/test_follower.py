"""Tests which version a server uses when deltas and bundles appear, are damaged, or are
repaired.
"""

import errno
import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving_tools import Chain
from sbpflow.errors import DataError
from sbpflow.runtime.files.json_file import json_digest
from sbpflow.serving import follower as module
from sbpflow.serving.deltas import DeltaHead, DeltaWriter
from sbpflow.serving.follower import Follower
from sbpflow.serving.scorer import BundleError, load
from tests.serving.bundles import good_rows

LOAD = partial(load, check=True)


@pytest.fixture
def chain(exported, tmp_path) -> Chain:
    shutil.copytree(exported / "model", tmp_path / "step-5")
    os.utime(tmp_path / "step-5" / "model.json", (1e9, 1e9))  # before the deltas
    return Chain(tmp_path / "step-5", load(tmp_path / "step-5"))


def following(folder: Path) -> tuple[Follower, list[str]]:
    events: list[str] = []
    follower = Follower(folder, LOAD)
    follower.count = events.append
    return follower, events


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def same(follower: Follower, chain: Chain) -> bool:
    rows = [
        {column.name: row[column.name] for column in chain.model.columns if column.required}
        for row in good_rows(20, 3)
    ]
    found, wanted = follower.version.model.score(rows), chain.model.score(rows)
    return np.array_equal(found, wanted) and follower.version.model.version == chain.model.version


def test_deltas_are_applied_one_by_one_and_at_the_start(chain):
    follower, events = following(chain.bundle.parent)
    assert not follower.poll()
    for seed in range(3):
        chain.write(seed)
        assert follower.poll()
        assert same(follower, chain)
        assert not follower.poll()
    assert events == ["deltas_applied"] * 3
    assert same(following(chain.bundle)[0], chain)


def test_a_damaged_delta_is_rejected_once_and_applied_after_its_repair(chain):
    follower, events = following(chain.bundle)
    old = follower.version
    chain.write(1)
    values = chain.bundle / "deltas" / "000001" / "values.safetensors"
    flip(values)
    assert [follower.poll(), follower.poll()] == [False, False]
    assert events == ["delta_errors", "reloads"]
    assert follower.version is old
    flip(values)
    assert follower.poll()
    assert same(follower, chain)


def test_a_damaged_delta_that_arrives_during_a_poll_is_rejected_once(chain, monkeypatch):
    follower, events = following(chain.bundle)
    look, seeds = follower._other_bundle, [1]

    def arrives():
        if seeds:
            chain.write(seeds.pop())
            flip(chain.bundle / "deltas" / "000001" / "values.safetensors")
        return look()

    monkeypatch.setattr(follower, "_other_bundle", arrives)
    assert [follower.poll() for _ in range(3)] == [False] * 3
    assert events == ["delta_errors", "reloads"]


def test_a_delta_that_arrives_when_it_is_read_is_applied_once(chain, monkeypatch):
    follower, events = following(chain.bundle)
    read, seeds = module.read_delta, [1]

    def arrives(*args, **kwargs):
        if seeds:
            chain.write(seeds.pop())
        return read(*args, **kwargs)

    monkeypatch.setattr(module, "read_delta", arrives)
    assert [follower.poll() for _ in range(3)] == [True, False, False]
    assert events == ["deltas_applied"]
    assert same(follower, chain)


def test_a_delta_is_read_again_after_an_error_that_may_pass(chain, monkeypatch):
    follower, events = following(chain.bundle)
    chain.write(1)

    def fails(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", fails)
        assert [follower.poll(), follower.poll()] == [False, False]
    assert set(events) == {"delta_errors"}
    assert follower.poll()
    assert same(follower, chain)


def test_a_missing_delta_is_a_gap(chain, caplog):
    follower, events = following(chain.bundle)
    old = follower.version
    chain.write(1)
    chain.write(2)
    (chain.bundle / "deltas" / "000001").rename(chain.bundle / "hidden")
    assert [follower.poll(), follower.poll()] == [False, False]
    assert "000001 is missing, but later deltas exist" in caplog.text
    assert events == ["delta_errors", "reloads"]
    assert follower.version is old
    (chain.bundle / "hidden").rename(chain.bundle / "deltas" / "000001")
    assert [follower.poll(), follower.poll(), follower.poll()] == [True, True, False]
    assert same(follower, chain)


def test_a_rewritten_chain_is_loaded_from_its_base(chain):
    chain.write(1)
    follower, events = following(chain.bundle)
    shutil.rmtree(chain.bundle / "deltas")
    anew = Chain(chain.bundle, load(chain.bundle))
    anew.write(7)
    anew.write(8)  # its predecessor is not the applied delta
    assert follower.poll()
    assert events[0] == "delta_errors"
    assert same(follower, anew)


def test_a_delta_that_is_written_again_after_it_was_applied_is_used(chain):
    chain.write(1)
    follower, events = following(chain.bundle)
    anew = Chain(chain.bundle, load(chain.bundle))
    anew.write(7)  # the export found the first delta damaged
    delta = chain.bundle / "deltas" / "000001" / "delta.json"
    tree = json.loads(delta.read_text())
    tree["content"]["time"] += 100
    tree["sha256"] = json_digest(tree["content"])
    delta.write_text(json.dumps(tree))
    assert [follower.poll(), follower.poll()] == [True, False]
    assert same(follower, anew)
    assert events == ["delta_errors", "deltas_applied", "reloads"]
    os.utime(delta, (2e9, 2e9))  # the same delta, as after a copy of the folder
    assert [follower.poll(), follower.poll()] == [False, False]
    assert same(follower, anew)


def test_a_newer_bundle_replaces_the_chain_and_a_damaged_one_does_not(chain, exported):
    follower, events = following(chain.bundle.parent)
    chain.write(1)
    assert follower.poll()
    bad = chain.bundle.parent / "step-8"
    shutil.copytree(exported / "model", bad)
    sample = json.loads((bad / "sample.json").read_text())
    sample["scores"][0] += 0.1
    (bad / "sample.json").write_text(json.dumps(sample))
    assert [follower.poll(), follower.poll()] == [False, False]
    assert events == ["deltas_applied", "delta_errors"]
    assert same(follower, chain)
    good = chain.bundle.parent / "step-9"
    shutil.copytree(exported / "model", good)
    assert follower.poll()
    assert same(follower, Chain(good, load(good)))


def test_deltas_are_applied_while_the_newest_bundle_is_damaged(chain, exported):
    """A replacement worker starts with the version that the supervisor loaded."""
    chain.write(1)
    follower, events = following(chain.bundle.parent)
    chain.write(2)
    chain.write(3)
    newer = chain.bundle.with_name("step-6")
    shutil.copytree(exported / "model", newer)
    flip(newer / "model.safetensors")
    assert [follower.poll(), follower.poll(), follower.poll()] == [True, True, False]
    assert same(follower, chain)
    assert events == ["delta_errors", "deltas_applied", "deltas_applied"]


def test_a_delta_with_other_shapes_is_refused_once_also_at_the_start(chain, caplog):
    follower, events = following(chain.bundle)
    name, value = next((n, v) for n, v in chain.model.weights.items() if v.numel() > 1)
    value = value.reshape(-1)[:-1]
    head = DeltaHead(number=1, base=chain.base, previous=chain.base, run="r", step=6, time=2e9)
    writer = DeltaWriter(chain.bundle, head, {f"dense/{name}": (value.dtype, (len(value),))})
    writer.append(f"dense/{name}", value)
    writer.close()
    assert [follower.poll() for _ in range(3)] == [False] * 3
    assert events == ["delta_errors", "reloads"]
    assert "000001 cannot be applied (dense: " in caplog.text
    assert "must have the shape" in caplog.text
    assert following(chain.bundle)[0].version.number == 0


@pytest.mark.parametrize("name", ["model", "vocabulary"])
def test_a_bundle_with_damaged_values_is_refused(chain, name):
    file = chain.bundle / f"{name}.safetensors"
    flip(file)
    with pytest.raises(BundleError, match=rf"{name}\.safetensors is damaged; export the run again"):
        load(chain.bundle)
    load(chain.bundle, check=False)


@pytest.mark.parametrize("step", [5, 9])
def test_a_bundle_may_be_replaced_while_a_server_starts(chain, exported, step):
    new, folders = chain.bundle.with_name(f"step-{step}"), []

    def load_slowly(folder: Path):
        folders.append(folder)
        if len(folders) == 1:  # an export completes a new bundle and removes the old one
            shutil.rmtree(folder)
            shutil.copytree(exported / "model", new)
            return LOAD(folder / "removed")
        return LOAD(folder)

    assert Follower(chain.bundle.parent, load_slowly).version.bundle == new
    assert folders == [chain.bundle, new]
    flip(new / "model.safetensors")
    with pytest.raises(BundleError, match="is damaged"):
        Follower(chain.bundle.parent, LOAD)


def test_a_newer_bundle_is_read_again_when_its_values_are_repaired(chain, exported):
    follower, events = following(chain.bundle.parent)
    new = chain.bundle.parent / "step-9"
    shutil.copytree(exported / "model", new)
    values = new / "model.safetensors"
    good = values.read_bytes()
    for size in (0, len(good) // 2):  # as if a copy of the bundle were under way
        values.write_bytes(good[:size])
        assert [follower.poll(), follower.poll()] == [False, False]
    assert events == ["delta_errors"] * 2
    values.write_bytes(good)
    assert follower.poll()
    assert follower.version.bundle == new


def test_a_folder_that_disappears_is_reported_once(chain):
    follower, events = following(chain.bundle)
    version = follower.version
    chain.bundle.rename(chain.bundle.parent / "hidden")
    assert [follower.poll() for _ in range(3)] == [False] * 3
    assert events == ["delta_errors"] * 2  # for the next delta, and for the bundle
    assert not follower.poll_for_bundle()
    assert follower.version is version


def test_only_bundles_are_looked_for_between_requests(chain, exported):
    follower, events = following(chain.bundle.parent)
    chain.write(1)
    assert not follower.poll_for_bundle()
    assert follower.version.number == 0
    shutil.copytree(exported / "model", chain.bundle.parent / "step-9")
    assert follower.poll_for_bundle()
    assert follower.version.bundle.name == "step-9"
    assert events == ["reloads"]


def test_a_delta_whose_scores_are_not_finite_is_refused(chain, caplog):
    follower, events = following(chain.bundle)
    chain.write(1, noise=float("nan"))
    assert not follower.poll()
    assert events[0] == "delta_errors"
    assert "000001: the score of a sample row is nan" in caplog.text
    assert np.isfinite(follower.version.model.score(follower.version.model.sample["rows"])).all()


def test_a_folder_without_a_bundle_is_refused(tmp_path):
    with pytest.raises(DataError, match="use the output of `sbpflow export`"):
        Follower(tmp_path, LOAD)

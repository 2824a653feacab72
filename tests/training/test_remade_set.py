"""Tests that an interrupted run resumes on any data set with the same rows, even if its files
differ.
"""

import pytest

from sbpflow.data.__main__ import main as data
from sbpflow.errors import ConfigError
from sbpflow.run.saved import checkpoints, resume
from sbpflow.training.trainer import Trainer
from tests.data.rows import run_prepare
from tests.training.test_resume import Interrupted, events, interrupt, run

MORE = ("train.epochs=1", "model.wide.crosses=[]")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Return a folder with two sets that have the same rows, ``one`` and ``two``, and a set with
    different rows, ``other``.
    """
    folder = tmp_path_factory.mktemp("sets")
    words = ["synth", "--format", "tsv", "--rows", "6000", "--vocab-scale", "0.0005"]
    assert data([*words, "--output", str(folder / "rows.tsv")]) == 0
    text = (folder / "rows.tsv").read_bytes()
    (folder / "day.txt").write_bytes(text)
    swapped = text.split(b"\n", 2)
    (folder / "other.tsv").write_bytes(b"\n".join([swapped[1], swapped[0], swapped[2]]))
    for name, source, size in (
        ("one", "rows.tsv", 1 << 25), ("two", "day.txt", 1 << 17), ("other", "other.tsv", 1 << 25)
    ):  # fmt: skip
        run_prepare(folder / name, folder / source, piece_bytes=size, crosses=())
    return folder


@pytest.fixture(scope="module")
def whole(sets, tmp_path_factory):
    """Return the events of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(sets / "one", folder, *MORE) == 0
    return events(folder)


def stopped(sets, folder, monkeypatch):
    """Start a run on the set ``one``, and kill it before its ninth step."""
    with monkeypatch.context() as patch:
        interrupt(patch, 8)
        with pytest.raises(Interrupted):
            run(sets / "one", folder, *MORE)


def as_earlier_versions_saved(monkeypatch):
    """Replace content IDs with fingerprints, as in older manifests."""
    facts, documents = resume.relevant_facts, checkpoints.Checkpoints._documents

    def old_facts(config, data, start):
        return {**facts(config, data, start), "the set in data.path": data.fingerprint[:16]}

    def old_documents(self, batch, loop):
        saved = documents(self, batch, loop)
        for key in ("data", "cursor"):
            assert saved[key].pop("content_id")
        return saved

    monkeypatch.setattr(checkpoints, "relevant_facts", old_facts)
    monkeypatch.setattr(checkpoints.Checkpoints, "_documents", old_documents)


@pytest.mark.slow
def test_the_same_rows_from_other_files_are_the_same_set(sets, whole, tmp_path, monkeypatch):
    stopped(sets, tmp_path, monkeypatch)
    assert run(sets / "two", tmp_path, *MORE) == 0
    assert events(tmp_path) == whole


def test_other_rows_are_refused(sets, tmp_path, monkeypatch):
    stopped(sets, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"the set in data\.path was [0-9a-f]{16} and is"):
        run(sets / "other", tmp_path, *MORE)


def test_runs_of_earlier_versions_resume_only_on_their_data(sets, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        as_earlier_versions_saved(patch)
        stopped(sets, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"the set in data\.path was [0-9a-f]{16} and is"):
        run(sets / "two", tmp_path, *MORE)
    steps = []
    real = Trainer.step

    def counted(self, batches):
        steps.append(self.num_steps)
        return real(self, batches)

    monkeypatch.setattr(Trainer, "step", counted)
    assert run(sets / "one", tmp_path, *MORE) == 0
    assert steps[0] == 8  # the run continues from its checkpoint
    assert events(tmp_path) == whole

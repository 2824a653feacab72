"""Tests that training resumes on a grown data set, using only commands."""

import pytest
import torch

from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.commands import train
from sbpflow.data import fields_of
from sbpflow.data.__main__ import main as data
from sbpflow.data.format.manifest import load_manifest
from sbpflow.errors import ConfigError
from sbpflow.training.trainer import Trainer
from tests.training.test_resume import CONFIG


def prepare(folder, name, inputs, *more):
    texts = [str(folder / f"{stem}.tsv") for stem in inputs]
    words = ["prepare", "--input", *texts, "--output", str(folder / name), "--workers", "1", *more]
    assert data(words) == 0
    return folder / name


def trained(folder, name, data_path, *more):
    """Train with the additional arguments ``more``; return the newest checkpoint."""
    words = [f"data.path={data_path}", f"run.dir={folder / name}", "model.hidden=[8]"]
    words += ["data.batch_size=100", "data.loader=memmap", "optimizer.sparse.name=lazy_adam"]
    assert train.main(["--config", CONFIG, *words, "train.eval_every=0", *more]) == 0
    return open_checkpoint(
        max((folder / name / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    )


def watch_ids(monkeypatch):
    """Record the ids ([rows, columns]) of every batch used for training from now on."""
    seen, real = [], Trainer.step

    def step(self, batches):
        seen.extend(batch.ids.clone() for batch in batches)
        return real(self, batches)

    monkeypatch.setattr(Trainer, "step", step)
    return seen


@pytest.mark.slow
def test_runs_resume_on_a_grown_data_set(tmp_path, monkeypatch):
    for seed, name in ((7, "old"), (8, "new"), (9, "foreign")):
        words = ["--format", "tsv", "--rows", "600", "--vocab-scale", "0.0005"]
        words += ["--seed", str(seed), "--output", str(tmp_path / f"{name}.tsv")]
        assert data(["synth", *words]) == 0
    small = prepare(tmp_path, "small", ["old"])
    big = prepare(tmp_path, "big", ["old", "new"], "--like", str(small), "--grow")
    before = trained(tmp_path, "first", small, "train.epochs=1")
    resume = f"checkpoint.resume={before.path}"
    # The first step over the grown set has the same batch in the resumed run as in a new run.
    after = trained(tmp_path, "second", big, resume, "train.max_steps=1")
    with monkeypatch.context() as patch:
        seen = watch_ids(patch)
        fresh = trained(tmp_path, "anew", big, "train.max_steps=1")
    first_ids, columns = seen[0], [field.name for field in fields_of(load_manifest(big)).ids]
    assert (after.step, fresh.step) == (before.step + 1, 1)
    assert after.documents["cursor"] == fresh.documents["cursor"], "the read begins anew"
    grown = 0
    for name in [name for name in before.tensors if name.startswith("tables/")]:
        field = name.split("/")[1].partition(".")[2]
        idle = torch.ones(fresh.tensors[name].shape[0], dtype=torch.bool)
        idle[first_ids[:, columns.index(field)].long()] = False
        rows = before.tensors[name].shape[0]
        now, start = after.tensor(name), fresh.tensor(name)
        assert torch.equal(now[:rows][idle[:rows]], before.tensor(name)[idle[:rows]]), name
        assert torch.equal(now[rows:][idle[rows:]], start[rows:][idle[rows:]]), name
        grown += name.count("/") == 1 and now.shape[0] - rows
    assert grown > 100
    assert any(len(ancestor.rows) for ancestor in load_manifest(big).ancestors)

    foreign = prepare(tmp_path, "other", ["foreign"])
    with pytest.raises(ConfigError, match=r"vocabulary differs .* --like OLD --grow"):
        trained(tmp_path, "third", foreign, resume)

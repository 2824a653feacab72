"""Tests that a chain of deltas contains the same values as full checkpoints, in any layout."""

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.reshard import Case, Lying, make_job, make_rows
from sbpflow.checkpoint import read as reading
from sbpflow.checkpoint.folder import keep_only, list_checkpoints, needed_by
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.write import PieceWriter
from sbpflow.commands.checkpoint import checkpoint
from sbpflow.errors import CheckpointError
from sbpflow.run.saved.save import Saver
from sbpflow.runtime.files.run_folder import LOCK_FILE
from sbpflow.runtime.ranks.world import World

STEPS, DELTAS = 8, 3
NUMBERS = [None, 1, 2, 3, None, 1, 2, 3]  # delta numbers at steps 1 to 8; None: full
CASES = [
    Case(Lying(1, "3"), Lying(2, "mixed"), "lazy_adam"),
    Case(Lying(2, "mixed"), Lying(1, "dp"), "rowwise_adagrad"),
    Case(Lying(2, "dp"), Lying(2, "1"), "ftrl", half=True),
    Case(Lying(4, "mixed"), Lying(2, "2"), "lazy_adam", model="module"),
]


def saved_in(folder: Path, case: Case) -> Path:
    return folder / f"{case.saved.size}-{case.saved.scheme}"


def save_both(world: World, folder: Path):
    """Save full checkpoints and deltas at the same steps; the deltas are written while training
    continues.
    """
    for case in CASES:
        if case.saved.size != world.size:
            continue
        job, own = make_job(world, case, case.saved), saved_in(folder, case)
        facts = {"run": "r", "deadline_s": 30, "stores": job.embeddings.stores}
        for name in ("full", "deltas"):
            (own / name).mkdir(parents=True, exist_ok=True)
        full = Saver(own / "full", job.boxing, job.state, **facts)
        chain = Saver(own / "deltas", job.boxing, job.state, num_deltas=DELTAS, **facts)
        for step in range(1, STEPS + 1):
            job.trainer.step(make_rows(step, world.rank, world.size))
            full.save(step, {})
            if step % 2:
                chain.start(step, {})
            else:
                chain.save(step, {})
        chain.wait()
        chain.close()


def restore_both(world: World, folder: Path) -> list[str]:
    """Return the names of tensors that differ between restoring a full checkpoint and restoring a
    chain.
    """
    differ = []
    for case in CASES:
        if case.loaded.size != world.size:
            continue
        states = []
        for name in ("full", "deltas"):
            job = make_job(world, case, case.loaded)
            job.restore(open_checkpoint(saved_in(folder, case) / name / "step-8"))
            states.append(job.state())
        for name, tensor in states[0].items():
            for one, two in zip(tensor.rectangles, states[1][name].rectangles, strict=True):
                if not torch.equal(one.values, two.values):
                    differ.append(f"{case}: {name}")
    return differ


def test_a_chain_of_deltas_has_the_content_of_full_checkpoints(ranks, memory):
    for size in (1, 2, 4):
        ranks(size, save_both, memory)
    for case in CASES:
        own, numbers = saved_in(memory, case), []
        for step in range(1, STEPS + 1):
            full = open_checkpoint(own / "full" / f"step-{step}")
            delta = open_checkpoint(own / "deltas" / f"step-{step}")
            numbers.append(delta.previous and delta.previous.number)
            assert list(delta.tensors) == list(full.tensors)
            for name, saved in full.tensors.items():
                assert delta.saved(name).dtype == saved.dtype
                assert torch.equal(delta.tensor(name), full.tensor(name)), (case, step, name)
            # Read a part of a tensor: some of its rows and, if it has several columns, some of its
            # columns.
            whole = full.tensor("tables/deep.C3")
            part = delta.tensor("tables/deep.C3", slice(7, 50), slice(1, 4))
            assert torch.equal(part, whole[7:50, 1:4])
            delta.verify()
            if delta.previous is not None:
                rows = delta.changed_rows("tables/deep.C3")
                assert 0 < len(rows) < whole.shape[0]
                before = open_checkpoint(own / "full" / f"step-{step - 1}")
                changed = (before.tensor("tables/deep.C3") != whole).any(1).nonzero().squeeze(1)
                assert set(changed.tolist()) <= set(rows.tolist())
        assert numbers == NUMBERS
    for size in (1, 2):
        assert ranks(size, restore_both, memory) == [[]] * size


@pytest.fixture
def folder(ranks, memory) -> Path:
    """Return checkpoints of steps 1 to 8: a full one and three deltas, twice."""
    ranks(1, save_both, memory)
    return saved_in(memory, CASES[0])


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def test_compacting_a_chain_gives_the_bytes_of_a_full_checkpoint(folder, capsys):
    chain, full = folder / "deltas", folder / "full"
    with pytest.raises(CheckpointError, match="the delta step-8 depends on it"):
        checkpoint(["compact", str(chain / "step-7")])
    assert checkpoint(["compact", str(chain)]) == 0
    assert "step-8 is now a full checkpoint" in capsys.readouterr().out
    files = [path / "step-8" / "rank-0.bin" for path in (chain, full)]
    assert files[0].read_bytes() == files[1].read_bytes()
    one, two = (open_checkpoint(path / "step-8").index for path in (chain, full))
    assert one == two
    assert checkpoint(["compact", str(chain)]) == 0
    assert "is already a full checkpoint" in capsys.readouterr().out
    assert checkpoint(["prune", str(chain), "--keep", "1"]) == 0
    assert names(chain) == ["step-8"]


def test_the_current_folder_may_be_the_checkpoint(folder, monkeypatch):
    chain = (folder / "deltas").resolve()
    monkeypatch.chdir(chain / "step-8")
    assert open_checkpoint(".").path == chain / "step-8"
    (inside := chain / "step-8" / "inside").mkdir()
    monkeypatch.chdir(inside)
    assert open_checkpoint("..").path == chain / "step-8"
    monkeypatch.chdir(chain / "step-8")
    inside.rmdir()
    assert checkpoint(["compact", "."]) == 0
    assert open_checkpoint(chain / "step-8").previous is None
    assert {path.name for path in (chain / "step-8").iterdir()} == {"index.json", "rank-0.bin"}


def test_a_failed_compaction_leaves_no_files(folder, monkeypatch):
    chain = folder / "deltas"
    before = sorted(path.name for path in chain.iterdir())

    def full(self, data):
        raise CheckpointError("rank-0.bin cannot be written (no space left on device)")

    monkeypatch.setattr(PieceWriter, "write", full)
    with pytest.raises(CheckpointError, match="no space left"):
        checkpoint(["compact", str(chain)])
    assert sorted({path.name for path in chain.iterdir()} - {LOCK_FILE}) == before
    assert open_checkpoint(chain / "step-8").previous is not None


def test_ls_and_verify_support_deltas(folder, capsys):
    chain = folder / "deltas"
    assert checkpoint(["ls", str(chain)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert "delta 3 after step-7" in lines[0]
    assert "delta" not in lines[3]
    assert checkpoint(["verify", str(chain)]) == 0
    file = chain / "step-5" / "rank-0.bin"
    raw = bytearray(file.read_bytes())
    raw[100] ^= 1
    file.write_bytes(bytes(raw))
    capsys.readouterr()
    assert checkpoint(["verify", str(chain)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["DAMAGED"] * 4 + ["ok"] * 4
    assert "step-8 is a delta, and a checkpoint that it needs is damaged" in lines[0]
    assert checkpoint(["prune", str(chain), "--keep", "1"]) == 0
    assert names(chain) == ["step-8", "step-7", "step-6", "step-5", *names(chain)[4:]]
    assert names(chain)[4:] == ["step-4", "step-3", "step-2", "step-1"], "step-4 needs the others"


def test_checkpoints_needed_by_a_kept_delta_are_kept(folder):
    chain = folder / "deltas"
    keep_only(chain, newest=2, step=8, and_step=None)
    assert names(chain) == ["step-8", "step-7", "step-6", "step-5"]
    assert {path.name for path in needed_by([chain / "step-6"])} == {"step-6", "step-5"}
    open_checkpoint(chain / "step-8").verify()


def test_indexes_of_a_chain_are_read_only_once(folder, monkeypatch):
    """Otherwise, the time of a save, and of each look for a new checkpoint, would grow with the
    length of the chain, and that of ``checkpoint verify`` with its cube.
    """
    chain, read, real = folder / "deltas", [], reading.from_json

    def from_json(text, file):
        read.append(file.parent.name)
        return real(text, file)

    monkeypatch.setattr(reading, "from_json", from_json)
    assert checkpoint(["ls", str(chain)]) == 0
    assert len(read) <= 2 * STEPS
    read.clear()
    assert checkpoint(["verify", str(chain)]) == 0
    assert len(read) <= 3 * STEPS
    known = {}
    open_checkpoint(chain / "step-7", known)
    read.clear()
    keep_only(chain, newest=1, step=8, and_step=None, known=known)
    assert read == ["step-8", "step-7"]
    assert sorted(index.step for index in known.values()) == [5, 6, 7]
    assert names(chain) == ["step-8", "step-7", "step-6", "step-5"]


def test_the_chain_of_the_best_delta_is_kept(folder):
    chain = folder / "deltas"
    keep_only(chain, newest=1, step=8, and_step=3)
    assert names(chain) == [f"step-{step}" for step in (8, 7, 6, 5, 3, 2, 1)]


def test_a_delta_without_its_predecessor_is_refused(folder):
    chain = folder / "deltas"
    shutil.copytree(folder / "full" / "step-6", chain / "other")
    shutil.rmtree(chain / "step-6")
    with pytest.raises(CheckpointError, match=r"step-7 is a delta that needs .*step-6"):
        open_checkpoint(chain / "step-7")
    (chain / "other").rename(chain / "step-6")
    with pytest.raises(
        CheckpointError, match=r"step-7 is a delta, but .* is not the checkpoint that it continues"
    ):
        open_checkpoint(chain / "step-7")


def test_flipped_bits_of_a_delta_load_no_wrong_value(folder):
    chain = folder / "deltas"
    right = {name: open_checkpoint(chain / "step-8").tensor(name) for name in ("tables/deep.C1",)}
    for file in ("rank-0.bin", "index.json"):
        path = chain / "step-7" / file
        whole = path.read_bytes()
        noticed = 0
        for place in range(0, len(whole), len(whole) // 60):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            try:
                delta = open_checkpoint(chain / "step-8")
                found = {name: delta.tensor(name) for name in right}
            except CheckpointError:
                noticed += 1
                continue
            assert all(torch.equal(found[name], right[name]) for name in right)
        assert noticed > (50 if file == "index.json" else 0)
        path.write_bytes(whole)

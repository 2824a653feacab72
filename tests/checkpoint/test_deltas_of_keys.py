"""Tests that deltas of growing tables contain the same values as full checkpoints, in any
layout.
"""

import gc
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from sbpflow.checkpoint import keys
from sbpflow.checkpoint.folder import list_checkpoints
from sbpflow.checkpoint.format import Previous, digest_of, from_json, to_json
from sbpflow.checkpoint.keys import key_changes, read_rows
from sbpflow.checkpoint.read import Checkpoint, open_checkpoint
from sbpflow.commands.checkpoint import checkpoint
from sbpflow.embedding.cache.factory import stores_of
from sbpflow.embedding.plan.growth import MIN_ROWS, Eviction, Growth
from sbpflow.embedding.plan.row_storage import RowStorage, StorageRule
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.state import read_values
from sbpflow.errors import CheckpointError
from sbpflow.runtime.ranks.world import World
from tests.embedding.cases import Spec
from tests.embedding.growing_case import GrowingCase, Run
from tests.quick import quick

pytest.importorskip("numba", reason="growing tables need numba")
EVERY, DELTAS = 2, 3
LRU = Growth(
    evict=Eviction(max_rows=MIN_ROWS, idle_samples=150), admit_count=2, forget_after_samples=100
)
LFU = replace(LRU, evict=Eviction(max_rows=MIN_ROWS, idle_samples=100, policy="lfu"))
UNIQUE, REDUCE = Spec("S(0)", "unique"), Spec("S(0)", "reduce")
COLUMNS = Spec("S(1)", "columns")


@dataclass(frozen=True)
class Stage:
    """Part of a run: its ranks, layouts of the deep and wide tables, and last batch."""

    size: int
    deep: Spec
    wide: Spec
    stop: int


# Every stage except the first resumes from the last checkpoint of the previous stage.
CHAINS = {
    "rows": (
        GrowingCase(growth=LRU, optimizer=sparse_optimizer("lazy_adam", lr=0.05), ahead=3),
        [Stage(1, UNIQUE, UNIQUE, 16), Stage(4, UNIQUE, REDUCE, 22), Stage(2, REDUCE, UNIQUE, 30)],
    ),
    "columns": (
        GrowingCase(
            growth=LFU, optimizer=sparse_optimizer("rowwise_adagrad", lr=0.05), ahead=2,
            row_dtype=torch.bfloat16, dtype=torch.float32, kernel="numba",
        ),
        [Stage(4, COLUMNS, UNIQUE, 14), Stage(2, COLUMNS, REDUCE, 22),
         Stage(2, UNIQUE, UNIQUE, 30)],
    ),
    "ranks": (
        GrowingCase(growth=LRU, optimizer=sparse_optimizer("ftrl", lr=0.05), ragged=True, ahead=4),
        [Stage(2, COLUMNS, Spec("S(0)", "reduce", ranks=(1,)), 16), Stage(1, UNIQUE, UNIQUE, 30)],
    ),
    "cache": (
        GrowingCase(
            growth=LRU, storage=RowStorage(kind="host", share=0.004, key="parallel.storage.deep")
        ),
        [Stage(1, UNIQUE, UNIQUE, 14), Stage(1, UNIQUE, UNIQUE, 22)],
    ),
}  # fmt: skip


def train(world: World, case: GrowingCase, folder: Path, start: int, stage: Stage) -> None:
    """Train one stage, and save full checkpoints and deltas at the same steps."""
    case = replace(case, deep=stage.deep, wide=stage.wide, batches=stage.stop)
    rule = StorageRule(kind="file", path=folder / "rows")
    run = Run(world, case, stores=stores_of(lambda key: rule, world.device))
    facts = {"num_deltas": DELTAS}
    if start:
        path = folder / "deltas" / f"step-{start}"
        run.restore(path, start)
        saved = open_checkpoint(path)
        number = 1 if saved.previous is None else saved.previous.number + 1
        facts["previous"] = Previous(step=start, sha256=digest_of(saved.index), number=number)
    full = run.saver(folder / "full")
    chain = run.saver(folder / "deltas", **facts)
    for step in range(start + EVERY, stage.stop + 1, EVERY):
        run.train(step)
        run.announce()  # batches are in flight during the save
        full.save(step, {})
        if step % 4:
            chain.start(step, {})
        else:
            chain.save(step, {})
    chain.wait()
    chain.close()
    run.drain()


def trained(ranks, name: str, folder: Path) -> Path:
    case, stages = CHAINS[name]
    for part in ("full", "deltas", "rows"):
        (folder / part).mkdir(parents=True)
    start = 0
    for stage in stages:
        ranks(stage.size, train, case, folder, start, stage)
        start = stage.stop
    return folder


def check_equal(one: Checkpoint, other: Checkpoint) -> None:
    assert list(one.tensors) == list(other.tensors)
    for name, saved in one.tensors.items():
        assert (saved.shape, saved.keys) == (other.saved(name).shape, other.saved(name).keys)
        assert torch.equal(one.tensor(name), other.tensor(name)), (one.path, name)


def check_changes(delta: Checkpoint, now: Checkpoint, before: Checkpoint) -> dict[str, int]:
    """Check how table deep.f changed from ``before`` to ``now``; return how many rows changed in
    each way.
    """
    members = [delta]
    while members[0].before.step > before.step:
        members.insert(0, members[0].before)
    changes = key_changes(members, "deep.f")
    keys, old = (each.tensor("vocabularies/f/keys").tolist() for each in (now, before))
    rows, old_rows = (each.tensor("tables/deep.f") for each in (now, before))
    assert set(changes.removed.tolist()) == set(old) - set(keys)
    named = [None if row == 0 else keys[row - 1] for row in changes.rows.tolist()]
    added = {key for key, is_added in zip(named, changes.is_added, strict=True) if is_added}
    assert added == set(keys) - set(old)
    places = {key: place for place, key in enumerate([None, *old])}
    differ = {
        key
        for row, key in zip(rows, [None, *keys], strict=True)
        if key not in places or not torch.equal(row, old_rows[places[key]])
    }
    assert differ <= set(named)
    return {"removed": len(changes.removed), "added": len(added), "kept": len(keys) - len(added)}


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Return a function that trains each chain only at its first call."""
    made: dict[str, Path] = {}

    def result(ranks, name: str) -> Path:
        if name not in made:
            made[name] = trained(ranks, name, tmp_path_factory.mktemp(name))
        return made[name]

    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(CHAINS, lambda n: n == 0))
def test_a_chain_of_deltas_has_the_content_of_full_checkpoints(ranks, chain, name):
    folder, numbers, before, totals = chain(ranks, name), [], None, {}
    num_steps = CHAINS[name][1][-1].stop
    for step in range(EVERY, num_steps + 1, EVERY):
        full = open_checkpoint(folder / "full" / f"step-{step}")
        delta = open_checkpoint(folder / "deltas" / f"step-{step}")
        numbers.append(delta.previous.number if delta.previous else 0)
        check_equal(delta, full)
        delta.verify()
        for table in ("tables/deep.f", "tables/wide.g"):
            whole = full.tensor(table)
            part = delta.tensor(table, slice(3, 21), slice(0, 5))
            assert torch.equal(part, whole[3:21, :5])
            assert delta.tensor(table, slice(5, 5)).shape == (0, whole.shape[1])
        if delta.previous is not None:
            assert (
                0 < len(delta.changed_rows("tables/deep.f")) < full.saved("tables/deep.f").shape[0]
            )
            for kind, number in check_changes(delta, full, before).items():
                totals[kind] = totals.get(kind, 0) + number
            base = open_checkpoint(folder / "full" / f"step-{step - EVERY * numbers[-1]}")
            check_changes(delta, full, base)
        before = full
    assert numbers == [number % (DELTAS + 1) for number in range(num_steps // EVERY)]
    assert min(totals.values()) > 10, totals


def differences(world: World, folder: Path, case: GrowingCase, step: int) -> list[str]:
    """Return the names of tensors that differ between restoring a full checkpoint and restoring a
    delta.
    """
    states = []
    for name in ("full", "deltas"):
        run = Run(world, case)
        run.restore(folder / name / f"step-{step}", step)
        states.append(run.collection.state())
    return [
        name
        for name, tensor in states[0].items()
        for one, other in zip(tensor.rectangles, states[1][name].rectangles, strict=True)
        if not torch.equal(read_values(one.values), read_values(other.values))
    ]


@pytest.fixture
def folder(ranks, chain, memory) -> Path:
    """Return a copy of a growing model's full checkpoints and deltas at steps 2, 4, ..., 30."""
    return shutil.copytree(chain(ranks, "rows"), memory / "copy")


@pytest.mark.few(1)
@pytest.mark.parametrize(("size", "deep"), [(1, UNIQUE), (2, COLUMNS), (3, REDUCE)])
def test_deltas_are_restored_in_other_layouts(ranks, folder, size, deep):
    case = replace(CHAINS["rows"][0], deep=deep)
    for step in (4, 8, 24):
        assert ranks(size, differences, folder, case, step) == [[]] * size


def test_compacting_gives_a_full_checkpoint(folder, capsys):
    chain, full = folder / "deltas", folder / "full"
    assert checkpoint(["compact", str(chain)]) == 0
    assert "step-30 is now a full checkpoint" in capsys.readouterr().out
    compacted = open_checkpoint(chain / "step-30")
    assert compacted.previous is None
    check_equal(compacted, open_checkpoint(full / "step-30"))
    assert checkpoint(["diff", str(chain / "step-30"), str(full / "step-30")]) == 0
    assert checkpoint(["prune", str(chain), "--keep", "1"]) == 0
    assert [path.name for path in list_checkpoints(chain)] == ["step-30"]


@pytest.mark.slow
def test_commands_follow_the_chain(folder, capsys):
    chain = folder / "deltas"
    assert checkpoint(["ls", str(chain)]) == 0
    assert "delta 2 after step-28" in capsys.readouterr().out.splitlines()[1]
    assert checkpoint(["verify", str(chain)]) == 0
    assert checkpoint(["prune", str(chain), "--keep", "1"]) == 0
    assert [path.name for path in list_checkpoints(chain)] == ["step-30", "step-28", "step-26"]
    check_equal(open_checkpoint(chain / "step-30"), open_checkpoint(folder / "full" / "step-30"))
    file = chain / "step-28" / "rank-0.bin"
    raw = file.read_bytes()
    full, noticed = open_checkpoint(folder / "full" / "step-30"), 0
    for place in range(0, len(raw), len(raw) // 60):
        file.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        try:
            check_equal(open_checkpoint(chain / "step-30"), full)
        except CheckpointError:
            noticed += 1
    assert noticed > 10
    assert checkpoint(["verify", str(chain)]) == 1


def test_missing_rows_of_new_keys_are_noticed(folder):
    """Replace a delta's predecessor with an earlier checkpoint, which lacks some keys."""
    delta = open_checkpoint(folder / "deltas" / "step-8")
    delta.before = open_checkpoint(folder / "deltas" / "step-2")
    with pytest.raises(CheckpointError, match=r"\d+ values of tables/deep.f are missing"):
        delta.tensor("tables/deep.f")
    with pytest.raises(CheckpointError, match=r"tables/deep.h has no keys"):
        key_changes([delta], "deep.h")


def test_only_rows_that_a_delta_lacks_are_read_from_earlier_checkpoints(folder, monkeypatch):
    read, real = [], Checkpoint.read_into
    monkeypatch.setattr(
        Checkpoint,
        "read_into",
        lambda self, name, *rest: (read.append(name), real(self, name, *rest)),
    )
    delta, name = open_checkpoint(folder / "deltas" / "step-8"), "tables/deep.f"
    wanted = open_checkpoint(folder / "full" / "step-8").tensor(name)
    changed = delta.changed_rows(name)
    others = torch.tensor(sorted({*range(len(wanted))} - {*changed.tolist()}))
    for rows in (torch.arange(len(wanted)), others[[0, -1]], changed[[0, -1]]):
        read.clear()
        out = torch.empty(len(rows), wanted.shape[1], dtype=wanted.dtype)
        read_rows(delta, name, rows, delta.saved(name).whole, out)
        assert torch.equal(out, wanted[rows])
    assert name not in read


def test_the_memory_for_a_chain_does_not_depend_on_its_length(folder, monkeypatch):
    kept, real = [], keys._read_full

    def read_full(*args):
        own = (each for each in gc.get_objects() if type(each) is keys._Rows)
        kept.append(sum(each.rows.numel() for each in own))
        real(*args)

    monkeypatch.setattr(keys, "_read_full", read_full)
    name = "tables/deep.f"
    wanted = open_checkpoint(folder / "full" / "step-24").tensor(name)
    assert torch.equal(open_checkpoint(folder / "deltas" / "step-24").tensor(name), wanted)
    assert max(kept) <= len(wanted)


def test_the_keys_of_a_lookup_are_read_once(folder, monkeypatch):
    monkeypatch.setattr(keys, "_BLOCK_KEYS", 4)
    addresses = open_checkpoint(folder / "full" / "step-24").addresses("vocabularies/f/keys")
    own, read, real = addresses.read(), [], addresses.read
    numbers = torch.arange(len(own))
    for _ in range(2):  # the first pass also reads the first address of each block
        read.clear()
        for part in numbers.split(7):
            found, exist = addresses.find(own[part])
            assert torch.equal(found, part)
            assert exist.all()
            assert not addresses.find(own[part] + 1)[1].any()
        monkeypatch.setattr(addresses, "read", lambda rows: (read.append(rows), real(rows))[1])
    assert len(read) == 2 * len(numbers.split(7))


def test_a_table_whose_rows_do_not_fit_its_keys_is_refused(folder):
    index = open_checkpoint(folder / "deltas" / "step-8").index
    keys = replace(index.tensors["vocabularies/f/keys"], shape=(1,), pieces=())
    wrong = replace(index, tensors={**index.tensors, "vocabularies/f/keys": keys})
    with pytest.raises(CheckpointError, match="its pieces have 0 elements"):
        from_json(to_json(wrong), folder)
    keys = index.tensors["vocabularies/f/clock"]
    wrong = replace(index, tensors={**index.tensors, "vocabularies/f/keys": keys})
    with pytest.raises(
        CheckpointError, match="but must have one row more than vocabularies/f/keys"
    ):
        from_json(to_json(wrong), folder)

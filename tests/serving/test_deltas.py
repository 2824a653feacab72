"""Tests the file format of an export's deltas: what was written can be read, and damage is
rejected.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from sbpflow.errors import DataError
from sbpflow.serving import deltas
from sbpflow.serving.deltas import (
    DELTA_FILE,
    VALUES_FILE,
    DeltaHead,
    DeltaWriter,
    delta_folder,
    digest_of,
    newest_bundle,
    read_delta,
)

ROWS = torch.tensor([3, 5, 900])
TENSORS = {
    "tables/items/rows": ROWS,
    "tables/items": torch.arange(12.0).view(3, 4).to(torch.bfloat16),
    "tables/users/rows": torch.tensor([7]),
    "tables/users/int8": torch.tensor([[1, 2, 3]], dtype=torch.uint8),
    "tables/users/scale": torch.tensor([0.5]),
    "tables/users/low": torch.tensor([-1.0]),
    "tables/idle/rows": torch.empty(0, dtype=torch.int64),
    "tables/idle": torch.empty(0, 2),
    "vocabulary/item/keys": torch.tensor([7, -5, 2**62]),
    "vocabulary/item/ids": torch.tensor([1, 900, 3]),
    "dense/bias": torch.tensor(0.25),
    "dense/weight": torch.ones(2, 3),
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "step-8"
    folder.mkdir()
    (folder / "model.json").write_text('{"format": "sbpflow-model"}')
    return folder


def write(bundle: Path, number: int, previous: str) -> str:
    head = DeltaHead(
        number=number, base=digest_of(bundle), previous=previous, run="r", step=9, time=1.5
    )
    sizes = {name: (values.dtype, tuple(values.shape)) for name, values in TENSORS.items()}
    writer = DeltaWriter(bundle, head, sizes)
    writer.append_keys("item", TENSORS["vocabulary/item/keys"], TENSORS["vocabulary/item/ids"])
    for name, values in TENSORS.items():
        if name.startswith("vocabulary/"):
            continue
        for piece in values.split(2) if values.ndim and len(values) else [values]:
            writer.append(name, piece)
    return writer.close()


def test_a_delta_that_is_written_in_pieces_is_read(bundle: Path):
    base = digest_of(bundle)
    digest = write(bundle, 1, base)
    delta = read_delta(bundle, 1, base=base, previous=base)
    assert (delta.digest, delta.head.step, delta.head.run) == (digest, 9, "r")
    read = {f"dense/{name}": values for name, values in delta.dense.items()}
    for table, (rows, parts) in delta.tables.items():
        read[f"tables/{table}/rows"] = rows
        read |= {f"tables/{table}{suffix}": values for suffix, values in parts.items()}
    for name, (keys, ids) in delta.vocabulary.items():
        read |= {f"vocabulary/{name}/keys": keys, f"vocabulary/{name}/ids": ids}
    content = json.loads((delta_folder(bundle, 1) / DELTA_FILE).read_text())["content"]
    assert (content["vocabulary"], content["removed"]) == ({"item": 2}, {"item": 1})
    assert read.keys() == TENSORS.keys()
    for name, values in TENSORS.items():
        assert read[name].dtype == values.dtype
        assert torch.equal(read[name], values), name


def test_the_values_are_a_safetensors_file(bundle: Path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    write(bundle, 1, digest_of(bundle))
    loaded = load_file(delta_folder(bundle, 1) / VALUES_FILE)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], values) for name, values in TENSORS.items())


def test_a_gap_or_another_chain_is_refused(bundle: Path):
    base = digest_of(bundle)
    first = write(bundle, 1, base)
    write(bundle, 2, first)
    assert read_delta(bundle, 2, base=base, previous=first).head.number == 2
    with pytest.raises(DataError, match=r"previous is .* earlier delta is missing"):
        read_delta(bundle, 2, base=base, previous=base)
    with pytest.raises(DataError, match=r"base is .* to another chain"):
        read_delta(bundle, 2, base="0" * 64, previous=first)
    delta_folder(bundle, 2).rename(delta_folder(bundle, 3))
    with pytest.raises(DataError, match="number is 2, but 3 is expected"):
        read_delta(bundle, 3, base=base, previous=first)
    with pytest.raises(FileNotFoundError):
        read_delta(bundle, 4, base=base, previous=first)


def test_a_damaged_delta_can_be_written_again(bundle: Path):
    base = digest_of(bundle)
    write(bundle, 1, base)
    folder = delta_folder(bundle, 1)
    (folder / VALUES_FILE).write_bytes(b"")
    (folder.parent / ".000001.old" / "left over").mkdir(parents=True)
    digest = write(bundle, 1, base)
    assert read_delta(bundle, 1, base=base, previous=base).digest == digest
    assert [path.name for path in folder.parent.iterdir()] == ["000001"]


@pytest.mark.parametrize("file", [DELTA_FILE, VALUES_FILE])
def test_every_damaged_byte_is_noticed(bundle: Path, file: str):
    base = digest_of(bundle)
    write(bundle, 1, base)
    path = delta_folder(bundle, 1) / file
    whole = path.read_bytes()
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            read_delta(bundle, 1, base=base, previous=base)
        except DataError:
            continue
        # Changing whitespace between JSON values has no effect.
        assert file == DELTA_FILE
        assert whole[place : place + 1].isspace(), place
    path.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=f"{file}.* load the newest bundle"):
        read_delta(bundle, 1, base=base, previous=base)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "not JSON .*"), ("[]", "the file is a list, .*"), ("{}", "the key 'format' is missing")],
)
def test_a_damaged_head_is_refused_with_its_path_once(bundle: Path, text: str, reason: str):
    path = delta_folder(bundle, 1) / DELTA_FILE
    path.parent.mkdir(parents=True)
    path.write_text(text)
    words = f"^{re.escape(str(path))}: {reason}; load the newest bundle$"
    with pytest.raises(DataError, match=words) as error:
        read_delta(bundle, 1, base="", previous="")
    assert str(error.value).count(str(path)) == 1


@pytest.mark.parametrize("wrong", [torch.tensor([1]), torch.ones(3), torch.tensor([1, 2, 3]).int()])
def test_keys_without_an_id_are_refused(
    bundle: Path, wrong: torch.Tensor, monkeypatch: pytest.MonkeyPatch
):
    base = digest_of(bundle)
    write(bundle, 1, base)
    real = deltas._read_values
    monkeypatch.setattr(
        deltas, "_read_values", lambda *of: {**real(*of), "vocabulary/item/ids": wrong}
    )
    with pytest.raises(DataError, match="vocabulary/item must have one id for each of its keys"):
        read_delta(bundle, 1, base=base, previous=base)


def test_the_newest_bundle_of_a_folder_is_current(bundle: Path):
    assert newest_bundle(bundle) == bundle
    newer = bundle.with_name("step-10")
    newer.mkdir()
    (newer / "model.json").write_text("{}")
    bundle.with_name("step-11.partial").mkdir()
    assert newest_bundle(bundle.parent) == newer
    with pytest.raises(DataError, match=r"neither model\.json nor any bundle named step-N"):
        newest_bundle(newer / "deltas")

"""Tests that damaged text, manifests and shards give a correct count or one readable error."""

import random
import re

import numpy as np
import pytest

from sbpflow.data import load_manifest, open_loader
from sbpflow.data.__main__ import main
from sbpflow.data.format.schema import CRITEO
from sbpflow.data.format.verify import verify_set
from sbpflow.data.prepare.parse import parse_piece
from sbpflow.errors import DataError
from tests.data.conftest import make_set
from tests.data.rows import text_rows

INTEGER = re.compile(r" *[+-]?[0-9]+")
HEX = re.compile(r"[0-9a-fA-F]{8}")
ALPHABET = [b"\t", b"\n", b"\r", b"\r\n", b"+", b"-", b" ", b"g", b"0", b"\x00", b"\xff",
            b"\xc3\xa9", b'"', b",", b".", b"99999999999", b"#", b"\x0b", b"e5", b"NaN", b"null",
            b"\\"]  # fmt: skip


def mutated(rng, text, edits):
    """Return ``text`` with random insertions, deletions, replacements and repetitions."""
    for _ in range(edits):
        at = rng.randrange(len(text) + 1)
        length = rng.choice([0, 0, 1, 1, 2, 9, 40, 300])
        piece = rng.choice([*ALPHABET, b"", text[at : at + length] * 2, rng.randbytes(2)])
        text = text[:at] + piece + text[at + length :]
    return text


def parsed(line):
    """Return (label, integers, keys) for a good line, with None for empty cells, or None for a bad
    line.
    """
    try:
        cells = line.decode("utf-8").split("\t")
    except UnicodeDecodeError:
        return None
    if len(cells) != 40 or cells[0] not in ("0", "1"):
        return None
    integers = [int(c) if INTEGER.fullmatch(c) else c or None for c in cells[1:14]]
    keys = [int(c, 16) if HEX.fullmatch(c) else c or None for c in cells[14:]]
    if any(isinstance(value, str) for value in integers + keys):
        return None
    if any(value is not None and not -(2**31) <= value < 2**31 for value in integers):
        return None
    return (int(cells[0]), *integers, *keys)


@pytest.mark.parametrize("seed", range(8))
def test_every_line_of_damaged_text_is_a_correct_row_or_counted(seed):
    rng = random.Random(seed)
    clean = "".join("\t".join(row) + "\n" for row in text_rows(40, seed)).encode()
    bad_lines = 0
    for _ in range(40):
        text = mutated(rng, clean, rng.randrange(4))
        piece = parse_piece(text, CRITEO)
        lines = text.split(b"\n")
        lines = [line.removesuffix(b"\r") for line in (lines if lines[-1] else lines[:-1])]
        expected = [row for row in map(parsed, lines) if row is not None]
        assert piece.num_lines == len(lines), text
        assert piece.frame.rows() == expected, text
        assert len(expected) + piece.bad.total == len(lines), text
        bad_lines += piece.bad.total
    assert bad_lines > 20


@pytest.mark.parametrize("seed", range(6))
def test_prepare_of_damaged_files_gives_a_count_or_a_message(tmp_path, capsys, seed):
    rng = random.Random(100 + seed)
    clean = "".join("\t".join(row) + "\n" for row in text_rows(60, seed)).encode()
    path = tmp_path / "rows.tsv"
    path.write_bytes(mutated(rng, clean, 6))
    arguments = ["prepare", "--input", str(path), "--output", str(tmp_path / "set")]
    status = main([*arguments, "--max-bad-fraction", "0.5"])
    error = capsys.readouterr().err
    assert "Traceback" not in error
    if status == 0:
        content = load_manifest(tmp_path / "set").content
        rows = sum(shard["rows"] for shards in content["splits"].values() for shard in shards)
        assert rows + sum(content["bad_lines"].values()) == content["lines"]
    else:
        assert status == 2
        assert "error: " in error


def damage(rng, raw):
    """Truncate a file, extend it, or flip bits of its bytes."""
    kind = rng.randrange(3)
    if kind == 0:
        return raw[: rng.randrange(len(raw))]
    if kind == 1:
        return raw + rng.randbytes(rng.choice([1, 4, 24, 4096]))
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]


def use(folder):
    """Read a set as a run does and verify its checksums."""
    manifest = load_manifest(folder)
    rows = sum(
        len(b.labels) for b in open_loader(manifest, batch_size=16, backend="memmap").epoch(0)
    )
    verify_set(manifest, 2)
    return rows, manifest.splits


def outcome(folder):
    """Return the result of ``use``, or its error message."""
    try:
        return use(folder)
    except DataError as error:
        return str(error)


def test_damaged_sets_are_refused_or_unchanged(tmp_path):
    manifest = make_set(tmp_path / "set", 50, shard_rows=20)
    whole = use(manifest.path)
    rng = random.Random(0)
    files = sorted(manifest.path.iterdir())
    refused = 0
    for _ in range(400):
        path = rng.choice(files)
        raw = path.read_bytes()
        path.write_bytes(damage(rng, raw))
        result = outcome(manifest.path)
        assert result == whole or str(manifest.path) in result
        refused += result != whole
        path.write_bytes(raw)
    assert refused > 390
    assert use(manifest.path) == whole


def test_a_missing_shard_is_named(tmp_path):
    manifest = make_set(tmp_path / "set", 50)
    (manifest.path / "train-0.npy").unlink()
    with pytest.raises(DataError, match=r"train-0\.npy"):
        open_loader(manifest, batch_size=10)


def test_a_flipped_bit_of_a_row_is_found_by_verify(tmp_path, capsys):
    manifest = make_set(tmp_path / "set", 50)
    path = manifest.path / "train-0.npy"
    np.load(path, mmap_mode="r+")[31, 4] ^= 1
    assert main(["verify", str(manifest.path)]) == 2
    assert "checksum" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["absent", "empty", "other"])
def test_the_message_for_a_missing_set_says_how_to_make_one(tmp_path, content):
    folder = tmp_path / "set"
    if content != "absent":
        folder.mkdir()
    if content == "other":
        (folder / "manifest.json").write_text("[]")
    with pytest.raises(DataError, match="sbpflow prepare"):
        load_manifest(folder)


def test_a_missing_cross_names_the_option_that_makes_it(tmp_path):
    manifest = make_set(tmp_path / "set", 50)
    assert manifest.field("C1xC2").parts == ("C1", "C2")
    with pytest.raises(DataError, match="--crosses C1xC2,C5xC6"):
        manifest.field("C5xC6")

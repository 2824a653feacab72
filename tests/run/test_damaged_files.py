"""Tests that damaged files of runs, sets and checkpoints give either one message or the original
values.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.run_file import RunFacts, read_run, write_run
from sbpflow.commands.checkpoint import checkpoint as checkpoint_command
from sbpflow.commands.predict import predict
from sbpflow.commands.report import report
from sbpflow.data.__main__ import main as data_main
from sbpflow.data.format.manifest import check_unchanged, load_manifest
from sbpflow.data.prepare.workspace import read_record, write_record
from sbpflow.embedding.storage import measure
from sbpflow.embedding.storage.choose import KernelChoice
from sbpflow.embedding.storage.measure import Profile, choose_by_times
from sbpflow.errors import CheckpointError, ConfigError, DataError
from sbpflow.models.registry import MODELS
from sbpflow.run.report.page import write_report
from sbpflow.run.saved.saved_documents import check_start, saved_set
from sbpflow.run.saved.saved_model import saved_config, saved_layouts
from sbpflow.runtime.files.json_file import JsonError, parse_json, read_json
from tests.damage import FILES, VALUES, damaged
from tests.embedding.test_measure import shape_of

OLD = Path(__file__).parents[1] / "fixtures" / "d4baee1"
OURS = (ConfigError, DataError, CheckpointError)
MAX_CHARACTERS = 3000  # maximum length of a message


def outcome(read: Callable[[], Any]) -> tuple[Any, str]:
    """Return (result, ""), or (None, message) for one of sbpflow's errors; other errors
    propagate.
    """
    try:
        return read(), ""
    except OURS as error:
        message = str(error)
    assert message.isprintable(), message
    assert len(message) < MAX_CHARACTERS, message
    return None, message


@pytest.fixture
def run(tmp_path) -> Path:
    """Return a run folder with the files that a report reads."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.jsonl", "plan.json", "start.txt"):
        shutil.copy(OLD / "run" / name, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("metrics.jsonl", 180), ("plan.json", 60), ("start.txt", 60)]
)
def test_a_report_of_damaged_files_is_a_page_or_one_message(run, name, count):
    file, others = run / name, tuple(path.read_bytes() for path in run.iterdir())
    refused = noted = 0
    for copy in damaged(file.read_bytes(), count, others=others):
        file.write_bytes(copy)
        page, message = outcome(lambda: write_report([run], run / "page.html").read_text())
        refused += bool(message)
        assert not message or str(file) in message
        if name == "plan.json":
            noted += "plan.json is not shown" in page
    assert name != "plan.json" or noted == count, "it has a checksum"
    assert name != "metrics.jsonl" or refused > count / 2


def test_report_exits_with_code_2_and_a_remedy(run, capsys):
    file = run / "metrics.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"step": 2,', b'"step": NaN,', 1))
    assert outcome(lambda: report([str(run)]))[1].startswith(f"{file}: line 2 is not a valid event")
    assert "NaN is not a JSON number" in outcome(lambda: report([str(run)]))[1]


def test_a_damaged_manifest_is_refused(tmp_path, capsys):
    shutil.copy(OLD / "set" / "manifest.json", tmp_path)
    whole, file = load_manifest(tmp_path), tmp_path / "manifest.json"
    for copy in damaged(file.read_bytes(), 150):
        file.write_bytes(copy)
        found, message = outcome(lambda: load_manifest(tmp_path))
        assert message.startswith((f"{file}: ", f"{file} is ")) or found.content == whole.content
        assert outcome(lambda: check_unchanged(whole))[1] or found is not None
    file.write_bytes(b"[" * 100_000)
    assert data_main(["stats", str(tmp_path)]) == 2
    assert "manifest.json: more than 64 levels of nesting; restore it" in capsys.readouterr().err


def test_a_damaged_record_of_a_piece_is_recreated(tmp_path):
    file, content = tmp_path / "0.json", {"rows": 5, "files": {"a": [1, 2, {"crc32": 7}]}}
    write_record(file, content)
    for copy in damaged(file.read_bytes(), 200):
        file.write_bytes(copy)
        assert read_record(file, content) in (None, content)


def test_a_damaged_run_file_is_refused(tmp_path):
    facts = RunFacts(run="0123456789ab", facts={"run.seed": "7"}, status="training")
    write_run(tmp_path, facts)
    file = tmp_path / "run.json"
    for copy in damaged(file.read_bytes(), 200):
        file.write_bytes(copy)
        assert outcome(lambda: read_run(tmp_path))[1].startswith(f"{file} cannot be used (")


def test_a_damaged_index_is_refused(tmp_path):
    folder = tmp_path / "step-5"
    shutil.copytree(OLD / "checkpoints" / "sgd-dp", folder)
    whole, file = open_checkpoint(folder).index, folder / "index.json"
    for copy in damaged(file.read_bytes(), 150):
        file.write_bytes(copy)
        found, message = outcome(lambda: open_checkpoint(folder))
        assert message.startswith(str(file)) or found.index == whole


def rewritten(raw: bytes, documents: Mapping[str, Any]) -> bytes:
    """Write the index with a changed document and a valid digest."""
    tree = json.loads(raw)
    tree["content"]["documents"] = documents
    tree["sha256"] = hashlib.sha256(json.dumps(tree["content"]).encode()).hexdigest()
    return json.dumps(tree).encode()


def test_documents_with_a_valid_digest_are_checked(tmp_path):
    folder = tmp_path / "step-5"
    shutil.copytree(OLD / "checkpoints" / "sgd-dp", folder)
    file = folder / "index.json"
    raw = file.read_bytes()
    documents = json.loads(raw)["content"]["documents"]

    def use() -> None:
        saved = open_checkpoint(folder)
        saved_set(saved)
        check_start(saved)
        config = saved_config(saved, (), models=MODELS, own_model=None)
        saved_layouts(saved, config, 2)

    use()
    refused = 0
    for key in ("data", "cursor", "loop", "best", "steps_of_before", "metrics_bytes", "config"):
        without = {name: value for name, value in documents.items() if name != key}
        copies = [json.dumps(without).encode()]
        part = json.dumps({key: documents[key]}).encode()
        copies += damaged(part, 40, seed=len(copies))
        for copy in copies:
            try:
                changed = {**without, **json.loads(copy)}
                file.write_bytes(rewritten(raw, changed))
            except (ValueError, TypeError, RecursionError):
                continue  # not a JSON object, so it has no digest
            refused += bool(outcome(use)[1])
    assert refused > 60


@pytest.mark.parametrize("key", ["data", "cursor", "loop", "steps_of_before", "metrics_bytes"])
def test_a_missing_document_is_named(tmp_path, key):
    folder = tmp_path / "step-5"
    shutil.copytree(OLD / "checkpoints" / "sgd-dp", folder)
    file = folder / "index.json"
    documents = json.loads(file.read_bytes())["content"]["documents"]
    del documents[key]
    file.write_bytes(rewritten(file.read_bytes(), documents))
    saved = open_checkpoint(folder)
    check = saved_set if key == "data" else check_start
    with pytest.raises(CheckpointError, match=rf"step-5: {key} must be .* got nothing"):
        check(saved)


def test_a_watched_loss_may_be_infinite(tmp_path):
    folder = tmp_path / "step-5"
    shutil.copytree(OLD / "checkpoints" / "sgd-dp", folder)
    file = folder / "index.json"
    documents = json.loads(file.read_bytes())["content"]["documents"]
    for value, fits in ((float("inf"), True), (0.5, True), (None, True), (float("nan"), False)):
        documents["loop"] = {"stop": {"value": value, "step": 3, "waited": 1}}
        file.write_bytes(rewritten(file.read_bytes(), documents))
        message = outcome(lambda: check_start(open_checkpoint(folder)))[1]
        assert fits is not bool(message), message
    assert "loop.stop.value must be a number or null, got nan" in message


def test_commands_on_damaged_checkpoints_end_with_one_message(tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(OLD / "run", run)
    file = run / "checkpoints" / "step-10" / "index.json"
    words = ["--checkpoint", str(run), "--input", str(OLD / "set")]
    words += ["--output", str(tmp_path / "scores.parquet")]
    for copy in (b"[" * 10_000, b"{}", file.read_bytes()[:-9], b"9" * 5000):
        file.write_bytes(copy)
        assert checkpoint_command(["verify", str(run)]) == 1
        message = outcome(lambda: predict(words))[1]
        assert "every checkpoint there is damaged" in message
    assert not (tmp_path / "scores.parquet").exists()


def test_kernels_are_remeasured_if_their_file_is_damaged(tmp_path, caplog, monkeypatch):
    # The file then has the same content, and the same damage, with any packages.
    monkeypatch.setattr(measure.metadata, "version", lambda name: "1.0")
    path, shape = tmp_path / "kernels.json", shape_of()
    Profile(path).keep(shape, {"torch": 1.5, "numba": 1.0})
    unmeasured = KernelChoice("torch", "unmeasured")
    warned = 0
    for copy in damaged(path.read_bytes(), 300):
        path.write_bytes(copy)
        caplog.clear()
        profile = Profile(path)
        times = profile.find(shape, ["torch", "numba"])
        assert profile.find(shape, ["torch", "numba"]) == times
        assert len(caplog.records) <= 1, "one line"
        assert all("measured again" in message for message in caplog.messages)
        warned += bool(caplog.records)
        if times is not None:
            choose_by_times(unmeasured, times)
    assert warned > 150


@pytest.mark.parametrize("value", VALUES)
def test_values_at_the_limits_are_read_or_refused(value):
    found, message = None, ""
    try:
        found = parse_json(f'{{"key": {value}}}', "f.json")
    except JsonError as error:
        message = str(error)
    assert message.startswith("f.json: ") or found
    assert len(message) < 200
    json.dumps(found, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NaN", "NaN is not a JSON number"),
        ("-Infinity", "-Infinity is not a JSON number"),
        ("1e999", "1e999 is too large for 64 bits"),
        ("9" * 5000, "a whole number has 5,000 digits"),
        (str(2**64), "a whole number has 20 digits, but numbers can have at most 64 bits"),
        ('"\\ud800"', "half of a surrogate pair"),
        ('{"\\udc00": 1}', "half of a surrogate pair"),
        ('[{"a": 1, "b": 2, "a": 3}]', "the key 'a' appears twice; remove one of them"),
        ("[" * 66 + "]" * 66, "more than 64 levels of nesting"),
        ("[" * 10**6, "more than 64 levels of nesting"),
        ('{"a": 1', "not JSON (Expecting ',' delimiter at line 1, column 8)"),
    ],
)
def test_invalid_json_is_refused_with_the_reason(text, says):
    with pytest.raises(JsonError) as caught:
        parse_json(text, "f.json")
    assert says in str(caught.value)


def test_the_size_of_a_file_is_limited(tmp_path):
    file = tmp_path / "f.json"
    file.write_text("[1, 2, 3]")
    assert read_json(file) == [1, 2, 3]
    with pytest.raises(JsonError, match=r"f\.json: the file has 9 bytes, but at most 8 "):
        read_json(file, max_bytes=8)
    with pytest.raises(JsonError, match="cannot be read"):
        read_json(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "absent.json")


def test_infinity_is_accepted_only_on_request():
    assert parse_json("[Infinity]", finite=False) == [float("inf")]
    assert parse_json(r'"\ud83d\ude00"') == "\U0001f600"


def test_all_kinds_of_damage_occur():
    raw = b'{"a": [1, {"b": 2}], "c": "x"}'
    copies = list(damaged(raw, 400))
    assert raw not in copies
    assert len(set(copies)) > 200
    assert set(FILES) & set(copies)

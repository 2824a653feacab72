"""Tests that ``run.json`` with any changed, missing or added byte is refused."""

import hashlib
import json
from dataclasses import replace

import pytest

from sbpflow.checkpoint.run_file import RUN_FILE, RunFacts, read_run, write_run
from sbpflow.errors import CheckpointError

FACTS = RunFacts(
    run="0123456789ab", facts={"run.seed": "7", "model.name": "w\u00e9"}, status="training"
)
FIRST = '{"run": "0123456789ab", "facts": {"run.seed": "7"}, "status": "training"}\n'


def damaged(raw):
    """Yield copies of the file: truncated, extended, or with a byte changed, swapped, missing or
    doubled.
    """
    for at in range(len(raw)):
        yield raw[:at]
        yield raw[:at] + raw[at + 1 :]
        yield raw[: at + 1] + raw[at:]
        for bit in range(8):
            yield raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]
        for other in b'ag09" \n{':
            if other != raw[at]:
                yield raw[:at] + bytes([other]) + raw[at + 1 :]
        if raw[at : at + 1] != raw[at + 1 : at + 2] and at + 1 < len(raw):
            yield raw[:at] + raw[at : at + 2][::-1] + raw[at + 2 :]
    yield raw + b"\n"
    yield raw + raw


def test_no_damaged_copy_is_accepted(tmp_path):
    write_run(tmp_path, FACTS)
    assert read_run(tmp_path) == FACTS
    file = tmp_path / RUN_FILE
    raw, accepted, tried, messages = file.read_bytes(), [], 0, set()
    for copy in damaged(raw):
        file.write_bytes(copy)
        tried += 1
        try:
            read_run(tmp_path)
            accepted.append(copy)
        except CheckpointError as error:
            messages.add(str(error))
    assert tried > 4000
    assert accepted == []
    assert all(message.startswith(f"{file} cannot be used (") for message in messages)
    assert all("checkpoint.resume=never" in message for message in messages)


def test_without_a_run_file_there_is_no_run(tmp_path):
    assert read_run(tmp_path) is None


def test_version_1_files_are_read_in_their_exact_form(tmp_path):
    (tmp_path / RUN_FILE).write_text(FIRST)
    first = RunFacts(run="0123456789ab", facts={"run.seed": "7"}, status="training")
    assert read_run(tmp_path) == first
    write_run(tmp_path, replace(first, status="finished"))
    assert json.loads((tmp_path / RUN_FILE).read_text())["version"] == 2


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("training", "traininh", "status is 'traininh', not one of training, finished"),
        ('"status"', '"stat"', "cannot be used"),
        ("0123", "012", "12 hexadecimal digits"),
        ('"7"', "7", "facts must map strings to strings"),
        ('{"run.seed": "7"}', "{}", "facts must map strings to strings"),
        ('{"run.seed": "7"}', "[]", "facts must map strings to strings"),
        ("}\n", "}", "the file was changed"),
        (": ", ":", "the file was changed"),
        ('"status": "training"', '"status": "training", "more": 1', "the file was changed"),
        (FIRST, "[" * 5000, "cannot be used"),
        (FIRST, "9" * 5000, "cannot be used"),
        (FIRST, "null", "cannot be used"),
    ],
)
def test_other_forms_without_checksum_are_refused(tmp_path, old, new, says):
    (tmp_path / RUN_FILE).write_text(FIRST.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=says):
        read_run(tmp_path)


def test_an_unknown_status_is_an_error_even_with_a_checksum(tmp_path):
    content = {"run": FACTS.run, "facts": dict(FACTS.facts), "status": "paused"}
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    head = {"format": "sbpflow-run", "version": 2, "sha256": digest}
    (tmp_path / RUN_FILE).write_text(json.dumps({**head, "content": content}) + "\n")
    with pytest.raises(CheckpointError, match="status is 'paused', not one of training, finished"):
        read_run(tmp_path)

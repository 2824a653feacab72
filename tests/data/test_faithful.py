"""Tests which runs of the generated-rows benchmark replace the recorded results."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import faithful, record


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        ([], True),
        (["--rows", "20000"], False),
        (["--vocab-scale", "0.01"], False),
        (["--ranks", "1"], False),
        (["train.epochs=2"], False),
    ],
)
def test_only_the_documented_sizes_are_recorded(tmp_path, monkeypatch, capsys, arguments, recorded):
    """Replace generation and training, because the test checks only where result lines are
    written.
    """
    (tmp_path / "faithful.jsonl").write_text("earlier\n")
    manifest = SimpleNamespace(fields=(), bayes=SimpleNamespace(auc=0.8, logloss=0.5))
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(faithful, "synth", lambda _: manifest)
    monkeypatch.setattr(faithful, "halves", lambda _: (0.5, 0.5))
    monkeypatch.setattr(faithful, "train", lambda *_: {"auc": 0.7, "logloss": 0.6})
    faithful.main(arguments)
    lines = (tmp_path / "faithful.jsonl").read_text().splitlines()
    assert (lines == ["earlier"]) is not recorded
    assert len(lines) == (2 if recorded else 1)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["auc"] for line in printed} == {0.7}

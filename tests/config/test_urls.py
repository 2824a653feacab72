"""Tests which options and keys accept URLs, and that others refuse them with exit code 2 without
creating anything.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import sbpflow.__main__
import train_wdl
from sbpflow.commands.checkpoint import checkpoint
from sbpflow.config.load import dump_config, load_config
from sbpflow.data import load_manifest
from sbpflow.errors import ConfigError, DataError
from sbpflow.models.registry import MODELS
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.files.remote_path import RemotePath, any_path, input_path, redacted
from sbpflow.runtime.processes.launch import EXIT_MISTAKE, classify
from tests.config.keys import KEYS

ROOT = Path(__file__).parents[2]
URLS = ("s3://bucket/set", "s3:/bucket/set", "gs://b/x", "hdfs://h:9000/x", "file:///tmp/x")
URLS += ("simplecache::s3://bucket/x", "memory://x")

# Rejected even by options and keys that accept URLs.
NOT_STORES = ("s3:/bucket/set", "simplecache::s3://bucket/x", "s3://key:secret@bucket/x")
NOT_STORES += ("https://host/x?X-Amz-Signature=secret",)
ACCEPTED = {
    "prepare": ["--output", "--like"],
    "encode": ["--like", "--output"],
    "stats": ["DIR"],
    "verify": ["DIR"],
    "predict": ["--checkpoint"],
    "export": ["--checkpoint", "--output", "--score", "--follow"],
    "embeddings": ["DIR"],
    "checkpoint ls": ["path"],
    "checkpoint verify": ["path"],
    "checkpoint diff": ["left", "right"],
    "checkpoint prune": ["path"],
}
STORE_KEYS = {"data.path", "checkpoint.dir", "checkpoint.resume", "export.dir"}

# The values of these keys and options are not paths, but names, numbers and patterns.
NAMES = {"model.wide.columns", "model.wide.crosses", "train.slices", "model.fields.*.table"}
NAMES |= {"parallel.tables.*.sbp", "parallel.tables.*.exchange", "parallel.dense.*"}
NAMES |= {
    "parallel.storage.*.addresses",
    "parallel.storage.*.cache",
    "data.cache.size",
    "train.prometheus.host",
}
OTHER_OPTIONS = {
    *("--model", "--rows", "--part", "--engine", "--address", "key=value"),
    *("--split", "--crosses", "--hash-size", "--dense", "--skew", "--hot", "--keys", "--table"),
    *("--host", "--shadow", "--index"),
    *("--planner", "--planners", "--link", "--optimizer", "--seed"),
}
COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "train_wdl": train_wdl.main,
    **{name: run for name, run in sbpflow.__main__.COMMANDS.items() if name != "checkpoint"},
    **{
        f"checkpoint {name}": lambda argv, name=name: checkpoint([name, *argv])
        for name in ("ls", "verify", "diff", "prune")
    },
}


class ParserMade(Exception):
    """Raised by the test once a command has created its parser."""


def parser_of(command: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Return the parser for the command's arguments."""
    parsers: list[argparse.ArgumentParser] = []

    def capture(self: argparse.ArgumentParser, *_: object) -> None:
        parsers.append(self)
        raise ParserMade

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", capture)
        patch.setattr(argparse.ArgumentParser, "parse_intermixed_args", capture)
        with pytest.raises(ParserMade):
            COMMANDS[command]([])
    (parser,) = parsers
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices[command.split()[-1]]
    return parser


def text_options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options that take any text: no flags, numbers, or choices."""
    for action in parser._actions:
        if action.nargs != 0 and action.choices is None and action.type not in (int, float):
            yield action


def name_of(action: argparse.Action) -> str:
    positional = action.metavar if isinstance(action.metavar, str) else action.dest
    return action.option_strings[-1] if action.option_strings else positional


def words_before(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    """Return command-line words for the required options, and for the positional arguments before
    this argument.
    """
    names = [other.dest for other in parser._actions if not other.option_strings]
    words = ["x"] * names.index(action.dest) if action.dest in names else []
    for other in parser._actions:
        is_text = other.type not in (int, float) and other.choices is None
        if other.required and other.option_strings and other is not action and is_text:
            words += [other.option_strings[-1], "x"]
    return words


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"train_wdl"}))
def test_the_usage_line_names_the_command(command, monkeypatch):
    assert parser_of(command, monkeypatch).prog == f"sbpflow {command}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_takes_a_path_refuses_a_url(command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser, refused, accepted = parser_of(command, monkeypatch), [], []
    for action in text_options(parser):
        option = name_of(action)
        if option in OTHER_OPTIONS or option == "--input" or command == "schema":
            continue  # Inputs may be URLs, and the file of ``schema`` is an input.
        if action.type is any_path:
            accepted.append(option)
        for url in URLS if action.type is not any_path else NOT_STORES:
            words = [*words_before(parser, action), *action.option_strings[-1:], url]
            message = refusal(COMMANDS[command], words, capsys)
            assert redacted(url) in message, f"{command} {' '.join(words)}: {message}"
            assert "URL" in message
            assert "secret" not in message
            assert option in message
        refused.append(option)
    assert refused or command in ("calibrate", "schema"), "no option was tried"
    assert accepted == ACCEPTED.get(command, [])
    assert list(tmp_path.iterdir()) == []


def refusal(
    run: Callable[[list[str]], Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """Return the message of a command that ends with exit code 2."""
    message = ""
    try:
        code = run(words)
    except SystemExit as end:
        code = end.code
    except ConfigError as error:
        message, code = str(error), classify(error)[1]
    assert code == EXIT_MISTAKE
    return message + capsys.readouterr().err


@pytest.mark.parametrize("url", URLS)
def test_every_key_that_takes_a_path_refuses_a_url(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    empty = ROOT / "configs" / "scheme1.yaml"
    refused = set()
    for name, key in KEYS.items():
        if key.kind not in ("path", "text") or name in NAMES:
            continue
        given = [*key.needs, "parallel.scheme=null", "checkpoint.deltas=24", f"{name}={url}"]
        if name in STORE_KEYS and url.partition("://")[0] in ("s3", "gs", "hdfs", "memory"):
            assert url in dump_config(load_config(empty, given, models=MODELS))
            continue
        if name in STORE_KEYS and url.startswith("file://"):
            continue
        with pytest.raises(ConfigError) as caught:
            load_config(empty, given, models=MODELS)
        message = str(caught.value)
        assert message.startswith(f"{name}: {url!r} is a "), message
        refused.add(name)
    paths = {"run.dir", "data.cache.dir", "parallel.plan", "parallel.topology"}
    paths |= {"parallel.storage.*.path", "parallel.storage.*.secret_file"}
    assert refused - STORE_KEYS == paths
    assert NAMES < set(KEYS)
    assert list(tmp_path.iterdir()) == []


def test_a_path_from_python_is_also_rejected(tmp_path, monkeypatch):
    """``Path`` has already replaced the double slash in a URL with a single slash."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError), match="is a URL"):
        load_manifest(Path("s3://bucket/set"))
    with pytest.raises(ConfigError, match="is a URL"):
        load_config(Path("s3://bucket/config.yaml"), models=MODELS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["out/x", "/s3:/x", "./x", "a b", "C", "x:y", "./~/x", "../s3:/b"])
def test_local_paths_are_unchanged(text):
    assert local_path(text) == Path(text)


def test_a_leading_tilde_is_the_home_folder(monkeypatch, tmp_path):
    """Shells leave the tilde in ``run.dir=~/x`` or ``--output=~/x``, so sbpflow must expand it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~") == tmp_path
    assert local_path("~/x") == tmp_path / "x"
    config = load_config(ROOT / "configs/scheme1.yaml", ["run.dir=~/x"], models=MODELS)
    assert config.run.dir == tmp_path / "x"


def test_the_home_of_an_unknown_user_is_refused():
    with pytest.raises(ConfigError, match=r"'~nobody-here/x'.*use .*./~nobody-here/x"):
        local_path("~nobody-here/x")


@pytest.mark.parametrize("text", ["", "a\0b"])
def test_an_invalid_path_is_refused(text):
    with pytest.raises(ConfigError, match="out/criteo"):
        local_path(text)


@pytest.mark.parametrize("url", ["s3://b/x.tsv", "memory://x", "https://h/x.csv"])
def test_inputs_may_be_urls(url):
    assert input_path(url) == RemotePath(url)


def test_the_process_exits_with_2_and_creates_nothing(tmp_path):
    words = [sys.executable, "-m", "data", "prepare", "--input", "x", "--output", "s3:/bucket/set"]
    result = run_in(tmp_path, words)
    assert result.returncode == EXIT_MISTAKE
    assert "argument --output: 's3:/bucket/set' is a URL with one slash" in result.stderr
    assert list(tmp_path.iterdir()) == []


def run_in(folder: Path, words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)

"""Reading a configuration: YAML and ``key=value`` overrides to one frozen value, and back.

Keys and values are judged by ``parse.build``; the classes are in ``schema``.
"""

import difflib
import hashlib
import json
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from sbpflow.config.parse import build, plain, show
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import (
    TableRule,
)
from sbpflow.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``key=value`` overrides in order, check, and freeze."""
    tree = _read_yaml(Path(path))
    for override in overrides:
        _apply(tree, override)
    return build(Config, tree)


def dump_config(config: Config) -> str:
    """The resolved config as YAML; ``load_config`` of it gives an equal value."""
    return yaml.safe_dump(plain(config), sort_keys=False, default_flow_style=None, width=100)


def config_hash(config: Config) -> str:
    """Equal on two ranks exactly if their configs are; order of ``parallel.tables`` counts."""
    return hashlib.sha256(json.dumps(plain(config)).encode()).hexdigest()


def config_facts(config: Config) -> dict[str, str]:
    """Dotted keys and their values as YAML on one line; what ``config_hash`` sees, key by key.

    An entry of ``parallel.tables`` and ``parallel.dense`` is a key, and so is their order, which
    decides where two patterns match.
    """
    facts = dict(_flat("", plain(config)))
    for key in ("tables", "dense"):
        facts[f"parallel.{key} (order)"] = show(list(getattr(config.parallel, key)))
    return facts


def _flat(key: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in cast("dict[str, object]", value).items():
            yield from _flat(f"{key}.{name}" if key else name, item)
    elif value is not None:  # which is as good as not given
        yield key, show(value)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML keeps the last of two equal keys; here that is a mistake to report."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: key {key!r} is there twice; remove one of them")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        folder = path if path.is_dir() else path.parent
        known = sorted(str(file) for file in folder.glob("*.yaml"))
        near = difflib.get_close_matches(str(path), known, 3, cutoff=0.5) or known[:5]
        raise ConfigError(f"--config: {path} {what}{_use(near)}")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {_one_line(error)}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {type(tree).__name__}, not groups such as 'run: {{...}}'")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    """Write one ``key=value`` into the raw tree; ``build`` judges key and value later."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip(". "):
        raise ConfigError(f"{override!r}: not an override; write key=value, such as run.seed=7")
    try:
        value = yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, ConfigError) as error:
        raise ConfigError(f"{key}: {text!r} is not a YAML value: {_one_line(error)}") from error
    path = _split_key(key.strip())
    node = tree
    for depth, name in enumerate(path[:-1]):
        child = node.setdefault(name, {})
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            owner = ".".join(path[: depth + 1])
            raise ConfigError(f"{key}: {owner} is the value {child!r}, it has no keys of its own")
        node = child
    node.pop(path[-1], None)  # so that a new pattern of parallel.tables comes last, and wins
    node[path[-1]] = value


def _split_key(key: str) -> list[str]:
    """Patterns of names hold dots: all after ``parallel.tables.`` is one, less a rule's own key."""
    if key.startswith("parallel.dense."):
        return ["parallel", "dense", key.removeprefix("parallel.dense.")]
    prefix = "parallel.tables."
    if not key.startswith(prefix):
        return key.split(".")
    pattern, _, last = key.removeprefix(prefix).rpartition(".")
    if pattern and last in TableRule.__dataclass_fields__:
        return ["parallel", "tables", pattern, last]
    return ["parallel", "tables", key.removeprefix(prefix)]


def _use(paths: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(paths)}?" if paths else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

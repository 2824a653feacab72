"""Reads a configuration (YAML and ``key=value`` overrides) into one frozen value, and converts it
back to YAML.

``parse.build`` checks keys and values; ``schema`` defines the classes.
"""

import copy
import dataclasses
import difflib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from sbpflow.config.model_tables import FieldRule, TableShape
from sbpflow.config.parse import brief, build, plain, show
from sbpflow.config.schema import Config, table_optimizers
from sbpflow.config.table_rules import TableRule
from sbpflow.config.yaml_text import MAX_CHARACTERS, load_yaml
from sbpflow.embedding.plan.row_storage import StorageRule
from sbpflow.embedding.rules.registry import import_rule
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Affects, key_of
from sbpflow.runtime.fields.own_class import import_own_class
from sbpflow.runtime.files.local_path import PathError, local_path
from sbpflow.runtime.processes.environment import env_int

_LOG = logging.getLogger(__name__)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, models: Mapping[str, type[Any]]
) -> Config:
    """Read a YAML file, apply ``key=value`` overrides in order, and return the checked
    configuration.

    ``models`` maps each ``model.name`` to its configuration class; the first is the default.
    ``model.name: package.module:Class`` imports the class, which is safe because the file and the
    overrides come from the user. A table optimizer's ``name`` (``optimizer.sparse``,
    ``optimizer.tables``) may have the same form.
    """
    try:
        file = local_path(path)
    except PathError as error:
        raise ConfigError(f"--config: {error}") from error
    return config_of(read_yaml(file), overrides, models=models)


def config_of(
    tree: Mapping[str, Any], overrides: Sequence[str] = (), *, models: Mapping[str, type[Any]]
) -> Config:
    """Build the config from a mapping structured like a YAML file; see ``load_config``.

    Values may also be paths, tuples, configuration dataclasses, and numbers and arrays of numpy.
    """
    own: dict[str, Any] = plain(tree)
    _apply_all(own, overrides)
    known = _with_own(models, own.get("model"))
    config = build(Config, own, {"model": known}, partial(_split_key, tree=own))
    _check_own_values(config, known)
    return config


def _check_own_values(config: Config, known: Mapping[str, type[Any]]) -> None:
    """Raise ConfigError if a value of a user's class cannot be saved, or a default cannot be read
    back from a checkpoint.
    """
    optimizers = [config.optimizer.sparse, *config.optimizer.tables.values()]
    if not any(":" in each.name for each in (config.model, *optimizers)):
        return
    try:
        build(Config, plain(config), {"model": known})
        config_facts(config)
    except yaml.representer.RepresenterError as error:
        value = error.args[-1]
        raise ConfigError(
            f"a field of your own class is {brief(value)}, an object of type "
            f"{type(value).__name__}, which cannot be saved as YAML; use a plain value"
        ) from error
    except ConfigError as error:
        raise ConfigError(
            f"{error}; this is a default of your own class, which predict and export could not "
            "read from a checkpoint"
        ) from error


def config_from_tree(
    tree: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    models: Mapping[str, type[Any]],
    own_model: str | None = None,
    own_optimizers: Collection[str] = (),
) -> Config:
    """Return the config whose ``plain`` form was saved as ``tree``, with ``key=value`` overrides.

    Saved data never causes an import: a model ``package.module:Class`` is imported only if the
    user's command names it as ``own_model``, and a table optimizer only if ``own_optimizers`` names
    it. Other classes raise ConfigError.
    """
    saved: dict[str, Any] = copy.deepcopy(dict(tree))
    _apply_all(saved, overrides, own_optimizers)
    if unused := set(own_optimizers) - {own for _, own in _own_optimizers(saved)}:
        names = ", ".join(sorted(unused))
        raise ConfigError(f"--optimizer: no table uses {names}; remove these names")
    known, name = dict(models), _mapping(saved.get("model")).get("name")
    if isinstance(name, str) and name not in known:
        if own_model != name:
            raise ConfigError(
                f"--model: the saved model is {name!r}, which is imported only on request; if you "
                f"trust this module, use --model {name}"
            )
        known[name] = import_model(name)
    elif own_model is not None:
        raise ConfigError(
            f"--model is {own_model}, but the saved model is {name!r}; remove --model"
        )
    return build(Config, saved, {"model": known})


def _mapping(value: object) -> dict[str, Any]:
    """Return ``value`` if it is a mapping, else {}; ``build`` reports a wrong type later."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _with_own(models: Mapping[str, type[Any]], group: object) -> dict[str, type[Any]]:
    """Return the known models, with the default first, and the user's own class if given."""
    known, name = dict(models), _mapping(group).get("name")
    if isinstance(name, str) and ":" in name:
        known[name] = import_model(name)
    elif isinstance(name, dict) or (isinstance(name, str) and "." in name and name not in known):
        given = next(iter(cast("dict[str, Any]", name)), name) if isinstance(name, dict) else name
        raise ConfigError(
            f"model.name: {given} does not name a class; write package.module:Class without "
            f"spaces, or use one of {', '.join(models)}"
        )
    return known


def import_model(name: str) -> type[Any]:
    """Return a model's class ``package.module:Class``; raise ConfigError for other classes."""
    kind = import_own_class("model.name", name, "my_package.my_module:MyModel")
    tag = getattr(kind, "__dataclass_fields__", {}).get("name")
    is_tagged = tag is not None and tag.init and isinstance(tag.default, str)
    if not is_tagged or not callable(getattr(kind, "spec", None)):
        raise ConfigError(
            f"model.name: {name} is not a model configuration; it must be a dataclass with a "
            'field such as `name: str = "own"` and a method `spec(fields)`, as in examples/'
        )
    return kind


def _own_optimizers(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and name of each custom table optimizer, even if the name is malformed."""
    groups = _mapping(tree.get("optimizer"))
    entries = _mapping(groups.get("tables"))
    given = {f"tables.{pattern}": entry for pattern, entry in entries.items()}
    for key, entry in {"sparse": groups.get("sparse"), **given}.items():
        name = _mapping(entry).get("name")
        if isinstance(name, str) and (":" in name or "." in name):
            yield f"optimizer.{key}.name", name


def _import_optimizers(tree: Mapping[str, Any], allowed: Collection[str] | None) -> None:
    """Import the custom table optimizers; raise ConfigError for names not in ``allowed``."""
    for key, name in _own_optimizers(tree):
        if allowed is not None and name not in allowed:
            raise ConfigError(
                f"--optimizer: {key} is {name!r}, which is imported only on request; if you trust "
                f"this module, add --optimizer {name}"
            )
        import_rule(key, name)


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML, which ``load_config`` reads back as an equal value."""
    return yaml.safe_dump(plain(config), sort_keys=False, default_flow_style=None, width=100)


def config_facts(
    config: Config, affecting: Collection[Affects] = get_args(Affects)
) -> dict[str, str]:
    """Return dotted keys and their values as one-line YAML, for comparing ranks.

    Only keys whose effect is in ``affecting`` are returned; by default, all keys are. Each entry of
    a group of patterns (``parallel.tables``, ``model.tables``, ...) has its own key. The order of
    the patterns also has a key, because it decides which of two matching patterns applies.
    """
    facts = {key: text for key, text, affects in _flat("", config) if affects in affecting}
    for group, name in (
        *(("parallel", name) for name in ("tables", "storage", "kernels", "dense")),
        *(("optimizer", "tables"), ("model", "fields"), ("model", "tables")),
    ):
        owner = getattr(config, group)
        patterns = getattr(owner, name, None)  # a user's model may use the name for another value
        if _affects(owner, name) in affecting:
            order = list(patterns) if isinstance(patterns, Iterable) else []
            facts[f"{group}.{name} (order)"] = show(order)
    return facts


def _affects(owner: object, name: str, by_default: Affects = "results") -> Affects:
    mark = key_of(type(owner), name)
    return by_default if mark is None else mark.affects


def _flat(
    key: str, value: object, affects: Affects = "results"
) -> Iterator[tuple[str, str, Affects]]:
    """Yield the dotted key, value, and effect of each leaf under ``value``."""
    items: Mapping[str, object] | None = None
    if dataclasses.is_dataclass(value):
        items = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value)
    if items is not None:
        for name, item in items.items():
            below = _affects(value, name, affects)
            yield from _flat(f"{key}.{name}" if key else name, item, below)
    elif value is not None:  # None means that the key is not given
        yield key, show(value), affects


_EXAMPLE_FILES = {
    "--config": "; use a configuration file, such as configs/scheme1.yaml from the repository",
    "parallel.plan": "; use auto, or a file that `sbpflow plan --output plan.yaml` wrote",
    "parallel.topology": "; use a file that lists the hosts, such as topology.yaml",
}


def read_yaml(path: Path, key: str = "--config") -> dict[str, Any]:
    """Return the mapping in a YAML file; raise ConfigError with ``key`` if the file is missing."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        folder = path if path.is_dir() else path.parent
        known = sorted(str(file) for file in folder.glob("[!.]*.yaml"))
        near = difflib.get_close_matches(str(path), known, 3, cutoff=0.5) or known[:5]
        hint = f"; did you mean {' or '.join(near)}?" if near else _EXAMPLE_FILES[key]
        raise ConfigError(f"{key}: {path} {problem}{hint}")
    try:
        if path.stat().st_size > 4 * MAX_CHARACTERS:  # UTF-8 takes at most 4 bytes per character
            raise ConfigError(f"more than {MAX_CHARACTERS:,} characters of YAML")
        tree = load_yaml(path.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must contain keys with values, such as 'key: value', but it contains a "
            f"{type(tree).__name__}"
        )
    return tree


def _apply_all(
    tree: dict[str, Any], overrides: Sequence[str], allowed: Collection[str] | None = None
) -> None:
    """Write all ``key=value`` overrides into the raw tree.

    Optimizers are imported before each override, because an override may set a key that an
    imported optimizer class defines. ``parallel.plan`` and ``parallel.scheme`` both lay out all
    tables. On the command line, either one therefore replaces the other in the file, and rank 0
    logs a warning.
    """
    for override in overrides:
        _import_optimizers(tree, allowed)
        _apply(tree, override)
    _import_optimizers(tree, allowed)
    given = {override.partition("=")[0].strip() for override in overrides}
    if "parallel" in given:
        return
    parallel = _mapping(tree.get("parallel"))
    for key, other in (("plan", "scheme"), ("scheme", "plan")):
        if f"parallel.{key}" not in given or f"parallel.{other}" in given:
            continue
        if parallel.get(key) is None or parallel.get(other) is None:
            continue
        if env_int("RANK", 0) == 0:
            _LOG.warning("parallel.%s replaces parallel.%s from the configuration", key, other)
        parallel[other] = None


def _apply(tree: dict[str, Any], override: str) -> None:
    """Write one ``key=value`` into the raw tree; ``build`` checks the key and value later."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip(". "):
        raise ConfigError(
            f"{brief(override)} is not a setting; write key=value, such as run.seed=7"
        )
    if not text.strip():  # for example, key=$NAME without a variable NAME
        raise ConfigError(f"{key}= has no value; write a value, or null to unset an optional key")
    try:
        value = load_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{key}: {brief(text)} is not accepted: {error}") from error
    if "#" in text and (value is None or (isinstance(value, str) and "#" not in value)):
        raise ConfigError(
            f"{key}: YAML reads the # in {brief(text)} and all that follows as a comment; put "
            f"quotes around the value, as in '{key}=\"name #3\"'"
        )
    path = _split_key(key.strip(), tree)
    node = tree
    for depth, name in enumerate(path[:-1]):
        child = node.setdefault(name, {})
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            owner = ".".join(path[: depth + 1])
            raise ConfigError(
                f"{key}: {owner} has the value {brief(child)} and is not a group of keys"
            )
        node = child
    node.pop(path[-1], None)  # a new pattern of parallel.tables must come last to take precedence
    node[path[-1]] = value


def _split_key(key: str, tree: Mapping[str, Any]) -> list[str]:
    """Split a dotted key; patterns such as ``parallel.tables.*.C1`` may contain dots."""
    kinds = dict(table_optimizers())
    for _, own in _own_optimizers(tree):
        kinds |= table_optimizers(own)
    of_optimizer = {field.name for kind in kinds.values() for field in dataclasses.fields(kind)}
    for prefix, own_keys in (
        ("parallel.tables.", set(TableRule.__dataclass_fields__)),
        ("parallel.storage.", set(StorageRule.__dataclass_fields__)),
        ("parallel.dense.", set[str]()),
        ("parallel.kernels.", set[str]()),
        ("optimizer.tables.", of_optimizer),
        ("model.tables.", set(TableShape.__dataclass_fields__)),
        ("model.fields.", set(FieldRule.__dataclass_fields__)),
    ):
        if key.startswith(prefix):
            rest = key.removeprefix(prefix)
            pattern, _, last = rest.rpartition(".")
            path = [pattern, last] if pattern and last in own_keys else [rest]
            if len(path) == 1 and prefix == "model.fields." and pattern.endswith(".evict"):
                path = [pattern.removesuffix(".evict"), "evict", last]
            return [*prefix.rstrip(".").split("."), *path]
    return key.split(".")

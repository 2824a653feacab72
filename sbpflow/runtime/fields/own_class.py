"""Imports users' classes from names such as ``package.module:Class`` in a configuration."""

import difflib
from importlib import import_module

from sbpflow.errors import ConfigError


def import_own_class(key: str, name: str, example: str) -> type:
    """Import ``package.module:Class``; raise ConfigError with ``key`` if the class is missing."""
    module_name, _, class_name = name.partition(":")
    example = f"use, for example, {key}={example}"
    if not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        raise ConfigError(f"{key}: {name!r} does not have the form package.module:Class; {example}")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but it imports another module that is missing
        raise ConfigError(
            f"{key}: {name} cannot be imported, because module {error.name} does not exist; put "
            f"its folder on PYTHONPATH (PYTHONPATH=. is the current folder); {example}"
        ) from error
    kind = getattr(module, class_name, None)
    if kind is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        near = difflib.get_close_matches(class_name, classes, 3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"{key}: {module_name} has no {class_name!r}{hint}")
    return kind

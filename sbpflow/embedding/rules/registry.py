"""Finds built-in sparse optimizers, and users' own classes whose modules have been imported."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from importlib import import_module
from inspect import isabstract
from pkgutil import iter_modules
from typing import Any, TypeGuard

from sbpflow.embedding import rules
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.kernels import CompiledKernel
from sbpflow.errors import ConfigError, SbpError
from sbpflow.runtime.fields.own_class import import_own_class


def known_rules(name: object = None) -> Mapping[str, type[SparseOptimizer]]:
    """Return the classes by name. Include ``name`` if it is an imported
    ``package.module:Class``.
    """
    if not isinstance(name, str) or ":" not in name:
        return RULES
    module, _, own = name.partition(":")
    kind: object = getattr(sys.modules.get(module), own, None)
    return {**RULES, name: kind} if _is_rule(kind) else RULES


def import_rule(key: str, name: str) -> None:
    """Import the class ``name``, which is the value of ``key``; raise ConfigError if it is not an
    optimizer.
    """
    kind = import_own_class(key, name, "my_package.my_module:MyOptimizer")
    if not _is_rule(kind):
        raise ConfigError(
            f"{key}: {name} is not a sparse optimizer; it must be a frozen dataclass derived from "
            "sbpflow.SparseOptimizer, with a name and a method step(block); see docs/embeddings.md"
        )


def _is_rule(kind: object) -> TypeGuard[type[SparseOptimizer]]:
    if not (isinstance(kind, type) and issubclass(kind, SparseOptimizer)) or isabstract(kind):
        return False
    own_fields = vars(kind).get("__dataclass_fields__", {})  # {} if the class is not a dataclass
    return "name" in own_fields and isinstance(own_fields["name"].default, str)


def _built_in() -> Iterator[type[SparseOptimizer]]:
    """Yield the optimizers that the modules of this package define."""
    for module in iter_modules(rules.__path__, f"{rules.__name__}."):
        if module.name != __name__:
            yield from filter(_is_rule, vars(import_module(module.name)).values())


RULES: dict[str, type[SparseOptimizer]] = {
    str(kind.__dataclass_fields__["name"].default): kind for kind in _built_in()
}


def rule_class(name: str) -> type[SparseOptimizer]:
    """Return the class with this name.

    For an unknown name, raise ConfigError with the closest match.
    """
    kinds = known_rules(name)
    if name not in kinds and ":" in name:
        raise ConfigError(
            f"sparse optimizer {name!r}: the class has not been imported; import its module first"
        )
    if name not in kinds:
        near = get_close_matches(name, kinds, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"sparse optimizer {name!r} is unknown; use one of {', '.join(kinds)}{hint}"
        )
    return kinds[name]


def sparse_optimizer(name: str, **constants: object) -> SparseOptimizer:
    """Create an optimizer by name: ``sparse_optimizer("adagrad", lr=0.1)``.

    ``name`` can be ``package.module:Class`` if the module is imported. Raise ConfigError for an
    unknown name, an unknown constant, or an out-of-range constant.
    """
    kind = rule_class(name)
    _check_constants(name, kind, constants)
    arguments: dict[str, Any] = {"name": name, **constants}
    return kind(**arguments)


def with_constants(optimizer: SparseOptimizer, constants: Mapping[str, object]) -> SparseOptimizer:
    """Return a copy with changed constants; raise ConfigError like ``sparse_optimizer``."""
    _check_constants(optimizer.name, type(optimizer), constants)
    changes: Mapping[str, Any] = constants
    return replace(optimizer, **changes)


def _check_constants(
    name: str, kind: type[SparseOptimizer], constants: Mapping[str, object]
) -> None:
    known = [field.name for field in fields(kind) if field.name != "name"]
    if unknown := [key for key in constants if key not in known]:
        raise ConfigError(
            f"sparse optimizer {name} has no option {', '.join(unknown)}; its options are "
            f"{', '.join(known)}"
        )


def function_path(optimizer: SparseOptimizer, kernel: CompiledKernel) -> str | None:
    """Return the path ("package.module:function") of an optimizer's function for a kernel, or
    ``None`` if the kernel does not support the optimizer.

    For a built-in optimizer without ``kernels``, the function has the optimizer's name and is in
    the kernel's module of rules.
    """
    for name, kind in RULES.items():
        if kind is type(optimizer) and not kind.kernels:
            path = f"sbpflow.embedding.storage.{kernel}_rules:{name}"
            return path if kernel in kind.built_into else None
    return optimizer.kernels.get(kernel)


def kernel_function(optimizer: SparseOptimizer, kernel: CompiledKernel) -> Callable[..., Any]:
    """Return an optimizer's function for a kernel; raise SbpError if it does not exist."""
    path = function_path(optimizer, kernel)
    if path is None:
        raise SbpError(
            f"kernel {kernel} does not support {optimizer.name}; use parallel.kernel: torch"
        )
    module, _, name = path.partition(":")
    try:
        function = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but it imports another module that is missing
        function = None
    if not callable(function):
        raise SbpError(
            f"sparse optimizer {optimizer.name}: kernels[{kernel!r}] is {path!r}, but this "
            "function does not exist; use package.module:function"
        )
    return function

"""Reads YAML that may be malicious or damaged. Only plain values within fixed limits are accepted,
and each key may occur only once. In YAML, a few lines can expand to billions of values (aliases),
and scalars call constructors that can raise any exception. This module raises ConfigError instead,
before building anything large.
"""

import re
from collections.abc import Hashable
from typing import Any, cast

import yaml

from sbpflow.config.parse import brief
from sbpflow.errors import ConfigError

MAX_CHARACTERS = 2**20
MAX_DEPTH = 32
MAX_VALUES = 100_000  # maximum number of values, with aliases expanded
MAX_DIGITS = 40
_MISLEADING = re.compile(r"[-+]?(0[0-7_]+|.*:.*)")  # octal and base-60 integers


def load_yaml(text: str) -> Any:  # noqa: ANN401 (whatever the text says)
    """Return the value of YAML text; raise a one-line ConfigError for text that is not accepted."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"the text has {len(text):,} characters, but at most {MAX_CHARACTERS:,} characters of "
            "YAML are supported"
        )
    try:
        # Aliases share an object; copy it, so that overriding one occurrence does not change the
        # others.
        return unshared(yaml.load(text, _Loader))
    except ConfigError:
        raise
    except (
        *(yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError),
        *(ArithmeticError, RecursionError),
    ) as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())[:400]}") from error


def unshared(value: Any) -> Any:  # noqa: ANN401
    """Return a deep copy in which no list or mapping appears twice."""
    if isinstance(value, dict):
        return {name: unshared(item) for name, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [unshared(item) for item in cast("list[Any]", value)]
    return value


class _Loader(yaml.SafeLoader):
    """Rejects values above the limits, and duplicate keys. PyYAML would silently use the last of
    several equal keys.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str | None] = []  # Anchors of the enclosing nodes.
        self._sizes: dict[int, int] = {}  # Number of values in a node, with aliases expanded.
        self._count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401
        event = self.peek_event()
        line = event.start_mark.line + 1
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias and event.anchor in self._open:
            raise ConfigError(f"line {line}: *{event.anchor} is used inside its own definition")
        if len(self._open) > MAX_DEPTH:
            raise ConfigError(f"line {line}: there are more than {MAX_DEPTH} levels of nesting")
        before = self._count
        self._open.append(None if is_alias else event.anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        self._count += self._sizes[id(node)] if is_alias else 1
        self._sizes.setdefault(id(node), self._count - before)
        if self._count > MAX_VALUES:
            raise ConfigError(
                f"line {line}: there are more than {MAX_VALUES:,} values after aliases are expanded"
            )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401
        try:
            return super().construct_object(node, deep=deep)
        except ConfigError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            # Scalar constructors raise errors about Python's internals, so replace these errors.
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise ConfigError(
                f"line {node.start_mark.line + 1}: {brief(node.value)} is not a valid {tag}; "
                "correct it, or, if it is a string, put it in quotes and remove the tag"
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise ConfigError(
                    f"line {line}: merge keys (<<) are not supported; write out the merged keys"
                )
            key: object = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | None):
                raise ConfigError(
                    f"line {line}: a key must be plain text, as in name: value, but this key is "
                    f"a {type(key).__name__}"
                )
            if key in seen:
                raise ConfigError(f"line {line}: key {key!r} appears twice; remove one of them")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Refuse the forms of YAML 1.1 that have another value than they seem to: 010 is 8, and
        12:30 is 750.
        """
        if len(node.value) > MAX_DIGITS:
            raise ConfigError(
                f"line {node.start_mark.line + 1}: a number has {len(node.value):,} characters, "
                f"but at most {MAX_DIGITS} are supported"
            )
        value = super().construct_yaml_int(node)
        if _MISLEADING.fullmatch(node.value):
            raise _misread(node, value)
        return value

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Refuse 12:30.5, which YAML 1.1 reads as 750.5."""
        value = super().construct_yaml_float(node)
        if ":" in node.value:
            raise _misread(node, value)
        return value


def _misread(node: yaml.ScalarNode, value: float) -> ConfigError:
    return ConfigError(
        f"line {node.start_mark.line + 1}: YAML reads {node.value} as the number {value}; write "
        f'numbers without leading zeros and colons, and text in quotes, as in "{node.value}"'
    )


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)

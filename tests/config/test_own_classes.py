"""Tests which fields the configuration classes of users may have."""

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from sbpflow.config.load import config_from_tree, config_of
from sbpflow.config.parse import plain
from sbpflow.config.schema import Config
from sbpflow.errors import ConfigError
from sbpflow.models.registry import MODELS


class Model:
    """Has the method that a model needs; reading a configuration does not call it."""

    def spec(self, fields): ...


@dataclass(frozen=True, kw_only=True)
class Own(Model):
    name: str = "own"


@dataclass(frozen=True, kw_only=True)
class Part:
    widths: tuple[int, ...] = (8, 4)


@dataclass(frozen=True, kw_only=True)
class Many(Own):
    """A model with a field of every kind that is supported."""

    flag: bool = True
    dim: int = 8
    rate: float | None = 0.1
    folder: Path = Path("out")
    kind: Literal["a", "b"] = "a"
    part: Part = field(default_factory=Part)
    scales: Mapping[str, float] = field(default_factory=lambda: {"a": 1.5})
    total: int = field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "total", 2 * self.dim)


@dataclass(frozen=True, kw_only=True)
class Lists(Own):
    hidden: list[int] = field(default_factory=lambda: [8, 4])


@dataclass(frozen=True, kw_only=True)
class Depths(Own):
    depth: Literal[1, 2] = 1


@dataclass(frozen=True, kw_only=True)
class Nothing(Own):
    folder: str = None


@dataclass(frozen=True, kw_only=True)
class Either(Own):
    dropout: int | float = 0.1


@dataclass(frozen=True, kw_only=True)
class Bare(Own):
    scales: typing.Mapping = field(default_factory=dict)


class Word(str):
    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Special(Own):
    kind: str = Word("sum")


@dataclass(frozen=True, kw_only=True)
class Derived(Own):
    table: object = field(init=False, default_factory=object)


@dataclass(frozen=True, kw_only=True)
class Wrong(Own):
    kind: str = field(default_factory=object)


@dataclass(frozen=True, kw_only=True)
class Unnamed(Own):
    size: Part | int = 3


@dataclass(frozen=True, kw_only=True)
class Fixed(Model):
    name: str = field(init=False, default="own")


@dataclass(frozen=True, kw_only=True)
class Untagged(Model):
    name: str


def config_for(kind: type, **keys: object) -> Config:
    return config_of({"model": {"name": f"{__name__}:{kind.__name__}", **keys}}, models=MODELS)


def test_a_model_with_supported_fields_is_read_from_a_checkpoint():
    config = config_for(Many, dim=3)
    assert config.model.total == 6
    saved = config_from_tree(plain(config), models=MODELS, own_model=config.model.name)
    assert saved == config


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Lists, r"model\.hidden: .* fields of type list\[int\]; use .* tuple\[T, \.\.\.\]"),
        (Depths, r"model\.depth: .* fields of type typing\.Literal\[1, 2\]; use .* of strings"),
        (Nothing, r"model\.folder: nothing is not a string"),
        (Either, r"model\.dropout: 0\.1 \(float\) is not a whole number"),
        (Bare, r"model\.scales: .* fields of type typing\.Mapping; use .* Mapping\[str, T\]"),
        (Wrong, r"model\.kind: <object object at \w+> \(object\) is not a string"),
        (Unnamed, r"model\.size: 3 \(int\) is not a group of keys"),
    ],
)
def test_defaults_that_a_checkpoint_could_not_restore_are_refused(kind, message):
    with pytest.raises(ConfigError, match=rf"{message}.*; this is a default of your own class"):
        config_for(kind)


def test_a_value_of_an_unsupported_type_is_refused():
    with pytest.raises(ConfigError, match=r"model\.hidden: .* fields of type list\[int\]; use"):
        config_for(Lists, hidden=[16])


@pytest.mark.parametrize(("kind", "type_name"), [(Special, "Word"), (Derived, "object")])
def test_values_that_cannot_be_saved_are_refused(kind, type_name):
    with pytest.raises(ConfigError, match=rf"an object of type {type_name}, which cannot be saved"):
        config_for(kind)


@pytest.mark.parametrize("kind", [Untagged, Fixed])
def test_a_model_whose_name_cannot_be_set_or_has_no_default_is_refused(kind):
    with pytest.raises(ConfigError, match=r'\w+ is not a model configuration; .* = "own"'):
        config_for(kind)


@dataclass(frozen=True, kw_only=True)
class Required(Own):
    dim: int


def test_a_key_of_another_model_is_refused_even_if_a_key_is_required():
    with pytest.raises(ConfigError, match=r"model\.embedding_dim is a setting of wdl, .*Required"):
        config_for(Required, dim=3, embedding_dim=4)

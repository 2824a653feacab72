"""Tests which fields the configuration classes of users may have."""

from dataclasses import dataclass

import pytest

from sbpflow.config.load import config_of
from sbpflow.config.schema import Config
from sbpflow.errors import ConfigError
from sbpflow.models.registry import MODELS


@dataclass(frozen=True, kw_only=True)
class Untagged:
    name: str

    def spec(self, fields):
        raise NotImplementedError


def config_for(kind: type, **keys: object) -> Config:
    return config_of({"model": {"name": f"{__name__}:{kind.__name__}", **keys}}, models=MODELS)


def test_a_model_whose_name_has_no_default_is_refused():
    with pytest.raises(ConfigError, match=r'Untagged is not a model configuration; .* = "own"'):
        config_for(Untagged)

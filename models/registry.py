"""The models that ``model.name`` can choose; the first is the default.

A user's own needs no entry: ``model.name: package.module:Class`` names its configuration class.
"""

from models.wdl import WdlConfig
from sbpflow.run.model import ModelConfig

MODELS: dict[str, type[ModelConfig]] = {"wdl": WdlConfig}

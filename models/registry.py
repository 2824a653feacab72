"""List the models that ``model.name`` can select; the first model is the default.

A custom model does not need an entry: set ``model.name`` to the configuration class
(``package.module:Class``).
"""

from sbpflow.models.dcnv2 import DcnV2Config
from sbpflow.models.deepfm import DeepFmConfig
from sbpflow.models.dlrm import DlrmConfig
from sbpflow.models.wdl import WdlConfig
from sbpflow.run.model.spec import ModelConfig

MODELS: dict[str, type[ModelConfig]] = {
    "wdl": WdlConfig,
    "dlrm": DlrmConfig,
    "deepfm": DeepFmConfig,
    "dcnv2": DcnV2Config,
}

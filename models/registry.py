"""The models that ``model.name`` can select; the first is the default.

A user's model needs no entry here: set ``model.name: package.module:Class`` to its configuration
class.
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

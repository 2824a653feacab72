"""Define DLRM: an MLP for dense fields, dot products of all vector pairs, and a top MLP.

logit = top([bottom(dense), <v_i, v_j> for i > j]) with v_0 = bottom(dense) and embeddings
v_1 .. v_F, as in Naumov et al., Deep Learning Recommendation Model, arXiv:1906.00091, and
facebookresearch/dlrm, dlrm_s_pytorch.py at 090956e. The dot products are ordered like the entries
below the diagonal of their matrix, row by row. The bottom MLP ends with a ReLU, but the top MLP
does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from sbpflow.errors import ConfigError
from sbpflow.models.layered import Bottom, EmbeddingDim, LayeredSpec, ModelOptions, Widths
from sbpflow.models.layers import Layers, MlpShape, T
from sbpflow.run.model.spec import Fields, ParameterSpec, embedding_output
from sbpflow.runtime.fields.keys import Key


@dataclass(frozen=True, kw_only=True, slots=True)
class DlrmConfig(ModelOptions):
    """Configures DLRM; ``norm`` applies to both MLPs, and ``dropout`` applies only to ``top``."""

    name: Literal["dlrm"] = "dlrm"
    embedding_dim: EmbeddingDim = 16
    bottom: Bottom = (512, 256)
    top: Annotated[Widths, Key("results", "Widths of the hidden layers of the top MLP.")] = (
        512,
        256,
    )

    def spec(self, fields: Fields) -> "DlrmSpec":
        """Return the model's shapes.

        Raises ConfigError if there are no dense or no sparse fields.
        """
        if not fields.sparse or not fields.dense:
            raise ConfigError(
                "model.name: dlrm needs dense and sparse fields, but the data has "
                f"{len(fields.dense)} dense and {len(fields.sparse)} sparse; use model.name: wdl"
            )
        bottom = MlpShape(
            name="bottom",
            inputs=len(fields.dense),
            hidden=self.bottom,
            outputs=self.embedding_dim,
            last_relu=True,
            norm=self.norm,
        )
        count = len(fields.sparse) + 1
        pairs = count * (count - 1) // 2
        top = self.mlp("top", self.embedding_dim + pairs, self.top, outputs=1)
        output = embedding_output(
            "deep",
            fields.sparse,
            dim=self.embedding_dim,
            rules=self,
            fixed_dim="the vectors of a pair have the same length",
        )
        return DlrmSpec(outputs=(output,), options=self, bottom=bottom, top=top, num_vectors=count)


@dataclass(frozen=True, kw_only=True)
class DlrmSpec(LayeredSpec):
    """The ``ModelSpec`` of DLRM; ``num_vectors`` includes the vector of the bottom MLP."""

    bottom: MlpShape
    top: MlpShape
    num_vectors: int

    @cached_property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Return the parameter specs of the two MLPs."""
        return {**self.bottom.parameters(), **self.top.parameters()}

    def logits(self, layers: Layers[T], vectors: Mapping[str, T], dense: T) -> T:
        """Compute logits: {"deep": [b, fields x dim]}, dense [b, fields] -> [b, 1]."""
        f = layers.functions
        first = layers.mlp(self.bottom, [dense])
        rest = layers.narrow(vectors["deep"], "deep")
        flat = f.concat([first, rest], 1, id="vectors")
        shape = (flat.shape[0], self.num_vectors, self.bottom.width)
        pairs = f.dot_interaction(f.reshape(flat, shape, id="dots.vectors"), id="dots")
        return layers.mlp(self.top, [first, pairs])

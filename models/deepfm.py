"""Define DeepFM: a first-order term, dot products of all vector pairs, and an MLP.

logit = sum of one weight per field value + sum over pairs of <v_i, v_j> + MLP(v_1 .. v_F), as in
Guo et al., DeepFM, IJCAI 2017, and FuxiCTR's DeepFM at 0245987. A dense field has one weight and
one vector, both multiplied by the field's value. Only the MLP has biases. TorchRec's
FactorizationMachine differs: it also multiplies different dimensions by each other, because it sums
over all columns of all vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from sbpflow.errors import ConfigError
from sbpflow.models.layered import EmbeddingDim, Hidden, LayeredSpec, ModelOptions
from sbpflow.models.layers import Layers, MlpShape, T, linear_specs, vector_specs
from sbpflow.run.model.spec import Fields, ParameterSpec, embedding_output


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepFmConfig(ModelOptions):
    """Configures DeepFM; ``hidden: []`` means a factorization machine without an MLP."""

    name: Literal["deepfm"] = "deepfm"
    embedding_dim: EmbeddingDim = 16
    hidden: Hidden = (400, 400, 400)

    def spec(self, fields: Fields) -> "DeepFmSpec":
        """Return the model's shapes for these fields.

        Raises ConfigError unless there is a sparse field and at least one other field.
        """
        numbers, dim = len(fields.dense), self.embedding_dim
        count = len(fields.sparse) + numbers
        if not fields.sparse or count < 2:
            raise ConfigError(
                "model.name: deepfm needs a sparse field and at least one other field, but the "
                f"data has {len(fields.sparse)} sparse and {numbers} dense fields; use model.name: "
                "wdl"
            )
        mlp = self.mlp("mlp", count * dim, self.hidden, outputs=1)
        return DeepFmSpec(
            outputs=(
                embedding_output(
                    "wide",
                    fields.sparse,
                    dim=1,
                    combine="sum",
                    rules=self,
                    fixed_dim="a wide table has one weight per value",
                ),
                embedding_output(
                    "deep",
                    fields.sparse,
                    dim=dim,
                    rules=self,
                    fixed_dim="the vectors of a pair have the same length",
                ),
            ),
            options=self,
            mlp=mlp if self.hidden else None,
            num_sparse=len(fields.sparse),
            numbers=numbers,
            dim=dim,
        )


@dataclass(frozen=True, kw_only=True)
class DeepFmSpec(LayeredSpec):
    """The ``ModelSpec`` of DeepFM for given data fields."""

    mlp: MlpShape | None
    num_sparse: int
    numbers: int
    dim: int

    @cached_property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Return the specs of the dense fields' vectors and weights, and of the MLP."""
        specs = vector_specs(self.numbers, self.dim)
        if self.numbers:
            specs |= linear_specs("wide_numeric", self.numbers, 1, bias=False)
        return specs | (self.mlp.parameters() if self.mlp is not None else {})

    def logits(self, layers: Layers[T], vectors: Mapping[str, T], dense: T) -> T:
        """Compute logits: {"wide": [b, 1], "deep": [b, fields x dim]}, dense -> [b, 1]."""
        f = layers.functions
        parts, terms = [vectors["deep"]], [vectors["wide"]]
        if self.numbers:
            parts.append(layers.numeric_vectors(dense))
            terms.append(layers.linear("wide_numeric", [dense], whole=True))
        flat = parts[0] if len(parts) == 1 else f.concat(parts, 1, id="vectors")
        shape = (flat.shape[0], self.num_sparse + self.numbers, self.dim)
        terms.append(f.fm_interaction(f.reshape(flat, shape, id="fm.vectors"), id="fm"))
        if self.mlp is not None:
            terms.append(layers.mlp(self.mlp, [flat]))
        return layers.total(terms)

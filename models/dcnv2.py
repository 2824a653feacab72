"""Define DCN-V2: explicit crosses of all vectors, x <- x0 * (W x + b) + x, and an MLP.

The model follows Wang et al., DCN V2, WWW 2021, and offers the two structures with published
results. With ``structure: parallel`` (FuxiCTR's DCNv2 at 0245987), the cross layers and the MLP are
parallel and share a final linear layer. With ``structure: stacked`` (TorchRec's DLRM_DCN in
MLPerf), the cross layers come before the MLP. Each W is a full matrix or the product of two
matrices of rank r.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from sbpflow.errors import ConfigError
from sbpflow.models.layered import Bottom, Count, EmbeddingDim, Hidden, LayeredSpec, ModelOptions
from sbpflow.models.layers import Layers, MlpShape, T, linear_specs, vector_specs
from sbpflow.run.model.spec import Fields, ParameterSpec, embedding_output
from sbpflow.runtime.fields.keys import Example, Key
from sbpflow.runtime.fields.ranges import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class DcnV2Config(ModelOptions):
    """Configures DCN-V2."""

    name: Literal["dcnv2"] = "dcnv2"
    embedding_dim: EmbeddingDim = 16
    cross_layers: Annotated[
        int, Range(low=1, high=256), Key("results", "Number of cross layers.")
    ] = 3
    cross_rank: Annotated[
        Count | None,
        Example(512),
        Key("results", "Rank of W in cross layers. By default, W is a full matrix."),
    ] = None
    structure: Annotated[
        Literal["parallel", "stacked"],
        Key("results", "Whether the MLP runs in parallel with the cross layers or after them."),
    ] = "parallel"
    hidden: Hidden = (500, 500, 500)
    numeric: Annotated[
        Literal["vectors", "bottom", "values"],
        Key(
            "results",
            "How dense fields enter the model: as vectors, through the bottom MLP, or as "
            "plain values.",
        ),
    ] = "vectors"
    bottom: Bottom = ()

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)  # ``super()`` does not work in a class with slots
        if not self.hidden:
            raise ConfigError("model.hidden: [] has no layers; use, for example, [500, 500]")
        if self.bottom and self.numeric != "bottom":
            raise ConfigError(
                f"model.bottom: {list(self.bottom)} has no effect with numeric: {self.numeric}; "
                "remove bottom, or use numeric: bottom"
            )

    def spec(self, fields: Fields) -> "DcnV2Spec":
        """Return the model's shapes for these fields.

        Raises ConfigError if there are no sparse fields.
        """
        if not fields.sparse:
            raise ConfigError(
                "model.name: dcnv2 needs embeddings to cross, but the data has no sparse fields; "
                "use model.name: wdl"
            )
        numbers, dim = len(fields.dense), self.embedding_dim
        bottom = MlpShape(
            name="bottom",
            inputs=numbers,
            hidden=self.bottom,
            outputs=dim,
            last_relu=True,
            norm=self.norm,
        )
        entering = {"vectors": numbers * dim, "bottom": dim if numbers else 0, "values": numbers}
        deep = embedding_output("deep", fields.sparse, dim=dim, rules=self)
        width = deep.width + entering[self.numeric]
        stacked = {"parallel": False, "stacked": True}[self.structure]
        mlp = self.mlp("mlp", width, self.hidden, outputs=1 if stacked else 0)
        return DcnV2Spec(
            outputs=(deep,),
            options=self,
            bottom=bottom if self.numeric == "bottom" and numbers else None,
            vectors=vector_specs(numbers, dim) if self.numeric == "vectors" else {},
            numbers=numbers,
            cross_layers=self.cross_layers,
            cross_rank=self.cross_rank,
            mlp=mlp,
            stacked=stacked,
        )


@dataclass(frozen=True, kw_only=True)
class DcnV2Spec(LayeredSpec):
    """The ``ModelSpec`` of DCN-V2 for given data fields.

    ``bottom`` is None unless dense fields use the bottom MLP, and ``vectors`` is empty unless they
    use vectors.
    """

    bottom: MlpShape | None
    vectors: Mapping[str, ParameterSpec]
    numbers: int
    cross_layers: int
    cross_rank: int | None
    mlp: MlpShape
    stacked: bool

    @cached_property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Return the specs of all dense parameters by name.

        Cross layers have ``cross.N.weight`` [n, n], or ``cross.N.v.weight`` [r, n] and
        ``cross.N.w.weight`` [n, r].
        """
        width = self.mlp.inputs
        specs = {**self.vectors}
        if self.bottom is not None:
            specs |= self.bottom.parameters()
        for index in range(self.cross_layers):
            if self.cross_rank is None:
                specs |= linear_specs(f"cross.{index}", width, width)
            else:
                specs |= linear_specs(f"cross.{index}.v", width, self.cross_rank, bias=False)
                specs |= linear_specs(f"cross.{index}.w", self.cross_rank, width)
        specs |= self.mlp.parameters()
        if not self.stacked:
            specs |= linear_specs("output", width + self.mlp.width, 1)
        return specs

    def logits(self, layers: Layers[T], vectors: Mapping[str, T], dense: T) -> T:
        """Compute logits: {"deep": [b, fields x dim]}, dense [b, fields] -> [b, 1]."""
        start = self._inputs(layers, vectors["deep"], dense)
        crossed = layers.cross([f"cross.{index}" for index in range(self.cross_layers)], start)
        if self.stacked:
            return layers.mlp(self.mlp, [crossed])
        return layers.linear("output", [crossed, layers.mlp(self.mlp, [start])], whole=True)

    def _inputs(self, layers: Layers[T], deep: T, dense: T) -> T:
        """Return the concatenated inputs of the cross layers in the weights' dtype: [b, n].

        If there is a bottom MLP, its output comes first, as in MLPerf; vectors or values of dense
        fields come last.
        """
        concat = layers.functions.concat
        if not self.numbers:
            return deep
        if self.bottom is not None:
            first = layers.widen(layers.mlp(self.bottom, [dense]), "bottom")
            return concat([first, deep], 1, id="inputs")
        last = layers.numeric_vectors(dense) if self.vectors else dense
        return concat([deep, last], 1, id="inputs")

"""Define Wide & Deep for click-through rate prediction, on logical tensors.

By default, logit = sum of the crosses' weights + MLP(embeddings ++ dense fields). The code does not
depend on layouts, because ops insert the conversions between layouts. The architecture and initial
values follow OneFlow-Benchmark, wdl_train_eval.py at de4698a7: ReLU and dropout after every hidden
layer, no bias in the wide part, glorot-uniform weights, zero biases, and table values from U(-0.05,
0.05).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Annotated, Literal

from sbpflow.embedding.plan.tables import OutputConfig
from sbpflow.errors import ConfigError, choices
from sbpflow.models.layered import Dropout, EmbeddingDim, Hidden, LayeredSpec, ModelOptions
from sbpflow.models.layers import Layers, MlpShape, T, linear_specs, vector_specs
from sbpflow.run.model.spec import Fields, HashedColumn, IdField, ParameterSpec, embedding_output
from sbpflow.runtime.fields.keys import Example, Key
from sbpflow.runtime.fields.ranges import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class WideConfig:
    """Configures the wide part of wdl, a sum of weights."""

    columns: Annotated[
        tuple[str, ...], Example(("C1",)), Key("results", "Columns with one weight per value.")
    ] = ()
    numeric: Annotated[bool, Key("results", "Add one weight per dense field.")] = False
    crosses: Annotated[
        tuple[tuple[str, ...], ...],
        Example((("C1", "C2"),)),
        Key(
            "results",
            "Crosses of columns, with one weight per value: pairs from the prepared set, "
            "or, with hash_size, any pairs or triples.",
        ),
    ] = (("C1", "C2"), ("C3", "C4"))
    hash_size: Annotated[
        Annotated[int, Range(low=3, below=2**31)] | None,
        Key(
            "results",
            "Number of rows of each hashed cross. By default, crosses come from the prepared set.",
        ),
    ] = None

    def __post_init__(self) -> None:
        sizes = (2,) if self.hash_size is None else (2, 3)
        seen: set[tuple[str, ...]] = set()
        for index, cross in enumerate(self.crosses):
            key = f"model.wide.crosses[{index}]"
            if len(cross) not in sizes or len(set(cross)) != len(cross):
                number = (
                    "two (with model.wide.hash_size, also three)"
                    if self.hash_size is None
                    else "two or three"
                )
                raise ConfigError(
                    f"{key}: {list(cross)} is not a cross; list {number} different columns (for "
                    "example, [C1, C2])"
                )
            if cross in seen:
                raise ConfigError(f"{key}: {list(cross)} is listed twice; remove one of them")
            seen.add(cross)
        if repeated := [name for name, count in Counter(self.columns).items() if count > 1]:
            raise ConfigError(
                f"model.wide.columns: {repeated[0]} is listed twice; remove one of them"
            )

    @property
    def is_empty(self) -> bool:
        """Return whether the model has no wide part."""
        return not (self.columns or self.crosses or self.numeric)


@dataclass(frozen=True, kw_only=True, slots=True)
class WdlConfig(ModelOptions):
    """Configures Wide & Deep."""

    name: Literal["wdl"] = "wdl"
    deep: Annotated[
        bool,
        Key(
            "results",
            "Whether the model has a deep part; without it, only the wide part is trained.",
        ),
    ] = True
    embedding_dim: EmbeddingDim = 16
    hidden: Hidden = (1024, 1024)
    dropout: Dropout = 0.5
    numeric: Annotated[
        Literal["values", "vectors"],
        Key(
            "results",
            "How dense fields enter the MLP: as values, or as one vector per field, "
            "multiplied by the value.",
        ),
    ] = "values"
    wide: WideConfig = field(default_factory=WideConfig)

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)  # ``super()`` does not work in a class with slots
        if not self.deep and self.wide.is_empty:
            raise ConfigError(
                "model.deep: false leaves nothing to train because model.wide is empty; add, for "
                "example, model.wide.crosses: [[C1, C2]]"
            )
        if self.deep and not self.hidden:
            raise ConfigError("model.hidden: [] has no layers; use, for example, [400, 400]")

    def spec(self, fields: Fields) -> "WdlSpec":
        """Return the model's shapes. Raises ConfigError for columns or crosses not in the data."""
        hashed = _hashed_columns(self.wide, fields)
        crosses = [cross.field() for cross in hashed] or _prepared_crosses(self.wide, fields)
        outputs: list[OutputConfig] = []
        if wide := [*_columns(self.wide.columns, fields), *crosses]:
            one_each = "a wide table has one weight per value"
            outputs.append(
                embedding_output("wide", wide, dim=1, combine="sum", rules=self, fixed_dim=one_each)
            )
        numbers = len(fields.dense)
        each = {"vectors": self.embedding_dim, "values": 1}[self.numeric]
        inputs = numbers * each
        if self.deep and fields.sparse:
            deep = embedding_output("deep", fields.sparse, dim=self.embedding_dim, rules=self)
            outputs.append(deep)
            inputs += deep.width
        mlp = self.mlp("mlp", inputs, self.hidden, outputs=1)
        return WdlSpec(
            outputs=tuple(outputs),
            options=self,
            hashed_columns=hashed,
            mlp=mlp if self.deep else None,
            vectors=vector_specs(numbers, each) if self.deep and self.numeric == "vectors" else {},
            wide_numbers=numbers if self.wide.numeric else 0,
        )


def _columns(names: Sequence[str], fields: Fields) -> list[IdField]:
    by_name = {column.name: column for column in fields.sparse}
    for name in names:
        if name not in by_name:
            raise ConfigError(
                f"model.wide.columns: {name} is not a sparse column of the data; choose from "
                f"{choices(name, by_name)}"
            )
    return [by_name[name] for name in names]


def _hashed_columns(wide: WideConfig, fields: Fields) -> tuple[HashedColumn, ...]:
    if wide.hash_size is None:
        return ()
    usable = [f.name for f in fields.sparse if not f.ragged and f.hotness == 1]
    for name in (name for cross in wide.crosses for name in cross):
        if name not in usable:
            raise ConfigError(
                f"model.wide.crosses: {name} is not a column with one id per row; choose from "
                f"{choices(name, usable)}"
            )
    return tuple(HashedColumn(columns=cross, rows=wide.hash_size) for cross in wide.crosses)


def _prepared_crosses(wide: WideConfig, fields: Fields) -> list[IdField]:
    if wide.hash_size is not None:
        return []
    prepared = {cross.name: cross for cross in fields.crosses}
    sparse = [column.name for column in fields.sparse]
    missing = [cross for cross in wide.crosses if "x".join(cross) not in prepared]
    for cross in missing:
        if unknown := [column for column in cross if column not in sparse]:
            raise ConfigError(
                f"model.wide.crosses: {'x'.join(cross)}: {unknown[0]} is not a sparse column of "
                f"the data; choose from {choices(unknown[0], sparse)}, or remove the wide part "
                "with model.wide.crosses: []"
            )
    for cross in missing:
        name = "x".join(cross)
        for other in permutations(cross):
            if "x".join(other) in prepared:
                raise ConfigError(
                    f"model.wide.crosses: the data contains this cross as {'x'.join(other)}, not "
                    f"as {name}; write [{', '.join(other)}]"
                )
        needed = ",".join("x".join(cross) for cross in wide.crosses)
        raise ConfigError(
            f"model.wide.crosses: the data has no cross {name} (it has "
            f"{', '.join(prepared) or 'none'}); prepare the data again with --crosses {needed}, "
            "let the loader hash crosses with model.wide.hash_size=1000000, or remove the wide "
            "part with model.wide.crosses: []"
        )
    return [prepared["x".join(cross)] for cross in wide.crosses]


@dataclass(frozen=True, kw_only=True)
class WdlSpec(LayeredSpec):
    """The ``ModelSpec`` of a Wide & Deep model for given data fields.

    ``mlp`` is the deep part, or None. ``vectors`` contains the specs of the dense fields' vectors;
    it may be empty. ``wide_numbers`` is the number of dense fields with a weight in the wide part.
    """

    mlp: MlpShape | None
    vectors: Mapping[str, ParameterSpec] = field(default_factory=dict[str, ParameterSpec])
    wide_numbers: int = 0

    @cached_property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Return the specs of the deep part's parameters and the wide weights of dense fields."""
        specs = {**self.vectors}
        if self.mlp is not None:
            specs |= self.mlp.parameters()
        if self.wide_numbers:
            specs |= linear_specs("wide_numeric", self.wide_numbers, 1, bias=False)
        return specs

    def logits(self, layers: Layers[T], vectors: Mapping[str, T], dense: T) -> T:
        """Compute logits: {"wide": [b, 1], "deep": [b, fields x dim]}, dense -> [b, 1]."""
        terms = [vectors["wide"]] if "wide" in vectors else []
        if self.wide_numbers:
            terms.append(layers.linear("wide_numeric", [dense], whole=True))
        if self.mlp is not None:
            numbers = layers.numeric_vectors(dense) if self.vectors else dense
            inputs = [vectors["deep"], numbers] if "deep" in vectors else [numbers]
            terms.append(layers.mlp(self.mlp, inputs))
        return layers.total(terms)

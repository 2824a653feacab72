"""Wide & Deep for click-through rate, written once on logical tensors.

logit = sum of the crosses' weights + MLP(embeddings ++ dense fields). Where anything lives is not
known here: layouts come with the tensors, and the ops insert the conversions. Architecture and
starting values follow OneFlow-Benchmark, wdl_train_eval.py at de4698a7: no wide bias, ReLU and
dropout after every hidden layer, glorot-uniform weights, zero biases, tables U(-0.05, 0.05).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import ModelConfig
from sbpflow.embedding.plan.tables import OutputConfig, TableConfig
from sbpflow.embedding.storage.initial import fill_uniform
from sbpflow.errors import ConfigError
from sbpflow.sbp.layout import Layout
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor, parameter
from sbpflow.tensor.ops.matmul import linear_of_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class WdlSpec:
    """Shapes of a Wide & Deep over given data: what exists, before anything is allocated.

    ``features`` are the id columns of the data: sparse fields, then crosses.
    """

    outputs: tuple[OutputConfig, ...]
    features: tuple[str, ...]
    num_dense: int
    layers: tuple[tuple[int, int], ...]  # (inputs, outputs) of each linear; empty: wide alone
    dropout: float

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each dense parameter."""
        shapes: dict[str, tuple[int, ...]] = {}
        for index, (inputs, outputs) in enumerate(self.layers):
            shapes[f"mlp.{index}.weight"] = (outputs, inputs)
            shapes[f"mlp.{index}.bias"] = (outputs,)
        return shapes

    def tables(self) -> dict[str, TableConfig]:
        """Every embedding table by name."""
        return {table.name: table for output in self.outputs for table in output.tables}


def wdl_spec(
    model: ModelConfig, *, num_dense: int, fields: Mapping[str, int], num_sparse: int
) -> WdlSpec:
    """The shapes of ``model`` over data with these id columns, of which crosses come last.

    Raises ConfigError for a cross that the data does not have, with what would do.
    """
    features = tuple(fields)
    deep = features[:num_sparse] if model.deep else ()
    crosses = tuple("x".join(cross) for cross in model.wide.crosses)
    _check_crosses(model.wide.crosses, features[:num_sparse], features[num_sparse:])
    outputs = [
        _output(name, names, fields, dim, combine)
        for name, names, dim, combine in (
            ("wide", crosses, 1, "sum"),
            ("deep", deep, model.embedding_dim, "concat"),
        )
        if names
    ]
    widths = [len(deep) * model.embedding_dim + num_dense, *model.hidden, 1]
    return WdlSpec(
        outputs=tuple(outputs),
        features=features,
        num_dense=num_dense,
        layers=tuple(pairwise(widths)) if model.deep else (),
        dropout=model.dropout,
    )


def _check_crosses(
    crosses: Sequence[Sequence[str]], sparse: tuple[str, ...], prepared: tuple[str, ...]
) -> None:
    absent = [cross for cross in crosses if "x".join(cross) not in prepared]
    for cross in absent:
        if unknown := [column for column in cross if column not in sparse]:
            raise ConfigError(
                f"model.wide.crosses: {'x'.join(cross)}: {unknown[0]} is no sparse column of the "
                f"data, which has {', '.join(sparse)}; cross those, or leave the wide part out "
                "with model.wide.crosses: []"
            )
    for cross in absent:
        name = "x".join(cross)
        for other in permutations(cross):
            if "x".join(other) in prepared:
                raise ConfigError(
                    f"model.wide.crosses: {name} is in the data as {'x'.join(other)}; write "
                    f"[{', '.join(other)}]"
                )
        wanted = ",".join("x".join(each) for each in crosses)
        raise ConfigError(
            f"model.wide.crosses: {name} is not in the data, which has "
            f"{', '.join(prepared) or 'none'}; prepare it again with --crosses {wanted}, or leave "
            "the wide part out with model.wide.crosses: []"
        )


def _output(
    name: str, features: tuple[str, ...], fields: Mapping[str, int], dim: int, combine: str
) -> OutputConfig:
    return OutputConfig(
        name=name,
        tables=tuple(
            TableConfig(name=f"{name}.{key}", features=(key,), num_rows=fields[key], dim=dim)
            for key in features
        ),
        combine="sum" if combine == "sum" else "concat",
    )


class WideDeep:
    """The dense part of the model on one rank; ``parameters`` are leaves in ``layouts``."""

    def __init__(
        self,
        spec: WdlSpec,
        layouts: Mapping[str, Layout],
        boxing: Boxing,
        *,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self.parameters = {
            name: _parameter(name, shape, layouts[name], boxing, seed=seed, dtype=dtype)
            for name, shape in spec.parameters().items()
        }

    def logits(
        self,
        vectors: Mapping[str, GlobalTensor],
        dense: GlobalTensor,
        *,
        training: bool,
        seed: int,
    ) -> GlobalTensor:
        """{"wide": [batch, 1], "deep": [batch, fields x dim]}, dense [batch, fields] -> [batch, 1].

        ``seed`` decides the dropout masks; pass another one at every step.
        """
        if not self.spec.layers:
            return vectors["wide"]
        inputs = [vectors["deep"], dense]
        last = len(self.spec.layers) - 1
        for index in range(last):
            x = ops.relu(self._linear(index, inputs))
            inputs = [ops.dropout(x, self.spec.dropout, seed + index, training=training)]
        deep = self._linear(last, inputs)
        return ops.add(vectors["wide"], deep) if "wide" in vectors else deep

    def _linear(self, index: int, inputs: Sequence[GlobalTensor]) -> GlobalTensor:
        weight, bias = (self.parameters[f"mlp.{index}.{part}"] for part in ("weight", "bias"))
        return linear_of_parts(inputs, weight, bias, id=f"mlp.{index}")


def _parameter(
    name: str,
    shape: tuple[int, ...],
    layout: Layout,
    boxing: Boxing,
    *,
    seed: int,
    dtype: torch.dtype,
) -> GlobalTensor:
    """This rank's part of a parameter, filled without the rest of it."""
    world = boxing.world
    slices = layout.part_slices(shape, world.rank)
    if slices is None:
        part = torch.empty(0, dtype=dtype, device=world.device)
    else:
        part = torch.zeros([s.stop - s.start for s in slices], dtype=dtype, device=world.device)
        if len(shape) == 2:
            rows, columns = slices
            fill_uniform(
                part,
                seed=seed,
                name=name,
                bound=math.sqrt(6.0 / (shape[0] + shape[1])),
                num_columns=shape[1],
                first_row=rows.start,
                first_column=columns.start,
            )
    return parameter(part, layout, shape, boxing)

"""Define the code that all models share: options, specs, and dense parts made of layers.

A model defines its embedding outputs, its parameters, and ``logits`` in terms of ``Layers``.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import nn

from sbpflow.boxing.executor import Boxing
from sbpflow.config.model_tables import FieldRule, TableShape
from sbpflow.config.parse import MaxEntries
from sbpflow.config.table_rules import Scheme, TableRule
from sbpflow.embedding.plan.tables import OutputConfig
from sbpflow.errors import ConfigError
from sbpflow.models.layers import Layers, MlpShape, Norm, T
from sbpflow.models.plain import PlainModel
from sbpflow.run.model.spec import (
    HashedColumn,
    ParameterSpec,
    make_buffers,
    make_parameters,
    schemes_of,
)
from sbpflow.run.model.torch_model import ShapesOnly, TorchPart, bce_rows
from sbpflow.runtime.compute.compiler import compiler_problem, half_time, keep_compiled_privately
from sbpflow.runtime.fields.keys import Example, Key
from sbpflow.runtime.fields.ranges import Range
from sbpflow.sbp.layout import Layout
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.dense_part import DensePart

Count = Annotated[int, Range(low=1, below=2**24)]
Widths = Annotated[tuple[Count, ...], MaxEntries(256), Example((400, 400))]
Dropout = Annotated[
    float, Range(low=0, below=1), Key("results", "Dropout rate after the ReLU of hidden layers.")
]
EmbeddingDim = Annotated[Count, Key("results", "Number of columns of the embedding tables.")]
Bottom = Annotated[
    Widths,
    Key(
        "results",
        "Widths of the layers of the MLP for dense fields. A final layer of width "
        "embedding_dim is added.",
    ),
]
Hidden = Annotated[Widths, Key("results", "Widths of the hidden layers of the MLP.")]
HALF = {"bf16": torch.bfloat16}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """The options that all models in this package share."""

    dropout: Dropout = 0.0
    norm: Annotated[
        Norm,
        Key("results", "Normalization in hidden layers, between the linear layer and the ReLU."),
    ] = "none"
    autocast: Annotated[
        Literal["bf16"] | None,
        Example("bf16"),
        Key(
            "results",
            "Run linear layers and dot products in bfloat16, with float32 weights. The last "
            "linear layer, norms, the FM term, sums of logits, and the loss still use "
            "float32.",
        ),
    ] = None
    compile: Annotated[
        bool,
        Key(
            "results",
            "Compile the dense part with torch.compile. Cannot be combined with norm: batch"
            " or parallel.dense.",
        ),
    ] = False
    fields: Annotated[
        Mapping[str, FieldRule],
        Example({"*_shop": FieldRule(table="shop")}),
        Key("results", "Shared and growing tables, by pattern of field names."),
    ] = field(default_factory=dict[str, FieldRule])
    tables: Annotated[
        Mapping[str, TableShape],
        Example({"deep.C1": TableShape(dim=8)}),
        Key(
            "results",
            "Options of tables, by pattern of table names. For each key, the last match wins.",
        ),
    ] = field(default_factory=dict[str, TableShape])

    def __post_init__(self) -> None:
        if self.compile and self.norm == "batch":
            raise ConfigError(
                "model.compile: true does not support norm: batch, because batch norm communicates "
                "within the compiled graph; use norm: layer, or compile: false"
            )

    def mlp(self, name: str, inputs: int, hidden: tuple[int, ...], *, outputs: int) -> MlpShape:
        """Return the shape of an MLP with the norm and the dropout of these options."""
        return MlpShape(
            name=name,
            inputs=inputs,
            hidden=hidden,
            outputs=outputs,
            norm=self.norm,
            dropout=self.dropout,
        )


@dataclass(frozen=True, kw_only=True)
class LayeredSpec(ABC):
    """A ``ModelSpec`` made of layers."""

    outputs: tuple[OutputConfig, ...]
    options: ModelOptions
    hashed_columns: tuple[HashedColumn, ...] = ()

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Return the specs of all dense parameters by name."""
        ...

    @property
    def buffers(self) -> Mapping[str, ParameterSpec]:
        """Return the running statistics of all batch norms."""
        mlps = [value for value in vars(self).values() if isinstance(value, MlpShape)]
        return {name: spec for mlp in mlps for name, spec in mlp.buffers().items()}

    @abstractmethod
    def logits(self, layers: Layers[T], vectors: Mapping[str, T], dense: T) -> T:
        """Compute logits [b, 1] from embedding outputs [b, width] and dense fields [b, n]."""
        ...

    @property
    def schemes(self) -> Mapping[Scheme, Mapping[str, TableRule]]:
        """Return the table rules of every scheme."""
        return schemes_of(self.outputs)

    @property
    def splits_parameters(self) -> bool:
        """Return whether parameters may be split; a compiled part needs full copies."""
        return not self.options.compile

    @property
    def half(self) -> torch.dtype | None:
        """Return the compute dtype of linear layers, or None to compute in the weights' dtype."""
        return None if self.options.autocast is None else HALF[self.options.autocast]

    def plain(self, *, seed: int = 0) -> nn.Module:
        """Return the model as a ``PlainModel`` for one process."""
        return PlainModel(self, seed=seed)

    def build(
        self, layouts: Mapping[str, Layout], boxing: Boxing, *, seed: int, dtype: torch.dtype
    ) -> DensePart:
        """Create the dense part on this rank with initialized parameters."""
        if self.half is not None:
            if dtype != torch.float32:
                raise ConfigError(
                    f"model.autocast: {self.options.autocast} requires parallel.dtype: float32, "
                    f"got {str(dtype).removeprefix('torch.')}; use float32, or remove autocast"
                )
            _log_half_speed(self.half, boxing)
        if self.options.compile:
            return self._compiled(layouts, boxing, seed=seed, dtype=dtype)
        parameters = make_parameters(self.parameters, layouts, boxing, seed=seed, dtype=dtype)
        buffers: dict[str, GlobalTensor] = {}
        if self.buffers:
            placement = next(iter(layouts.values())).placement
            buffers = make_buffers(self.buffers, placement, boxing, dtype=dtype)
        return LayeredPart(self, parameters, buffers)

    def _compiled(
        self, layouts: Mapping[str, Layout], boxing: Boxing, *, seed: int, dtype: torch.dtype
    ) -> DensePart:
        device = boxing.world.device
        if boxing.is_dry:
            return ShapesOnly(self.parameters, layouts, boxing, dtype)
        if problem := compiler_problem(device.type):
            raise ConfigError(
                f"model.compile: true is not possible, because {problem}; or use model.compile: "
                "false"
            )
        keep_compiled_privately()
        module = PlainModel(self, seed=seed, dtype=dtype).to(device)
        module.compile()
        return TorchPart(module, layouts, boxing, bce_rows)


class LayeredPart:
    """The dense part of a model on one rank."""

    def __init__(
        self,
        spec: LayeredSpec,
        parameters: Mapping[str, GlobalTensor],
        buffers: Mapping[str, GlobalTensor],
    ) -> None:
        self._spec = spec
        self.parameters = parameters
        self.buffers = buffers

    def forward(
        self,
        vectors: Mapping[str, GlobalTensor],
        dense: GlobalTensor,
        *,
        training: bool,
        seed: int,
    ) -> GlobalTensor:
        """Return logits [batch, 1]; each step needs a new ``seed`` for the dropout masks."""
        layers = Layers(
            functions=ops,
            parameters=self.parameters,
            buffers=self.buffers,
            half=self._spec.half,
            training=training,
            seed=seed,
        )
        return self._spec.logits(layers, vectors, dense)

    def row_losses(self, logits: GlobalTensor, labels: GlobalTensor) -> GlobalTensor:
        """Return the binary cross entropy of each row, [batch, 1]."""
        return ops.bce_with_logits(logits, labels, reduction="none")


def _log_half_speed(half: torch.dtype, boxing: Boxing) -> None:
    if boxing.world.device.type == "cpu" and boxing.world.rank == 0 and not boxing.is_dry:
        ratio = half_time(half)
        logger.info(
            "model.autocast: linear layers in %s take %.2f times as long as in float32 on this "
            "CPU%s",
            str(half).removeprefix("torch."),
            ratio,
            "" if ratio < 1 else "; remove autocast for speed",
        )

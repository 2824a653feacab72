"""Builds TorchRec's own DLRM and DLRM_DCN, and the same models in sbpflow, with equal initial
values.

Weights are copied by name. TorchRec orders the pairs of vectors by rows of the upper triangle, but
sbpflow uses the rows of the lower triangle, so the columns of a layer are reordered.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.click_model import Shape
from sbpflow.models.dcnv2 import DcnV2Config
from sbpflow.models.dlrm import DlrmConfig
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.model.spec import Fields, IdField, ModelConfig, initial_values

CROSSES = 3
MODELS = ("wdl", "dlrm", "dcnv2")


def config_of(model: str, shape: Shape) -> ModelConfig:
    """Return the configuration of a model, with the embedding and hidden sizes of ``shape``."""
    if model == "dlrm":
        return DlrmConfig(embedding_dim=shape.dim, bottom=(shape.hidden,), top=(shape.hidden,))
    if model == "dcnv2":
        return DcnV2Config(
            embedding_dim=shape.dim,
            cross_layers=CROSSES,
            cross_rank=shape.hidden,
            structure="stacked",
            numeric="bottom",
            bottom=(shape.hidden,),
            hidden=(shape.hidden,),
        )
    return WdlConfig(
        embedding_dim=shape.dim,
        hidden=(shape.hidden,),
        dropout=0.0,
        wide=WideConfig(crosses=()),
    )


def fields_of(shape: Shape) -> Fields:
    """Return the batch columns of ``shape``."""
    return Fields(
        dense=tuple(f"I{index + 1}" for index in range(shape.num_dense)),
        sparse=tuple(
            IdField(name=name.removeprefix("deep."), rows=shape.table_rows, hotness=count)
            for name, count in zip(shape.names, shape.hotness, strict=True)
        ),
    )


def make_torchrec(model: str, tables: nn.Module, shape: Shape, seed: int) -> nn.Module:
    """Return TorchRec's model with these ``tables``; forward(dense, ids) returns logits of shape
    [b, 1].
    """
    from torchrec.models.dlrm import DLRM, DLRM_DCN

    below, above = [shape.hidden, shape.dim], [shape.hidden, 1]
    if model == "dlrm":
        made = DLRM(tables, shape.num_dense, below, above)
    else:
        made = DLRM_DCN(tables, shape.num_dense, below, above, CROSSES, shape.hidden)
    specs = config_of(model, shape).spec(fields_of(shape)).parameters
    values = {name: initial_values(name, spec, seed=seed) for name, spec in specs.items()}
    if model == "dlrm":
        values["top.0.weight"] = _upper_order(values["top.0.weight"], shape)
    own = dict(made.named_parameters())
    with torch.no_grad():
        for name, value in _by_its_names(model, values).items():
            own[name].copy_(value.view_as(own[name]))
    return made


def _upper_order(weight: Tensor, shape: Shape) -> Tensor:
    """Reorder the pair columns of ``weight`` ([n, dim + pairs]) from rows of the lower triangle to
    rows of the upper triangle.
    """
    count = shape.num_tables + 1
    place = {pair: n for n, pair in enumerate((i, j) for i in range(count) for j in range(i))}
    upper = [place[j, i] for i in range(count) for j in range(i + 1, count)]
    columns = [*range(shape.dim), *(shape.dim + n for n in upper)]
    return weight[:, columns]


def _by_its_names(model: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    top = "top" if model == "dlrm" else "mlp"
    found: dict[str, Tensor] = {}
    for what in ("weight", "bias"):
        for layer in (0, 1):
            name = f"dense_arch.model._mlp.{layer}._linear.{what}"
            found[name] = values[f"bottom.{layer}.{what}"]
        found[f"over_arch.model.0._mlp.0._linear.{what}"] = values[f"{top}.0.{what}"]
        found[f"over_arch.model.1.{what}"] = values[f"{top}.1.{what}"]
    for layer in range(CROSSES if model == "dcnv2" else 0):
        cross = "inter_arch.crossnet"
        found[f"{cross}.V_kernels.{layer}"] = values[f"cross.{layer}.v.weight"]
        found[f"{cross}.W_kernels.{layer}"] = values[f"cross.{layer}.w.weight"]
        found[f"{cross}.bias.{layer}"] = values[f"cross.{layer}.w.bias"]
    return found


def dense_of_torchrec(made: nn.Module, dense: Tensor, vectors: Tensor) -> Tensor:
    """Compute logits from embeddings ([b, tables, dim]) with the dense part of TorchRec's
    models.
    """
    first = made.dense_arch(dense)
    return made.over_arch(made.inter_arch(dense_features=first, sparse_features=vectors))

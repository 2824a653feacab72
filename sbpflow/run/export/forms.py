"""Writes optional files of a bundle that contain code or need another runtime.

``model.pt2`` contains the whole model as a ``torch.export`` program. ``dense.pt2`` contains the
dense part as machine code, and ``dense.onnx`` contains it as ONNX. Both dense files take the
weights as inputs, so that weights updated by a delta take effect.
"""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbpflow.errors import ConfigError
from sbpflow.run.export.bundle import BundleModel, add_facts
from sbpflow.run.export.graph import example_inputs as dense_inputs
from sbpflow.run.export.graph import first_names
from sbpflow.run.export.plain_model import Bag, PlainModel
from sbpflow.serving.scorer import COMPILED, cpu_features

_EXAMPLE_ROWS = 2  # ``torch.export`` treats sizes 0 and 1 as constants


class Functional(nn.Module):
    """Wraps a dense part as a function of the embedding output vectors, the dense fields, and the
    weights.
    """

    def __init__(self, dense: nn.Module, outputs: tuple[str, ...], names: tuple[str, ...]) -> None:
        super().__init__()
        # In a list, so that this module does not register the weights of ``dense``.
        self._dense = [dense]
        self._outputs, self._names = outputs, names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Compute logits from the vectors of each output [rows, width], the dense fields [rows,
        fields], and the weights.
        """
        count = len(self._outputs)
        vectors = dict(zip(self._outputs, inputs, strict=False))
        weights = dict(zip(self._names, inputs[count + 1 :], strict=True))
        return torch.func.functional_call(self._dense[0], weights, (vectors, inputs[count]))


def _functional(model: BundleModel) -> tuple[Functional, tuple[Tensor, ...], Any, dict[str, Any]]:
    """Return the module, its example inputs, their dynamic shapes, and their names."""
    widths = {output.name: output.width for output in model.plan.outputs}
    first = first_names(model.dense)
    weights = {name: v for name, v in model.dense.state_dict().items() if first[name] == name}
    module = Functional(model.dense, tuple(widths), tuple(weights))
    inputs = dense_inputs(widths, model.num_dense, model.plan.dtype)
    rows = torch.export.Dim("rows")
    shapes = tuple({0: rows} for _ in inputs) + tuple(None for _ in weights)
    names = {"inputs": [f"vectors.{name}" for name in widths] + ["dense"], "weights": [*weights]}
    return module, (*inputs, *weights.values()), (shapes,), names


def write_compiled(folder: Path, model: BundleModel) -> None:
    """Compile the dense part to machine code for this CPU, which takes minutes."""
    module, inputs, shapes, names = _functional(model)
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=shapes)
        inductor: Any = importlib.import_module("torch._inductor")
        inductor.aoti_compile_and_package(program, package_path=str(folder / COMPILED))
    made = {"cpu": sorted(cpu_features()), "torch": torch.__version__.split("+")[0]}
    add_facts(folder, {"compiled": {**made, **names}})


def write_onnx(folder: Path, model: BundleModel) -> None:
    """Write the dense part as ONNX, with the weights as inputs."""
    try:
        importlib.import_module("onnxscript")
    except ImportError as error:
        raise ConfigError(
            f"--onnx: onnxscript is not installed ({error}); run pip install 'sbpflow[onnx]'"
        ) from error
    module, inputs, shapes, names = _functional(model)
    with torch.no_grad():
        torch.onnx.export(
            module.eval(),
            inputs,
            folder / "dense.onnx",
            input_names=[*names["inputs"], *(f"dense/{name}" for name in names["weights"])],
            output_names=["logits"],
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def write_pt2(folder: Path, model: PlainModel) -> None:
    """Write the whole model as a ``torch.export`` program."""
    torch.export.save(exported(model), folder / "model.pt2")


def exported(model: PlainModel) -> torch.export.ExportedProgram:
    """Trace the model for any number of rows, and any number of ids in bags."""
    ids, dense, bags = example_inputs(model)
    rows = torch.export.Dim("rows")
    sizes = {
        name: tuple({0: torch.export.Dim(f"num_ids_{number}")} for _ in bag)
        for number, (name, bag) in enumerate(bags.items())
    }
    shapes = {
        "ids": {0: rows},
        "dense": {0: rows},
        "bags": {name: (size[0], {0: rows}, *size[2:]) for name, size in sizes.items()},
    }
    with torch.no_grad():
        return torch.export.export(model, (ids, dense, bags), dynamic_shapes=shapes)


def example_inputs(model: PlainModel) -> tuple[Tensor, Tensor, dict[str, Bag]]:
    """Return inputs of two rows in which every id is 0."""
    bags: dict[str, Bag] = {}
    for feature in model.features:
        if feature.name not in model.columns:
            values = torch.zeros(_EXAMPLE_ROWS + 1, dtype=model.ids_dtype)
            lengths = torch.tensor([1, _EXAMPLE_ROWS], dtype=torch.int32)
            weights = (torch.ones(values.shape),) if feature.weighted else ()
            bags[feature.name] = (values, lengths, *weights)
    columns = max((place.stop for place in model.columns.values()), default=0)
    ids = torch.zeros(_EXAMPLE_ROWS, columns, dtype=model.ids_dtype)
    return ids, torch.zeros(_EXAMPLE_ROWS, model.num_dense), bags

"""Converts the dense part of a model to the list of torch operations in a bundle's model.json.

The list is obtained by tracing the module with ``torch.export``. A bundle runs the listed
operations in the same order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from sbpflow.errors import ConfigError
from sbpflow.serving.operations import OPERATIONS

_ROWS = 2  # ``torch.export`` treats sizes 0 and 1 as constants
_DEFAULTS = ("device", "pin_memory", "layout")


class DenseInputs(nn.Module):
    """Wraps a dense part so that its arguments are the embedding output vectors, then the dense
    fields.
    """

    def __init__(self, dense: nn.Module, outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.dense = dense
        self._outputs = outputs

    def forward(self, *inputs: Tensor) -> Tensor:
        """Compute logits from the vectors of each output [rows, width] and the dense fields [rows,
        fields].
        """
        return self.dense(dict(zip(self._outputs, inputs, strict=False)), inputs[-1])


def example_inputs(
    widths: Mapping[str, int], num_dense: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return inputs for ``DenseInputs``: two rows of zeros."""
    return tuple(torch.zeros(_ROWS, n, dtype=dtype) for n in (*widths.values(), num_dense))


def graph_of(
    dense: nn.Module, widths: Mapping[str, int], num_dense: int, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the dense part as JSON, and its weights and constants by name.

    ``widths`` are the widths of the embedding outputs. Raises ConfigError for a module that cannot
    be traced, or an operation that bundles do not support.
    """
    module, rows = DenseInputs(dense, tuple(widths)), torch.export.Dim("rows")
    inputs = example_inputs(widths, num_dense, dtype)
    shapes = tuple({0: rows} for _ in inputs)
    try:
        with torch.no_grad():
            program = torch.export.export(module, inputs, dynamic_shapes=(shapes,))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model: torch.export cannot trace the dense part: {str(error).splitlines()[0]}; "
            "use only torch operations, without Python branches on values"
        ) from error
    names = [*(f"vectors.{name}" for name in widths), "dense"]
    try:
        return _content(program, names, dense)
    except ConfigError:
        # Removing in-place operations and decomposing compound ones may leave only supported
        # operations.
        return _content(program.run_decompositions({}), names, dense)


def _content(
    program: torch.export.ExportedProgram, names: Sequence[str], dense: nn.Module
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    inputs: dict[str, str] = {}
    weights: dict[str, str] = {}
    values = {name: value.contiguous() for name, value in dense.state_dict().items()}
    names_of = first_names(dense)
    given = iter(names)
    for spec in program.graph_signature.input_specs:
        node = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            inputs[next(given)] = node
            continue
        name = str(spec.target).removeprefix("dense.")
        name = names_of.get(name, name)
        if name not in values:
            constant = program.constants[str(spec.target)]
            if not isinstance(constant, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(constant).__name__}")
            values[name] = constant.contiguous()
        weights[node] = name
    (result,) = next(node for node in program.graph.nodes if node.op == "output").args[0]
    nodes: list[list[Any]] = []
    needed = {result.name}
    # Leave out nodes that do not affect the result, such as assertions.
    for node in reversed(list(program.graph.nodes)):
        if node.name not in needed or node.op == "placeholder":
            continue
        nodes.append([_name(node), node.name, _encoded(node.args), _encoded(_kwargs(node))])
        needed |= {each.name for each in node.all_input_nodes}
    content = {
        "inputs": inputs,
        "weights": {node: name for node, name in weights.items() if node in needed},
        "nodes": nodes[::-1],
        "output": result.name,
    }
    return content, values


def first_names(dense: nn.Module) -> dict[str, str]:
    """Return, for each name of a parameter or buffer, the first name of the same tensor, which is
    its only name in checkpoints, and thus in deltas.
    """
    named = [
        *dense.named_parameters(remove_duplicate=False),
        *dense.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in named}


def _kwargs(node: torch.fx.Node) -> dict[str, Any]:
    return {name: value for name, value in node.kwargs.items() if name not in _DEFAULTS}


def _name(node: torch.fx.Node) -> str:
    """Return the name of a node's operation in the bundle."""
    target = node.target
    space, _, rest = str(target).partition(".")
    base = rest.partition(".")[0]
    if space == "aten" and base == "sym_size":
        return "python.sym_size"
    if space == "aten" and base in OPERATIONS:
        return str(target)
    if getattr(target, "__module__", "") == "_operator":
        return f"python.{getattr(target, '__name__', target)}"
    raise ConfigError(
        f"model: the dense part uses the operation {target}, which bundles do not support; use "
        "other torch operations (for example, those of torch.nn.functional)"
    )


def _encoded(value: Any) -> Any:
    """Return an argument of a node as JSON."""
    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    if isinstance(value, tuple | list):
        return [_encoded(each) for each in value]
    if isinstance(value, dict):
        return {name: _encoded(each) for name, each in value.items()}
    if isinstance(value, torch.dtype | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not float("-inf") < value < float("inf"):
        return {"number": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"model: the dense part calls an operation with a {type(value).__name__}, which bundles do "
        "not support; use numbers and tensors"
    )

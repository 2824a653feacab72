"""Runs the dense part of a bundle, which is a list of torch operations in model.json.

Only the operations in ``OPERATIONS`` and ``_PYTHON`` are allowed, so a bundle cannot run other
code. A bundle contains the operations that the trained module calls, so on the same machine the
results are bitwise equal.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

OPERATIONS = frozenset(
    "_softmax _to_copy abs add addcdiv addcmul addmm alias amax amin arange argmax argmin "
    "avg_pool1d avg_pool2d baddbmm batch_norm bilinear bmm cat ceil celu chunk clamp clamp_max "
    "clamp_min clone concat contiguous conv1d conv2d convolution cos cosine_similarity cumsum "
    "detach diagonal div dot dropout einsum elu embedding embedding_bag empty_like eq erf exp "
    "expand expand_as expm1 eye feature_dropout fill flatten flip floor floor_divide full "
    "full_like gather ge gelu glu group_norm gt hardsigmoid hardswish hardtanh index index_add "
    "index_select instance_norm isfinite isinf isnan layer_norm le leaky_relu lerp lift_fresh_copy "
    "linalg_vector_norm linear log log10 log1p log2 log_sigmoid log_softmax logical_and "
    "logical_not logical_or logsumexp lt masked_fill matmul max max_pool1d max_pool2d maximum mean "
    "min minimum mish mm movedim mul mv narrow ne neg new_empty new_full new_ones new_zeros norm "
    "normalize ones ones_like outer permute pow prelu prod reciprocal relu relu6 remainder repeat "
    "repeat_interleave reshape rms_norm roll round rsqrt rsub scalar_tensor "
    "scaled_dot_product_attention scatter scatter_add select select_scatter selu sigmoid sign silu "
    "sin slice slice_scatter softmax softplus sort split split_with_sizes sqrt square squeeze "
    "stack std sub sum swapaxes t take tan tanh tensordot tile to topk transpose tril tril_indices "
    "triu triu_indices type_as unbind unfold unsqueeze upsample_nearest1d var var_mean view "
    "view_as where zeros zeros_like".split()
)
"""The torch operations that a dense part may use. Outside training, none of them has side effects
or draws random numbers.
"""


def _size(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim]


_PYTHON: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
    "sym_size": _size,
}

_DROPOUT = torch.ops.aten.dropout.default
_Step = tuple[Callable[..., Any], str, Any, Any]

# torch's Python functions for the same operations; calling these functions saves 1 to 2
# microseconds per call.
_FAST: dict[str, Callable[..., Any]] = {
    "add.Tensor": torch.add,
    "cat.default": torch.cat,
    "linear.default": torch.nn.functional.linear,
    "mul.Tensor": torch.mul,
    "relu.default": torch.relu,
    "sigmoid.default": torch.sigmoid,
    "sub.Tensor": torch.sub,
}


class BundleError(ValueError):
    """Raised if a bundle is damaged or lacks what a call needs, if a change does not fit it, or if
    its scores on this machine differ from the stored scores.
    """


class Graph:
    """A dense part: torch operations on inputs and weights. Operations that depend only on weights
    run once, in ``bind``.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self._steps = [
            (_operation(name), out, args, kwargs) for name, out, args, kwargs in content["nodes"]
        ]

    def bind(self, weights: Mapping[str, Tensor]) -> "BoundGraph":
        """Return a callable graph with these weights, given by name."""
        values: dict[str, Any] = {
            node: weights[name] for node, name in self._content["weights"].items()
        }
        late: list[_Step] = []
        inputs = set(self._content["inputs"].values())
        for run, out, args, kwargs in self._steps:
            if not inputs.isdisjoint(_refs([args, kwargs])):
                inputs.add(out)
                late.append((run, out, args, kwargs))
            else:
                values[out] = run(*_filled(args, values), **_filled(kwargs, values))
        steps, output = _simplified(late, self._content["output"])
        return BoundGraph(self._content["inputs"], output, steps, values)


def _simplified(steps: list[_Step], output: str) -> tuple[list[_Step], str]:
    """Return faster steps with the same results, and the name of the output. Dropout, which has no
    effect outside training, is removed, and relu after linear works in place.
    """
    kept: list[_Step] = []
    names: dict[str, str] = {}
    for run, out, given, kwargs in steps:
        args = _renamed(given, names)
        if run is _DROPOUT and args[2:] == [False]:
            names[out] = args[0]["ref"]
        else:
            kept.append((run, out, args, _renamed(kwargs, names)))
    output = names.get(output, output)
    uses = Counter(name for _, _, *args in kept for name in _refs(args))
    uses[output] += 1
    fresh = {out for run, out, *_ in kept if run is torch.nn.functional.linear}
    for number, (run, out, args, kwargs) in enumerate(kept):
        if run is torch.relu and args[0]["ref"] in fresh and uses[args[0]["ref"]] == 1:
            kept[number] = (torch.relu_, out, args, kwargs)
    return kept, output


class BoundGraph:
    """A graph with its weights; call it with a mapping of the vectors by name and the dense
    fields.
    """

    def __init__(
        self, inputs: Mapping[str, str], output: str, steps: Sequence[_Step], values: dict[str, Any]
    ) -> None:
        self._inputs, self._output = inputs, output
        used = {output, *(name for _, _, *args in steps for name in _refs(args))}
        self._values = {name: value for name, value in values.items() if name in used}
        self._steps = [
            (run, out, _arguments(args), _filler(kwargs) if kwargs else None)
            for run, out, args, kwargs in steps
        ]

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        values: dict[str, Any] = self._values.copy()
        for name, node in self._inputs.items():
            values[node] = inputs[name]
        for run, out, args, kwargs in self._steps:
            values[out] = run(*args(values), **kwargs(values)) if kwargs else run(*args(values))
        return values[self._output]


def _operation(name: str) -> Callable[..., Any]:
    """Return the function of the operation ``name``; raise BundleError if it is not
    allowed.
    """
    kind, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    if kind == "python" and base in _PYTHON:
        return _PYTHON[base]
    if kind != "aten" or base not in OPERATIONS or "out" in overload:
        raise BundleError(f"model.json: {name} is not an operation that bundles may use")
    if rest in _FAST:
        return _FAST[rest]
    packet = getattr(torch.ops.aten, base)
    return cast("Callable[..., Any]", getattr(packet, overload))


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        content = cast("dict[str, Any]", value)
        yield from [content["ref"]] if "ref" in content else _refs(list(content.values()))
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _refs(each)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(each, names) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    content = cast("dict[str, Any]", value)
    if "ref" in content:
        return {"ref": names.get(content["ref"], content["ref"])}
    return {key: _renamed(each, names) for key, each in content.items()}


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Return an argument from model.json with references, dtypes, and special numbers replaced by
    their values.
    """
    if isinstance(value, list):
        return [_filled(each, values) for each in value]
    if not isinstance(value, dict):
        return value
    if "ref" in value:
        return values[value["ref"]]
    if "torch" in value:
        constant = getattr(torch, value["torch"], None)
        if not isinstance(constant, torch.dtype | torch.memory_format):
            raise BundleError(f"model.json: {value['torch']} is not a dtype or a memory format")
        return constant
    if "number" in value:  # JSON has no inf, -inf, or nan
        return float(value["number"])
    return {name: _filled(each, values) for name, each in value.items()}


def _arguments(args: list[Any]) -> Callable[[dict[str, Any]], Any]:
    """Return a function that quickly maps a request's values to positional arguments."""
    if len(args) > 1 and all(isinstance(each, dict) and "ref" in each for each in args):
        return operator.itemgetter(*(each["ref"] for each in args))
    return _filler(args)


def _filler(value: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function that computes ``_filled(value, values)`` from a request's ``values``, but
    faster.
    """
    if not any(_refs(value)):
        fixed = _filled(value, {})
        return lambda values: fixed
    if isinstance(value, dict) and "ref" in value:
        return operator.itemgetter(value["ref"])
    if isinstance(value, list):
        parts = [_filler(each) for each in cast("list[Any]", value)]
        return lambda values: [part(values) for part in parts]
    content = cast("dict[str, Any]", value)
    named = {name: _filler(each) for name, each in content.items()}
    return lambda values: {name: part(values) for name, part in named.items()}

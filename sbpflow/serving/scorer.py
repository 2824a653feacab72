"""Loads an exported bundle and scores raw rows; needs only torch and numpy.

    from scorer import load

    scores = load("out/model").score([{"I1": 1, "C1": "68fd1e64", ...}])

``sbpflow export`` writes this module, with the modules that it uses, as ``scorer.py`` of a bundle.
A bundle contains JSON and safetensors, which cannot run code; files with code are loaded only with
``compiled=True``. The dense part is a list of torch operations from the fixed list ``OPERATIONS``.
"""

import json
import math
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.serving.cells import hashed_ids, mixed_bits
from sbpflow.serving.encoder import Array, Column, Encoded, Encoder, Vocabularies

FORMAT, VERSION = "sbpflow-model", 2
TOLERANCE = 1e-6
OPERATIONS = frozenset(
    "_softmax _to_copy abs add addcdiv addcmul addmm alias amax amin arange argmax argmin "
    "avg_pool1d avg_pool2d baddbmm batch_norm bmm cat celu ceil chunk clamp clamp_max clamp_min "
    "clone concat contiguous conv1d conv2d convolution cos cosine_similarity cumsum detach "
    "diagonal div dot dropout einsum elu embedding embedding_bag empty_like eq erf exp expand "
    "expand_as expm1 eye feature_dropout flatten flip floor floor_divide full full_like gather "
    "ge gelu glu group_norm gt hardsigmoid hardswish hardtanh index index_add index_select "
    "instance_norm isfinite isinf isnan layer_norm le leaky_relu lerp lift_fresh_copy "
    "linalg_vector_norm linear log log10 log1p log2 log_sigmoid log_softmax logical_and "
    "logical_not logical_or logsumexp lt masked_fill matmul max max_pool1d max_pool2d maximum "
    "mean min minimum mish mm movedim mul mv narrow ne neg new_empty new_full new_ones "
    "new_zeros norm normalize ones ones_like outer permute pow prelu prod reciprocal relu relu6 "
    "remainder repeat repeat_interleave reshape rms_norm roll round rsqrt rsub scalar_tensor "
    "scaled_dot_product_attention scatter scatter_add select selu sigmoid sign silu sin slice "
    "softmax softplus sort split split_with_sizes sqrt square squeeze stack std sub sum "
    "swapaxes t take tan tanh tensordot tile to topk transpose tril tril_indices triu "
    "triu_indices type_as unbind unfold unsqueeze upsample_nearest1d var var_mean view view_as "
    "where zeros zeros_like".split()
)
"""The torch operations that a dense part may use; none of them has effects or draws numbers"""
_PYTHON: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
    "sym_size": lambda tensor, dim: tensor.shape[dim],
}
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
           "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
           "U32": "uint32", "U64": "uint64", "BOOL": "bool"}  # fmt: skip


class BundleError(ValueError):
    """A bundle is damaged, or its scores on this machine differ from its sample scores."""


class Version(NamedTuple):
    """The origin of a model's values: run ID, training step, and number of the delta."""

    run: str
    step: int
    delta: int = 0


class Tensors:
    """The arrays of a safetensors file, mapped into memory."""

    def __init__(self, file: Path) -> None:
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
        except (OSError, ValueError) as error:
            raise BundleError(
                f"{file}: cannot be read ({error}); export the bundle again"
            ) from error
        self._start, self._file = 8 + size, file
        header.pop("__metadata__", None)
        self.entries: dict[str, Any] = header
        self._bytes = np.memmap(file, dtype=np.uint8, mode="c")
        ends = [entry["data_offsets"][1] for entry in header.values()]
        if len(self._bytes) != self._start + max(ends, default=0):
            raise BundleError(f"{file}: has {len(self._bytes):,} bytes; export the bundle again")

    def array(self, *names: str) -> Array:
        """Return an array, or arrays that are neighbors in the file as one array by rows."""
        entries = [self.entries[name] for name in names]
        first, last = entries[0]["data_offsets"][0], entries[-1]["data_offsets"][1]
        kind = {"BF16": "uint16"}.get(entries[0]["dtype"], _DTYPES[entries[0]["dtype"]])
        flat = self._bytes[self._start + first : self._start + last].view(kind)
        if len(entries) == 1:
            return flat.reshape(entries[0]["shape"])
        return flat.reshape(-1, *entries[0]["shape"][1:])

    def tensor(self, *names: str) -> Tensor:
        """Return ``array`` as a tensor without copying."""
        tensor = torch.from_numpy(self.array(*names))
        return tensor.view(torch.bfloat16) if self.entries[names[0]]["dtype"] == "BF16" else tensor


def quantized(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize [n, dim] float32 to uint8 [n, dim], scale [n] and low [n], within half a step."""
    low, high = rows.aminmax(dim=1)
    scale = (high - low) / 255
    step = torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    values = ((rows - low.unsqueeze(1)) / step).round().clamp(0, 255)
    return values.to(torch.uint8), scale, low


class Graph:
    """A dense part: torch operations over its inputs and weights.

    Operations that depend on weights alone run once, in ``bind``.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self._steps = [
            (_operation(name), out, args, kwargs) for name, out, args, kwargs in content["nodes"]
        ]

    def bind(self, weights: Mapping[str, Tensor]) -> "BoundGraph":
        """Return the graph with the weights by name."""
        values: dict[str, Any] = {
            node: weights[name] for node, name in self._content["weights"].items()
        }
        late: list[tuple[Callable[..., Any], str, Any, Any]] = []
        inputs = set(self._content["inputs"].values())
        for run, out, args, kwargs in self._steps:
            if _refs([args, kwargs]) & inputs:
                inputs.add(out)
                late.append((run, out, args, kwargs))
            else:
                values[out] = run(*_filled(args, values), **_filled(kwargs, values))
        return BoundGraph(self._content["inputs"], self._content["output"], late, values)


class BoundGraph:
    """A graph with its weights; call it with the vectors by name and the dense fields."""

    def __init__(
        self, inputs: Mapping[str, str], output: str, steps: Sequence[Any], values: dict[str, Any]
    ) -> None:
        self._inputs, self._output, self._values = inputs, output, values
        self._steps = [
            (run, out, _filler(args, values), _filler(kwargs, values))
            for run, out, args, kwargs in steps
        ]

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        values: dict[str, Any] = {node: inputs[name] for name, node in self._inputs.items()}
        for run, out, args, kwargs in self._steps:
            values[out] = run(*args(values), **kwargs(values))
        output: Tensor = values.get(self._output, self._values.get(self._output))
        return output


def _operation(name: str) -> Callable[..., Any]:
    """Return the function of a node; raise BundleError unless it is in the fixed list."""
    kind, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    if kind == "python" and base in _PYTHON:
        return _PYTHON[base]
    if kind != "aten" or base not in OPERATIONS or "out" in overload:
        raise BundleError(f"model.json: {name} is not an operation that bundles may use")
    packet = getattr(torch.ops.aten, base)
    return cast("Callable[..., Any]", getattr(packet, overload))


def _refs(value: Any) -> set[str]:
    if isinstance(value, dict):
        if "ref" in value:
            return {value["ref"]}
        return set().union(*map(_refs, value.values()))
    return set().union(*map(_refs, value)) if isinstance(value, list) else set()


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Return an argument with references, dtypes, and special numbers replaced by their values."""
    if isinstance(value, list):
        return [_filled(each, values) for each in value]
    if not isinstance(value, dict):
        return value
    if "ref" in value:
        return values[value["ref"]]
    if "torch" in value:  # a dtype or a memory format
        return getattr(torch, value["torch"])
    if "number" in value:  # inf, -inf and nan are not JSON
        return float(value["number"])
    return {name: _filled(each, values) for name, each in value.items()}


def _filler(value: Any, constants: Mapping[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Return a fast function from the values of a request to ``_filled`` arguments."""
    if not _refs(value) - constants.keys():
        fixed = _filled(value, constants)
        return lambda values: fixed
    if isinstance(value, dict) and "ref" in value:
        return operator.itemgetter(value["ref"])
    if isinstance(value, list):
        parts = [_filler(each, constants) for each in value]
        return lambda values: [part(values) for part in parts]
    named = {name: _filler(each, constants) for name, each in value.items()}
    return lambda values: {name: part(values) for name, part in named.items()}


class Store:
    """The rows of all tables of one width and format, and the rows that deltas have changed.

    ``base`` is mapped from the bundle. A changed row gets a free slot of ``extra``, which versions
    share: a version reads only the slots of its own ``slots``, [rows] int32, where slots from
    ``num_rows`` on are in ``extra``. A slot becomes free when no version uses it.
    """

    def __init__(self, base: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._base, self._dtype = tuple(base), dtype
        self.num_rows = base[0].shape[0]
        self._slots: Tensor | None = None
        self._extra: tuple[Tensor, ...] = tuple(part[:0] for part in base)
        self._versions: weakref.WeakSet[Store] = weakref.WeakSet()

    def gather(self, rows: Tensor) -> Tensor:
        """Return rows int64 [n] as [n, dim] of the compute dtype."""
        if self._slots is None:
            return self._values([part.index_select(0, rows) for part in self._base])
        slots = self._slots.index_select(0, rows)
        changed = (slots >= self.num_rows).nonzero().reshape(-1)
        found = [part.index_select(0, rows) for part in self._base]
        if len(changed):
            at = slots.index_select(0, changed) - self.num_rows
            for part, extra in zip(found, self._extra, strict=True):
                part.index_copy_(0, changed, extra.index_select(0, at))
        return self._values(found)

    def _values(self, parts: Sequence[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0].to(self._dtype)
        values, scale, low = parts
        return (values.float() * scale.unsqueeze(1) + low.unsqueeze(1)).to(self._dtype)

    def with_rows(self, rows: Tensor, values: Tensor) -> "Store":
        """Return a store in which ``rows`` int64 [n], without repetitions, have ``values``."""
        parts = (values.to(self._base[0].dtype),)
        if len(self._base) > 1:
            parts = quantized(values.float())
        new = Store(self._base, self._dtype)
        new._versions = self._versions
        if self._slots is None:
            new._slots = torch.arange(self.num_rows, dtype=torch.int32)
        else:
            new._slots = self._slots.clone()
        slots = self._free_slots(len(rows))
        used, size = len(self._extra[0]), int(slots.max()) + 1 if len(slots) else 0
        new._extra = self._extra
        if size > used:
            more = max(size - used, used // 2)
            new._extra = tuple(
                torch.cat([part, part.new_empty(more, *part.shape[1:])]) for part in self._extra
            )
        for part, changed in zip(new._extra, parts, strict=True):
            part.index_copy_(0, slots, changed)
        new._slots.index_copy_(0, rows, (slots + self.num_rows).to(torch.int32))
        new._versions.add(new)
        return new

    def _free_slots(self, count: int) -> Tensor:
        """Return slots of ``extra`` that no living version uses, first those before its end."""
        used = torch.zeros(len(self._extra[0]), dtype=torch.bool)
        for version in list(self._versions):
            if version._slots is not None:
                used[version._slots[version._slots >= self.num_rows] - self.num_rows] = True
        free = (~used).nonzero().reshape(-1)[:count]
        return torch.cat([free, torch.arange(len(used), len(used) + count - len(free))])


class _Lookup(NamedTuple):
    """The rows of one feature in one table of a store."""

    output: int
    place: int
    first: int
    rows: int
    dim: int
    columns: tuple[int, int] | None
    """Columns of the ids, or None for a ragged feature"""
    feature: str
    averages: bool


@dataclass(frozen=True)
class Model:
    """A bundle in memory; ``with_changes`` returns a new model and leaves this one as it is."""

    version: Version
    sample: Mapping[str, Any]
    content: Mapping[str, Any]
    encoder: Encoder | None
    stores: tuple[Store, ...]
    weights: Mapping[str, Tensor]
    graph: Graph
    dense: Callable[[Mapping[str, Tensor]], Tensor]
    lookups: tuple[tuple[_Lookup, ...], ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the columns of raw rows, in the order of text lines."""
        return self._encoder().columns

    def score(self, rows: object) -> NDArray[np.float32]:
        """Return the probabilities float32 [n] of dicts, a data frame, or text lines."""
        return self.score_encoded(self.encode(rows))

    def encode(self, rows: object) -> Encoded:
        """Return the ids and dense values of raw rows; raise RowError for the first bad row."""
        return self._encoder().encode(rows)

    def encode_columns(self, columns: Mapping[str, Any]) -> Encoded:
        """Encode columns by name: numpy arrays (also masked) or lists of cells."""
        return self._encoder().encode_columns(columns)

    def _encoder(self) -> Encoder:
        if self.encoder is None:
            raise BundleError(
                "the model was trained on a set without vocabularies, so raw rows have no ids; "
                "use score_encoded with ids, or train on a set of `sbpflow prepare`"
            )
        return self.encoder

    def score_encoded(self, encoded: Encoded) -> NDArray[np.float32]:
        """Return the probabilities float32 [n] of encoded rows."""
        logits = self.logits(encoded).numpy().astype(np.float64)
        with np.errstate(over="ignore"):  # a large negative logit overflows exp; 1 / inf is 0
            return (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)

    @torch.inference_mode()
    def logits(self, encoded: Encoded) -> Tensor:
        """Return the logits [n] of encoded rows."""
        dtype = getattr(torch, self.content["dtype"])
        ids = self._with_hashed(encoded.ids)
        parts: list[dict[int, Tensor]] = [{} for _ in self.content["outputs"]]
        for store, lookups in zip(self.stores, self.lookups, strict=True):
            wanted = [self._rows(lookup, ids, encoded) for lookup in lookups]
            flat = np.concatenate([rows.reshape(-1) for rows in wanted])
            vectors = store.gather(torch.from_numpy(flat))
            start = 0
            for lookup, rows in zip(lookups, wanted, strict=True):
                own = vectors[start : start + rows.size]
                start += rows.size
                parts[lookup.output][lookup.place] = _pooled(
                    lookup, own, rows.shape, encoded, dtype
                )
        inputs: dict[str, Tensor] = {"dense": torch.from_numpy(encoded.dense).to(dtype)}
        for output, pieces in zip(self.content["outputs"], parts, strict=True):
            ordered = [pieces[place] for place in sorted(pieces)]
            joined = torch.stack(ordered).sum(0) if output["sums"] else torch.cat(ordered, 1)
            inputs["vectors." + output["name"]] = joined if len(ordered) > 1 else ordered[0]
        return self.dense(inputs).reshape(-1).float()

    def _rows(self, lookup: _Lookup, ids: Array, encoded: Encoded) -> NDArray[np.int64]:
        if lookup.columns is None:
            given = encoded.bags[lookup.feature][0]
        else:
            given = ids[:, lookup.columns[0] : lookup.columns[1]]
        rows = given.astype(np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= lookup.rows):
            rows = self._substituted(rows, lookup)
        return rows + lookup.first

    def _substituted(self, rows: NDArray[np.int64], lookup: _Lookup) -> NDArray[np.int64]:
        policy = self.content["out_of_range"]
        outside = (rows < 0) | (rows >= lookup.rows)
        if policy == "clamp":
            return rows.clip(0, lookup.rows - 1)
        if policy == "hash":
            mixed = mixed_bits(rows.view(np.uint64)).view(np.int64) % lookup.rows
            return np.where(outside, mixed, rows)
        raise IndexError(
            f"{lookup.feature}: id {rows[outside][0]} is not a row of its table; use 0 to "
            f"{lookup.rows - 1}"
        )

    def _with_hashed(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        hashed = self.content["hashed"]
        if not hashed:
            return ids
        columns = [
            hashed_ids([ids[:, c] for c in each["columns"]], each["rows"]) for each in hashed
        ]
        return np.concatenate([ids, np.stack(columns, 1)], 1)

    def with_changes(
        self,
        tables: Mapping[str, tuple[Array, Array]],
        dense: Mapping[str, Array],
        version: Version,
        vocabulary: Mapping[str, tuple[Array, ...]] | None = None,
    ) -> "Model":
        """Return the model with changed rows, dense weights, and new vocabulary entries.

        ``tables`` maps table names to (rows int64 [n], values [n, dim]), ``dense`` maps weight
        names to whole values, and ``vocabulary`` maps names to (keys, ids) or (keys, ids, checks).
        Requests on this model keep its values, and the new model shares everything unchanged.
        """
        stores = list(self.stores)
        for name, (rows, values) in tables.items():
            table = self.content["tables"][name]
            at = torch.from_numpy(np.asarray(rows, dtype=np.int64))
            if len(at) and (int(at.min()) < 0 or int(at.max()) >= table["rows"]):
                raise BundleError(
                    f"table {name}: has {table['rows']} rows, got row {int(at.max())}"
                )
            changed = values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
            number = table["store"]
            stores[number] = stores[number].with_rows(at + table["first"], changed)
        weights = dict(self.weights)
        for name, value in dense.items():
            old = weights[name]
            new = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
            weights[name] = new.reshape(old.shape).to(old.dtype)
        encoder = self.encoder
        if vocabulary and encoder is not None:
            encoder = encoder.with_vocabularies(encoder.vocabularies.with_entries(vocabulary))
        return replace(
            self,
            version=version,
            encoder=encoder,
            stores=tuple(stores),
            weights=weights,
            dense=self.graph.bind(weights) if dense else self.dense,
        )

    def check(self) -> None:
        """Raise BundleError if a sample row's score differs from the stored score."""
        if "rows" in self.sample:
            scores = self.score(self.sample["rows"])
        else:
            scores = self.score_encoded(_sample_rows(self.sample))
        for row, (expected, got) in enumerate(
            zip(self.sample["scores"], scores.tolist(), strict=True)
        ):
            if not math.isclose(expected, got, rel_tol=0, abs_tol=self.sample["tolerance"]):
                raise BundleError(
                    f"sample.json: row {row} must score {expected}, got {got} with torch "
                    f"{torch.__version__}; the bundle was made with torch "
                    f"{self.content['versions']['torch']}"
                )


def _pooled(
    lookup: _Lookup, vectors: Tensor, shape: tuple[int, ...], encoded: Encoded, dtype: torch.dtype
) -> Tensor:
    """Return one vector per row [n, dim] from the vectors of a feature's ids."""
    if lookup.columns is not None:
        if shape[1] == 1:
            return vectors
        each = vectors.view(shape[0], shape[1], lookup.dim)
        return each.mean(1) if lookup.averages else each.sum(1)
    _, given, *weights = (torch.from_numpy(part) for part in encoded.bags[lookup.feature])
    if weights:
        vectors = vectors * weights[0].to(dtype).unsqueeze(1)
    sample = torch.repeat_interleave(given.long())
    pooled = vectors.new_zeros(len(given), lookup.dim).index_add(0, sample, vectors)
    return pooled / given.clamp(min=1).to(pooled).unsqueeze(1) if lookup.averages else pooled


def _sample_rows(sample: Mapping[str, Any]) -> Encoded:
    kinds = (np.int32, np.int32, np.float32)
    bags = {
        name: tuple(np.array(part, dtype=kind) for part, kind in zip(bag, kinds, strict=False))
        for name, bag in sample["bags"].items()
    }
    return Encoded(
        np.array(sample["ids"], dtype=np.int32), np.array(sample["dense"], dtype=np.float32), bags
    )


def load(folder: str | Path, *, check: bool = True, compiled: bool = False) -> Model:
    """Load the bundle in ``folder``; raise BundleError if its sample scores differ here.

    ``compiled=True`` also loads the machine code of ``sbpflow export --compile``, which can do
    anything: use it only for bundles that you trust.
    """
    folder = Path(folder)
    content = _read_json(folder / "model.json")
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise BundleError(
            f"{folder / 'model.json'}: version {content.get('version')!r} of "
            f"{content.get('format')!r}, but this scorer reads version {VERSION} of {FORMAT!r}; "
            "export the run again"
        )
    tensors = Tensors(folder / "model.safetensors")
    encoder = None
    if content["input"] is not None:
        words = Tensors(folder / "vocabulary.safetensors")
        vocabularies = Vocabularies(
            content["input"]["vocabularies"], *(words.array(n) for n in ("keys", "ids", "checks"))
        )
        encoder = Encoder(content["input"], vocabularies)
    dtype = getattr(torch, content["dtype"])
    stores = tuple(
        Store([tensors.tensor(*names) for names in store["arrays"]], dtype)
        for store in content["stores"]
    )
    weights = {
        name.removeprefix("dense/"): tensors.tensor(name)
        for name in tensors.entries
        if name.startswith("dense/")
    }
    graph = Graph(content["graph"])
    model = Model(
        version=Version(**content["origin"]),
        sample=_read_json(folder / "sample.json"),
        content=content,
        encoder=encoder,
        stores=stores,
        weights=weights,
        graph=graph,
        dense=graph.bind(weights),
        lookups=_lookups(content),
    )
    if check:
        model.check()
    return model


def _lookups(content: Mapping[str, Any]) -> tuple[tuple[_Lookup, ...], ...]:
    """Return the lookups of each store."""
    found: list[list[_Lookup]] = [[] for _ in content["stores"]]
    for number, output in enumerate(content["outputs"]):
        place = 0
        for name in output["tables"]:
            table = content["tables"][name]
            for feature in table["features"]:
                columns = content["columns"].get(feature)
                found[table["store"]].append(_Lookup(
                    number, place, table["first"], table["rows"], table["dim"],
                    None if columns is None else (columns[0], columns[1]),
                    feature, table["pooling"] == "mean",
                ))  # fmt: skip
                place += 1
    return tuple(map(tuple, found))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{file}: cannot be read ({error}); export the bundle again") from error

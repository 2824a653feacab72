"""Loads an exported bundle and scores raw rows. Only torch and numpy are needed.

    from scorer import load

    scores = load("out/model").score([{"I1": 1, "C1": "68fd1e64", ...}])

``sbpflow export`` merges this module and the modules that it uses into a bundle's ``scorer.py``. A
bundle consists of JSON and safetensors files, which cannot run code; its compiled code is loaded
only with ``compiled=True``.
"""

import hashlib
import importlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.runtime.compute.cpu import cpu_facts
from sbpflow.serving.cells import MISSING_ID, hashed_ids
from sbpflow.serving.columns import Array, Column, RowError
from sbpflow.serving.encoder import Encoded, Encoder, Vocabularies
from sbpflow.serving.lookups import Gather, Segment, bag_vectors, plan_lookups
from sbpflow.serving.operations import BundleError, Graph
from sbpflow.serving.row_store import Store, Tensors

__all__ = ["BundleError", "Column", "Encoded", "Model", "RowError", "Version", "load"]
FORMAT, VERSION = "sbpflow-model", 3
Dense = Callable[[Mapping[str, Tensor]], Tensor]
LOOPS = "encoder_loops"
COMPILED = "dense.pt2"
# For at most four vectors, torch adds them in order, so numpy gives the same sum.
_MOST_IN_ORDER = 4


class Version(NamedTuple):
    """The origin of a model's values: run ID, training step, and delta number."""

    run: str
    step: int
    delta: int = 0


@dataclass(frozen=True)
class Model:
    """A bundle in memory. A model is immutable; ``with_changes`` returns a new model."""

    version: Version
    sample: Mapping[str, Any]
    content: Mapping[str, Any]
    encoder: Encoder | None
    stores: tuple[Store, ...]
    weights: Mapping[str, Tensor]
    bind: Callable[[Mapping[str, Tensor]], Dense]
    dense: Dense
    gathers: tuple[Gather, ...]
    segments: Mapping[str, tuple[Segment, ...]]
    program: Any = None
    """The ``dense_loops.CompiledModel`` that scores a few rows, or None if only torch can score the
    model.
    """

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the columns of raw rows, in the order of the cells in a text line."""
        return self._encoder().raw.columns

    def score(self, rows: object) -> NDArray[np.float32]:
        """Return the probabilities float32 [n] of raw rows: dicts, a data frame, or text lines."""
        return self.score_encoded(self.encode(rows))

    def encode(self, rows: object) -> Encoded:
        """Return the ids and dense values of raw rows; raise RowError for the first bad row."""
        return self._encoder().encode(rows)

    def encode_json(self, text: bytes) -> Encoded | None:
        """Encode a JSON list of objects in compiled loops; return None if this is not possible."""
        return self._encoder().encode_json(text)

    def _encoder(self) -> Encoder:
        if self.encoder is None:
            raise BundleError(
                "the model was trained on a set without vocabularies, so raw rows have no ids; "
                "use score_encoded with ids, or train on a set made by `sbpflow prepare`"
            )
        return self.encoder

    def score_encoded(self, encoded: Encoded) -> NDArray[np.float32]:
        """Return the probabilities float32 [n] of encoded rows."""
        if self.program is not None and len(encoded.ids) <= self.program.max_rows:
            ids = self._with_hashed(encoded)
            scores = self.program.scores(self.gathers, self.stores, ids, encoded.dense)
            if scores is not None:
                return scores
        negated = np.negative(self.logits(encoded).numpy(), dtype=np.float64)
        # float64 exp overflows beyond 709; from 104 on, the float32 score is 0 anyway
        return np.reciprocal(np.exp(np.minimum(negated, 700.0)) + 1.0).astype(np.float32)

    def logits(self, encoded: Encoded) -> Tensor:
        """Return the logits [n] of encoded rows."""
        if torch.is_inference_mode_enabled():  # as in the server; entering the mode takes 6 us
            return self._logits(encoded)
        with torch.inference_mode():
            return self._logits(encoded)

    def _logits(self, encoded: Encoded) -> Tensor:
        dtype = getattr(torch, self.content["dtype"])
        ids, policy = self._with_hashed(encoded), self.content["out_of_range"]
        gathered = [
            gather(store, ids, encoded, policy)
            for gather, store in zip(self.gathers, self.stores, strict=True)
        ]
        inputs = {"dense": torch.from_numpy(encoded.dense).to(dtype)}
        for output in self.content["outputs"]:
            parts: list[Tensor] = []
            for segment in self.segments[output["name"]]:
                fixed, ragged = gathered[segment.store]
                if segment.lookup.columns is None:
                    parts.append(
                        bag_vectors(segment.lookup, ragged[segment.lookup[:2]], encoded, dtype)
                    )
                    continue
                part = fixed[:, segment.start : segment.stop]
                if segment.pools:
                    parts.append(part.mean(1) if segment.lookup.averages else part.sum(1))
                else:
                    parts.append(_sum(part) if output["sums"] else part.flatten(1))
            joined = parts[0]
            if len(parts) > 1:
                joined = torch.stack(parts).sum(0) if output["sums"] else torch.cat(parts, 1)
            inputs["vectors." + output["name"]] = joined
        return self.dense(inputs).reshape(-1).float()

    def _with_hashed(self, encoded: Encoded) -> NDArray[np.int32]:
        ids, hashed = encoded.ids, self.content["hashed"]
        if not hashed:
            return ids
        columns: list[NDArray[np.int32]] = []
        for each in hashed:
            parts = [encoded.keys.get(column, ids[:, column]) for column in each["columns"]]
            columns.append(hashed_ids(parts, each["rows"], each.get("missing")))
        return np.concatenate([ids, np.stack(columns, 1)], 1)

    def with_changes(
        self,
        tables: Mapping[str, tuple[Array, Array | Tensor | tuple[Tensor, ...]]],
        dense: Mapping[str, Array | Tensor],
        version: Version,
        vocabulary: Mapping[str, tuple[Array, ...]] | None = None,
    ) -> "Model":
        """Return a model with changed rows, dense weights, and vocabulary entries.

        ``tables`` maps table names to (rows int64 [n], values [n, dim]); the values of 8-bit rows
        may be (int8, scale, low). ``dense`` maps weight names to complete new values.
        ``vocabulary`` maps names to (keys, ids) or (keys, ids, checks). This model does not change,
        and the new model shares all unchanged values with it. The given values may be used
        without a copy, so they must not be modified later.
        """
        stores = list(self.stores)
        changed: dict[int, list[tuple[Tensor, Tensor | tuple[Tensor, ...]]]] = {}
        for name, (rows, values) in tables.items():
            table = self._known("tables", name, self.content["tables"])
            at = torch.from_numpy(np.asarray(rows, dtype=np.int64))
            if len(outside := at[(at < 0) | (at >= table["rows"])]):
                row = int(outside[0])
                raise BundleError(f"table {name} has {table['rows']} rows, got row {row}")
            own = changed.setdefault(table["store"], [])
            values = values if isinstance(values, tuple) else _tensor(values)
            own.append((at + table["first"], values))
        for number, parts in changed.items():
            stores[number] = stores[number].with_rows(*parts)
        weights = dict(self.weights)
        for name, value in dense.items():
            old = self._known("dense", name, weights)
            new = _tensor(value)
            if new.numel() != old.numel():
                raise BundleError(
                    f"dense: {name} must have the shape {list(old.shape)}, got {list(new.shape)}"
                )
            weights[name] = new.reshape(old.shape).to(old.dtype)
        encoder = self.encoder
        if vocabulary and encoder is not None:
            encoder = encoder.with_entries(vocabulary)
        return replace(
            self,
            version=version,
            encoder=encoder,
            stores=tuple(stores),
            weights=weights,
            dense=self.bind(weights) if dense else self.dense,
            program=self.program.with_weights(weights) if self.program and dense else self.program,
        )

    def _known(self, kind: str, name: str, values: Mapping[str, Any]) -> Any:
        if name not in values:
            known = ", ".join(list(values)[:8])
            raise BundleError(f"{kind}: {name!r} is not in the bundle; use, for example, {known}")
        return values[name]

    def check(self) -> None:
        """Raise BundleError if the score of a sample row differs from the score stored in the
        bundle by more than the stored tolerance.
        """
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


def _sum(vectors: Tensor) -> Tensor:
    """Return the sum [n, dim] of vectors [n, ids, dim]."""
    if vectors.shape[1] > _MOST_IN_ORDER or vectors.dtype != torch.float32:
        return vectors.sum(1)
    array = vectors.numpy()
    total = array[:, 0]
    # This loop takes a fifth of the time of a sum over a dimension.
    for number in range(1, array.shape[1]):
        total = total + array[:, number]
    return torch.from_numpy(total)


def _tensor(values: Array | Tensor) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))


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
    """Load the bundle in ``folder``; raise BundleError if a file is damaged or this machine does
    not reproduce the sample scores. Without ``check``, neither is tested.

    ``compiled=True`` also loads the machine code of ``sbpflow export --compile``, which can run
    arbitrary code: use it only for bundles that you trust.
    """
    folder = Path(folder)
    content = _read_json(folder / "model.json")
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise BundleError(
            f"{folder / 'model.json'}: version {content.get('version')!r} of "
            f"{content.get('format')!r}, but this scorer reads version {VERSION} of {FORMAT!r}; "
            "export the run again"
        )
    try:
        for name, digest in content["sha256"].items() if check else ():
            if file_digest(folder / name) != digest:
                raise BundleError(f"{folder / name} is damaged; export the run again")
        model = _assembled(folder, content, compiled)
        if check:
            model.check()
    except BundleError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        cause = f"the key {error} is missing" if isinstance(error, KeyError) else error
        raise BundleError(
            f"{folder}: model.json or sample.json is damaged ({cause}); export the run again"
        ) from error
    return model


def _assembled(folder: Path, content: Mapping[str, Any], compiled: bool) -> Model:
    """Return the model that ``content`` (model.json) and the files in ``folder`` describe."""
    tensors = Tensors(folder / "model.safetensors")
    encoder, loops = None, _loops()
    if content["input"] is not None:
        words = Tensors(folder / "vocabulary.safetensors")
        vocabularies = Vocabularies(
            content["input"]["vocabularies"],
            words.array("keys"),
            words.array("ids"),
            words.array("checks"),
        )
        encoder = Encoder(content["input"], vocabularies, loops, _crossed(content["hashed"]))
    dtype = getattr(torch, content["dtype"])
    stores = tuple(
        Store([tensors.tensor(*names) for names in store["arrays"]], dtype, merges=loops is None)
        for store in content["stores"]
    )
    weights = {
        name.removeprefix("dense/"): tensors.tensor(name)
        for name in tensors.entries
        if name.startswith("dense/")
    }
    bind = Graph(content["graph"]).bind
    if compiled:
        bind = _compiled_part(folder / COMPILED, content) or bind
    gathers, segments = plan_lookups(content, loops)
    program = None
    if loops is not None and encoder is not None:
        dims = [store.dim for store in stores]
        program = loops.compile_model(content, segments, gathers, dims, weights)
    return Model(
        version=Version(**content["origin"]),
        sample=_read_json(folder / "sample.json"),
        content=content,
        encoder=encoder,
        stores=stores,
        weights=weights,
        bind=bind,
        dense=bind(weights),
        gathers=gathers,
        segments=segments,
        program=program,
    )


def _crossed(hashed: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the id columns for which crosses hash the keys instead of the ids."""
    return {
        column
        for each in hashed
        for column, missing in zip(each["columns"], each.get("missing", ()), strict=False)
        if missing != MISSING_ID
    }


def _loops() -> ModuleType | None:
    """Return the module ``encoder_loops`` of the same version, or None if it or numba is not
    installed.
    """
    try:
        return importlib.import_module(f"{__package__}.encoder_loops" if __package__ else LOOPS)
    except ImportError:
        return None


def _compiled_part(
    file: Path, content: Mapping[str, Any]
) -> Callable[[Mapping[str, Tensor]], Dense] | None:
    """Return the compiled dense part; if this CPU or torch version cannot run it, warn and return
    None.
    """
    if not file.exists():
        raise BundleError(f"{file} does not exist; export the run with --compile")
    made = content["compiled"]
    problem = ""
    if missing := sorted(set(made["cpu"]) - cpu_features()):
        problem = f"this CPU lacks {', '.join(missing[:5])}"
    elif torch.__version__.split("+")[0] != made["torch"]:
        problem = f"it needs torch {made['torch']}, not {torch.__version__}"
    if problem:
        warnings.warn(f"{file}: {problem}; the dense part runs uncompiled", stacklevel=4)
        return None
    inductor: Any = importlib.import_module("torch._inductor")
    run = inductor.aoti_load_package(str(file))
    names, order = made["weights"], made["inputs"]

    def bind(weights: Mapping[str, Tensor]) -> Dense:
        fixed = [weights[name] for name in names]
        return lambda inputs: run(*(inputs[name] for name in order), *fixed)

    return bind


def cpu_features() -> set[str]:
    """Return the CPU's instruction sets according to /proc/cpuinfo or, without this file, the CPU
    capability that torch reports.
    """
    facts = cpu_facts()
    if not facts:
        return {torch.backends.cpu.get_cpu_capability()}
    flags = facts.get("flags") or facts.get("Features", "")
    sets = ("sse", "ssse", "avx", "amx", "fma", "f16c", "bmi", "popcnt", "asimd", "sve")
    return {flag for flag in flags.split() if flag.startswith(sets)}


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"{file} cannot be read ({error}); export the bundle again") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{file} cannot be read ({error}); export the bundle again") from error
    if not isinstance(content, dict):
        raise BundleError(f"{file} is not a JSON object; export the bundle again")
    return cast("dict[str, Any]", content)

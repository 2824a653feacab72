"""Checks the ids that a caller passes and converts them to one matrix and one set of lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from sbpflow.embedding.ids.batch_ids import Bags, BatchIds, IdBounds, Ids, Lists, positions
from sbpflow.embedding.ids.list_loops import find_loops
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.out_of_range import SUBSTITUTES
from sbpflow.embedding.plan.tables import ANY_ID
from sbpflow.errors import DataError
from sbpflow.runtime.compute.async_scalar_read import AsyncScalarRead


@dataclass(slots=True, kw_only=True)
class IdCheck:
    """The result of checking the ids of a batch.

    A training batch is read ahead of its step, and other ranks are already waiting for its ids.
    With the policy ``error``, an out-of-range id is therefore replaced by 0, and its error is
    raised at the step.
    """

    error: DataError | None = None  # The error for the first bad id.
    flagged: list[AsyncScalarRead] = field(default_factory=list[AsyncScalarRead])  # CUDA only.
    replaced: Tensor | None = None  # Set by the policies clamp and hash, int64 [features].

    def fail(self, error: DataError) -> None:
        """Keep ``error`` unless an earlier error was kept."""
        self.error = self.error or error

    def count(self, features: Tensor, bad: Tensor, num_features: int) -> None:
        """Record that ``bad[i]`` (int64) ids of feature ``features[i]`` were replaced."""
        if self.replaced is None:
            self.replaced = bad.new_zeros(num_features)
        self.replaced.index_add_(0, features, bad)


class IdReader:
    """Checks the ids of a batch and applies the policy for out-of-range ids.

    An id must be a valid row number in every table that uses its feature, so the smallest of these
    tables sets the limit. With clamp and hash, these tables must all have the same size;
    ``plan_embeddings`` checks this rule. ``out_of_range`` counts the replaced ids per feature on
    this rank, over all batches passed to ``account``. ``compiled`` is passed to ``find_loops``.
    """

    def __init__(
        self, plan: EmbeddingPlan, rank: int, device: torch.device, *, compiled: bool = True
    ) -> None:
        self._plan, self._rank, self._device = plan, rank, device
        rows = [ANY_ID] * len(plan.features)  # features that no table uses have no limit
        by_name = {feature.name: n for n, feature in enumerate(plan.features)}
        for table in plan.tables:
            for name in table.features:
                rows[by_name[name]] = min(rows[by_name[name]], table.num_ids)
        self._rows = rows
        self._by_name = by_name
        self._matrix = [n for n, first in enumerate(plan.ids.first) if first is not None]
        self._ragged = [n for n, first in enumerate(plan.ids.first) if first is None]
        self._owners = [n for n in self._matrix for _ in range(plan.features[n].hotness)]

        def tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self._owner = tensor(self._owners)
        limits = [rows[n] for n in self._owners]
        self._limits = tensor(limits)
        top = torch.iinfo(plan.ids_dtype).max
        self._last = tensor([min(limit, top) - 1 for limit in limits])
        self._list_limits = tensor([rows[n] for n in plan.ids.lists])
        self._list_most = tensor([plan.features[n].hotness for n in plan.ids.lists])
        self._loops = find_loops(device, compiled=compiled)
        self._known: IdBounds | None = None
        self._known_to_fit = False
        self.out_of_range = torch.zeros(len(plan.features), dtype=torch.int64, device=device)

    def read(self, ids: Ids, check: IdCheck | None = None) -> BatchIds:
        """Read ids in one of three forms.

        The forms are a tensor [samples, columns] in the plan's order, ``BatchIds`` (such a matrix,
        and lists), and a mapping from each feature to a tensor ([samples] or [samples, hotness]) or
        to ``Bags``. The ids in ``BatchIds`` are not checked if their bounds guarantee that they are
        valid.

        Raise DataError for missing ids and wrong shapes. Out-of-range ids are recorded in
        ``check``; without ``check``, they raise DataError immediately if the policy is ``error``.
        """
        result = check or IdCheck()
        read = self._read(ids, result)
        if check is None:
            self.raise_flagged(result)
            self.account(result)
        return read

    def _read(self, ids: Ids, check: IdCheck) -> BatchIds:
        if isinstance(ids, BatchIds):
            if self._fits(ids):
                return BatchIds(ids.matrix, self._looked_up(ids.lists))
            ids = self._as_mapping(ids)
        if isinstance(ids, Tensor):
            if self._ragged:
                names = [self._plan.features[n].name for n in self._ragged]
                raise DataError(
                    f"ids: a matrix cannot contain lists; pass a dictionary with Bags for {names}"
                )
            matrix, bags = ids, {}
        else:
            self._check_names(ids)
            matrix, bags = self._join(ids)
        expected = self._plan.ids.num_columns
        if matrix.ndim != 2 or matrix.shape[1] != expected or not _is_integer(matrix):
            raise DataError(
                f"ids must be int32 or int64 [samples, {expected}], with one column per id of "
                f"{', '.join(self._by_name)}, got {matrix.dtype}{list(matrix.shape)}"
            )
        self._check_device("ids", matrix)
        matrix = self._in_range(matrix, check)
        lists = self._lists(matrix, bags, check) if self._plan.ids.lists else None
        return BatchIds(matrix, lists)

    def _fits(self, ids: BatchIds) -> bool:
        """Return True if bounds and shapes guarantee that every id is a valid row number in its
        tables.
        """
        plan, bounds, lists = self._plan, ids.bounds, ids.lists
        if bounds is None or not set(plan.ids.lists) <= set(self._ragged):
            return False
        if bounds is not self._known:
            rows = [self._rows[n] for n in self._ragged]
            most = [plan.features[n].hotness for n in self._ragged]
            self._known = bounds
            self._known_to_fit = (
                _none_above(bounds.columns, self._limits.tolist())
                and _none_above(bounds.lists, rows)
                and _none_above(bounds.lengths, most)
            )
        rows = ids.matrix.shape[:1]
        shape = (*rows, 0) if lists is None else tuple(lists.lengths.shape)
        weighted = lists is not None and lists.weights is not None
        return (
            self._known_to_fit
            and shape == (*rows, len(self._ragged))
            and ids.matrix.dtype == plan.ids_dtype
            and ids.matrix.shape[1:] == (len(bounds.columns),)
            and weighted == any(plan.features[n].weighted for n in self._ragged)
            and (lists is None or lists.values.dtype == plan.ids_dtype)
        )

    def _looked_up(self, lists: Lists | None) -> Lists | None:
        """Return the lists that tables look up, usually all of them."""
        wanted = self._plan.ids.lists
        if lists is None or not wanted:
            return None
        if self._ragged != list(wanted):
            places = [self._ragged.index(n) for n in wanted]
            lists = lists.take(torch.tensor(places, dtype=torch.int64, device=self._device))
        weights = lists.weights.to(self._plan.dtype) if lists.weights is not None else None
        return Lists(lists.lengths, lists.values, weights if self._plan.weighted else None)

    def _as_mapping(self, ids: BatchIds) -> Mapping[str, "Tensor | Bags"]:
        """Return the same ids by feature, so that each feature can be checked separately."""
        features, by_feature = self._plan.features, dict[str, Tensor | Bags]()
        columns = sum(features[n].hotness for n in self._matrix)
        num_lists = 0 if ids.lists is None else ids.lists.lengths.shape[1]
        if ids.matrix.shape[1:] != (columns,) or num_lists != len(self._ragged):
            raise DataError(
                f"ids must be a matrix [samples, {columns}] for "
                f"{[features[n].name for n in self._matrix]} and one list each for "
                f"{[features[n].name for n in self._ragged]}, got {list(ids.matrix.shape)} and "
                f"{num_lists} lists"
            )
        parts = ids.matrix.split([features[n].hotness for n in self._matrix], 1)
        by_feature |= {features[n].name: p for n, p in zip(self._matrix, parts, strict=True)}
        for place, n in enumerate(self._ragged):
            if ids.lists is not None:
                taken = ids.lists.take(torch.tensor([place], device=self._device))
                ends = torch.cumsum(taken.lengths.reshape(-1), 0, dtype=torch.int64)
                offsets = torch.cat([ends.new_zeros(1), ends])
                weights = taken.weights if features[n].weighted else None
                by_feature[features[n].name] = Bags(taken.values, offsets, weights)
        return by_feature

    def _check_device(self, name: str, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None and tensor.device.type != self._device.type:
                raise DataError(
                    f"{name}: the ids are on {tensor.device}, but must be on {self._device}, where "
                    f"the {'vocabularies' if self._plan.vocabularies else 'tables'} are; pass "
                    f'ids.to("{self._device}")'
                )

    def _check_names(self, ids: Mapping[str, "Tensor | Bags"]) -> None:
        used = {name for table in self._plan.tables for name in table.features}
        wanted = used | {self._plan.features[n].name for n in self._matrix}
        missing, unknown = sorted(wanted - set(ids)), sorted(set(ids) - set(self._by_name))
        if missing or unknown:
            problem = f"{missing[0]} is missing" if missing else f"{unknown[0]} is unknown"
            raise DataError(f"ids: feature {problem}; pass {', '.join(sorted(wanted))}")

    def _join(self, ids: Mapping[str, "Tensor | Bags"]) -> tuple[Tensor, dict[int, Bags]]:
        columns: list[Tensor] = []
        bags: dict[int, Bags] = {}
        counts = {name: self._samples(name, value) for name, value in ids.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"ids: all features must have the same number of samples, got {counts}")
        count = next(iter(counts.values()))
        for number, feature in enumerate(self._plan.features):
            value, name = ids.get(feature.name), f"feature {feature.name}"
            if value is None:
                continue
            if isinstance(value, Bags):
                if self._plan.ids.first[number] is not None:
                    raise DataError(
                        f"{name} has exactly {feature.hotness} ids per sample, got Bags; pass a "
                        f"tensor [samples, {feature.hotness}], or declare the feature ragged"
                    )
                bags[number] = value
            elif self._plan.ids.first[number] is None:
                raise DataError(f"{name} is ragged or weighted, got a tensor; pass Bags")
            else:
                wide = value.unsqueeze(1) if value.ndim == 1 else value
                if wide.shape[1:] != (feature.hotness,) or not _is_integer(wide):
                    raise DataError(
                        f"{name}: ids must be int32 or int64 [samples, {feature.hotness}], got "
                        f"{value.dtype}{list(value.shape)}"
                    )
                self._check_device(f"{name}: ids", wide)
                columns.append(wide)
        if columns:
            return torch.cat(columns, 1), bags
        empty = torch.empty(count, 0, dtype=self._plan.ids_dtype, device=self._device)
        return empty, bags

    def _samples(self, name: str, value: object) -> int:
        if isinstance(value, Bags):
            if value.offsets.ndim != 1 or not value.offsets.numel():
                raise DataError(
                    f"feature {name}: offsets must have shape [samples + 1], got "
                    f"{list(value.offsets.shape)}"
                )
            return value.offsets.numel() - 1
        if not isinstance(value, Tensor):
            raise DataError(
                f"feature {name}: ids must be a tensor or Bags, got {type(value).__name__}"
            )
        if value.ndim not in (1, 2):
            raise DataError(
                f"feature {name}: ids must have shape [samples] or [samples, hotness], got "
                f"{list(value.shape)}"
            )
        return value.shape[0]

    def _checked(self, bags: Bags, number: int) -> Bags:
        """Check ``bags``, and return them on the device with int64 offsets."""
        feature = self._plan.features[number]
        name = f"feature {feature.name}"
        self._check_device(f"{name}: bags", bags.values, bags.offsets, bags.weights)
        if bags.values.ndim != 1 or not (_is_integer(bags.values) and _is_integer(bags.offsets)):
            raise DataError(
                f"{name}: values and offsets must be int32 or int64, and values must have shape "
                f"[ids], got values {bags.values.dtype}{list(bags.values.shape)} and offsets "
                f"{bags.offsets.dtype}"
            )
        offsets = bags.offsets.to(self._device, torch.int64)
        lengths = offsets.diff()
        first, last, total = int(offsets[0]), int(offsets[-1]), bags.values.numel()
        if (first, last) != (0, total):
            raise DataError(
                f"{name}: offsets must run from 0 to {total}, the number of values, but they run "
                f"from {first} to {last}"
            )
        if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > feature.hotness):
            sample = int(((lengths < 0) | (lengths > feature.hotness)).nonzero()[0])
            raise DataError(
                f"{name}: sample {sample} has {int(lengths[sample])} ids, but "
                f"0..{feature.hotness} are allowed; declare a larger hotness, or pass fewer ids"
            )
        if feature.weighted and (bags.weights is None or bags.weights.shape != bags.values.shape):
            actual = "none" if bags.weights is None else list(bags.weights.shape)
            raise DataError(f"{name}: weights must have shape [{total}], one per id, got {actual}")
        if not feature.weighted and bags.weights is not None:
            raise DataError(
                f"{name} is not a weighted feature, got weights; declare the feature weighted, or "
                "omit the weights"
            )
        if bags.weights is not None and bags.weights.requires_grad:
            raise DataError(
                f"{name}: weights are treated as data, but these require grad; pass "
                "weights.detach()"
            )
        return Bags(bags.values, offsets, bags.weights)

    def account(self, check: IdCheck) -> None:
        """Raise the error for a bad id, or add the number of replaced ids to ``out_of_range``.

        Call this method when the batch is looked up. On CUDA, the result of checking a matrix may
        not have reached the host yet; ``raise_flagged`` reports it later.
        """
        if check.error is not None:
            raise check.error
        if check.replaced is not None:
            if check.replaced.is_cuda:  # allocated by the id stream, used in the current stream
                check.replaced.record_stream(torch.cuda.current_stream(self._device))
            self.out_of_range += check.replaced
            check.replaced = None

    def raise_flagged(self, check: IdCheck) -> None:
        """Raise DataError for an out-of-range id in a matrix on CUDA.

        The host does not wait for the device when ids are read, so call this method before the
        results of the lookup are used.
        """
        flagged, check.flagged = check.flagged, []
        for read in flagged:
            is_bad, place, id = read.wait().tolist()
            if is_bad:
                row, column = divmod(place, len(self._owners))
                raise self._bad_id(self._owners[column], id, row)

    def _in_range(self, matrix: Tensor, check: IdCheck) -> Tensor:
        """Return the matrix in the plan's dtype. Record out-of-range ids and replace them."""
        if matrix.numel() == 0:
            return matrix.to(self._plan.ids_dtype)
        if matrix.dtype == self._plan.ids_dtype and not matrix.is_cuda:
            if self._loops is not None:
                ids = matrix.contiguous().numpy()
                fits = bool(self._loops.are_in_range(ids, self._last.numpy()))
            else:
                low, high = matrix.aminmax(dim=0)
                fits = bool(((low >= 0) & (high <= self._last)).all())
            if fits:
                return matrix
        wide = matrix.to(torch.int64)
        bad = ((wide < 0) | (wide >= self._limits)) & (self._limits < ANY_ID)
        if matrix.is_cuda and self._plan.out_of_range == "error":
            self._flag(wide, bad, check)
            return torch.where(bad, 0, wide).to(self._plan.ids_dtype)
        if not matrix.is_cuda and not bool(bad.any()):
            return matrix.to(self._plan.ids_dtype)
        if self._plan.out_of_range == "error":
            row, column = (int(place) for place in bad.nonzero()[0])
            check.fail(self._bad_id(int(self._owner[column]), int(wide[row, column]), row))
        else:
            check.count(self._owner, bad.sum(0), len(self._plan.features))
        return self._replace(wide, bad, self._limits).to(self._plan.ids_dtype)

    def _flag(self, wide: Tensor, bad: Tensor, check: IdCheck) -> None:
        """Start copying the first bad id to the host."""
        # argmax finds the first bad position; nonzero would make the host wait.
        first = bad.reshape(-1).to(torch.int8).argmax().unsqueeze(0)
        id = wide.reshape(-1).index_select(0, first)
        check.flagged.append(
            AsyncScalarRead(torch.cat([bad.any().to(torch.int64).unsqueeze(0), first, id]))
        )

    def _lists(self, matrix: Tensor, bags: Mapping[int, Bags], check: IdCheck) -> Lists:
        """Return all lists of this rank's samples, sample by sample."""
        plan = self._plan
        if self._loops is not None and (lists := self._by_loop(self._loops, matrix, bags)):
            return lists
        checked = {n: self._checked(value, n) for n, value in bags.items()}
        all_bags = [checked.get(n) or self._as_bags(matrix, n) for n in plan.ids.lists]
        lengths = torch.stack([bag.offsets.diff() for bag in all_bags], 1)
        values = torch.cat([bag.values.to(torch.int64) for bag in all_bags])
        by_feature = Lists(lengths.t().contiguous(), values, None)
        # ``values`` is ordered by feature; find where each list of the result starts in ``values``.
        source = positions(by_feature.starts().t(), lengths)
        weights = None
        if plan.weighted:
            weights = self._all_weights(all_bags).index_select(0, source)
        lists = Lists(lengths.to(torch.int32), values.index_select(0, source), weights)
        return replace(lists, values=self._lists_in_range(lists, check))

    def _all_weights(self, bags: Sequence[Bags]) -> Tensor:
        dtype = self._plan.dtype
        ones = partial(torch.ones, dtype=dtype, device=self._device)
        return torch.cat(
            [ones(b.values.shape) if b.weights is None else b.weights.to(dtype) for b in bags]
        )

    def _by_loop(self, loops: ModuleType, matrix: Tensor, bags: Mapping[int, Bags]) -> Lists | None:
        """Like ``_lists``, but in one compiled pass.

        Return ``None`` if the input is invalid or needs conversion, so that ``_lists`` converts it,
        replaces ids, or reports the error.
        """
        plan, unused = self._plan, set(bags) - set(self._plan.ids.lists)
        all_bags = [bags.get(n) or self._as_bags(matrix, n) for n in plan.ids.lists]
        dtypes = {bag.values.dtype for bag in all_bags} | {torch.int64}
        shapes = {bag.offsets.shape for bag in all_bags}
        weighted = [plan.features[n].weighted for n in plan.ids.lists]
        fits = all(
            bag.values.ndim == 1
            and _is_integer(bag.values)
            and _is_integer(bag.offsets)
            and not (bag.values.is_cuda or bag.offsets.is_cuda)
            and (bag.weights is not None) == has_weights
            and (bag.weights is None or _is_plain(bag.weights, bag.values))
            for bag, has_weights in zip(all_bags, weighted, strict=True)
        )
        if unused or not fits or len(dtypes) > 2 or len(shapes) > 1:
            return None
        values = torch.cat([bag.values for bag in all_bags])
        bases = torch.tensor([0, *accumulate(bag.values.numel() for bag in all_bags)])
        offsets = torch.stack([bag.offsets for bag in all_bags]).to(torch.int64)
        weights = torch.empty(0, dtype=plan.dtype)
        if plan.weighted:
            weights = self._all_weights(all_bags)
        lengths = torch.empty(offsets.shape[1] - 1, len(all_bags), dtype=torch.int32)
        out = torch.empty(values.shape, dtype=plan.ids_dtype)
        out_weights = torch.empty_like(weights)
        inputs = (values, bases, offsets, self._list_limits, self._list_most, weights)
        if not loops.join_lists(*(a.numpy() for a in (*inputs, lengths, out, out_weights))):
            return None
        return Lists(lengths, out, out_weights if plan.weighted else None)

    def _as_bags(self, matrix: Tensor, number: int) -> Bags:
        first, hotness = self._plan.ids.first[number], self._plan.features[number].hotness
        if first is None:
            raise DataError(f"ids: the feature {self._plan.features[number].name} is missing")
        values = matrix[:, first : first + hotness].reshape(-1)
        return Bags(values, torch.arange(0, values.numel() + 1, hotness, device=self._device))

    def _lists_in_range(self, lists: Lists, check: IdCheck) -> Tensor:
        values, place = lists.values, lists.places()
        limits = self._list_limits.index_select(0, place)
        bad = ((values < 0) | (values >= limits)) & (limits < ANY_ID)
        if bool(bad.any()):
            owner = torch.tensor(self._plan.ids.lists, device=values.device)
            if self._plan.out_of_range == "error":
                at = int(bad.nonzero()[0])
                ends = torch.cumsum(lists.lengths.sum(1), 0)
                sample = int(torch.searchsorted(ends, at, right=True))
                check.fail(self._bad_id(int(owner[place[at]]), int(values[at]), sample))
            else:
                features = owner.index_select(0, place)
                check.count(features, bad.to(torch.int64), len(self._plan.features))
            values = self._replace(values, bad, limits)
        return values.to(self._plan.ids_dtype)

    def _replace(self, ids: Tensor, bad: Tensor, limits: Tensor) -> Tensor:
        policy = self._plan.out_of_range
        if policy == "error":
            return torch.where(bad, 0, ids)  # ``account`` reports the bad ids
        return torch.where(bad, SUBSTITUTES[policy](ids, limits), ids)

    def _bad_id(self, number: int, id: int, row: int) -> DataError:
        return DataError(
            f"field {self._plan.features[number].name} has id {id} in row {row} of rank "
            f"{self._rank}'s part of the batch, but only ids 0..{self._rows[number] - 1} are valid"
        )


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64)


def _is_plain(weights: Tensor, values: Tensor) -> bool:
    """Return True if the weights have the right shape, are on CPU, and do not require grad."""
    return not (weights.is_cuda or weights.requires_grad) and weights.shape == values.shape


def _none_above(values: Sequence[int], limits: Sequence[int]) -> bool:
    return len(values) == len(limits) and all(
        v <= top for v, top in zip(values, limits, strict=True)
    )

"""Implements NeuroShard: pretrained cost networks, a beam search over column cuts, and greedy
placement.

Source: MLSys'23; daochenzha/neuroshard ec7ca74 and 06aaa2b (``neurosharder.py``, ``simulator.py``,
``*_cost_model.py``). One network prices the compute of a set of tables (20 features each, summed).
Two networks price the exchanges of all devices from the devices' sums of columns, for a fixed
number of devices. A beam of 3 over column cuts tries the 10 largest and the 10 most expensive
tables, to a depth of 10. For each cut, tables are placed in descending order of cost on the device
with the lowest predicted cost, under a limit on the columns per device. The limit is scanned from
1.0 to 1.5 times the mean in 11 steps.

Differences: 10,000 sets and 2,000 placements are measured instead of 100,000, and training takes 40
epochs instead of 1,000. A cut halves all parts of a table at once, and the parts are on distinct
devices, as in an even S(1) layout of sbpflow. The forward and the backward exchange share one
network. Rows and pooling are logarithms. Costs are divided by their mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sbpflow.planner.published.greedy import random_devices, size_greedy
from sbpflow.planner.published.nets import Scaling, descend, mlp
from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.problem import BYTES, Assignment, Floats, Move, price_of
from sbpflow.planner.shapes import WHOLE, option_number
from sbpflow.planner.task import Shape

BEAM, CANDIDATES, DEPTH = 3, 10, 10
SCALES = tuple(1.0 + 0.05 * step for step in range(11))
LARGEST_SET = 15  # maximum number of tables in a set
# all of ``Setting.features`` except the size
WITHOUT_SIZE = [n for n in range(21) if n != 3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """The amount of measurement and training."""

    sets: int = 10_000
    placements: int = 2_000
    epochs: int = 40
    batch: int = 512


class ComputeNet(nn.Module):
    """Applies an MLP 20-128-32 to each table, sums the results, and applies an MLP 32-64-1."""

    def __init__(self) -> None:
        super().__init__()
        self.table = mlp(len(WITHOUT_SIZE), 128, 32, last=True)
        self.head = mlp(32, 64, 1)

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """Map features [N, n, 20] and presence [N, n] to [N]."""
        summed = (self.table(features) * present[..., None]).sum(1)
        return self.head(summed).squeeze(-1)


class NeuroShard(nn.Module):
    """The networks for one number of devices, and the means by which their values are divided. The
    networks are untrained, but scale features for the tables of ``settings``.
    """

    compute_ms: Tensor
    exchange_ms: Tensor
    columns: Tensor  # sum of columns per device, averaged over devices; for ``exchange``

    def __init__(self, num_ranks: int, settings: Sequence[Setting] = ()) -> None:
        super().__init__()
        self.compute = ComputeNet()
        # maps all devices' column sums to the ms of each device's exchange
        self.exchange = mlp(num_ranks, 128, 64, 32, 16, num_ranks)
        self.scaling = Scaling(settings)
        for name in ("compute_ms", "exchange_ms", "columns"):
            self.register_buffer(name, torch.ones((), dtype=torch.float64))

    @staticmethod
    def trained(
        settings: Sequence[Setting], seed: int, amount: Amount | None = None
    ) -> "NeuroShard":
        """Train on tasks with the same number of devices, using sets of the tasks' tables."""
        amount = amount or Amount()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return _train(settings, np.random.default_rng(seed), amount)

    def plan(self, setting: Setting) -> Assignment:
        """Return the plan with the lowest predicted cost; if no plan fits, ``size_greedy``'s."""
        with torch.no_grad():
            return _Beam(self, setting).run()

    def compute_of(self, parts: "_Parts", sets: Sequence[Sequence[int]]) -> Floats:
        """Return the compute time of each set of parts, in ms, [sets]."""
        each = [parts.features[list(mine)] for mine in sets]
        features = pad_sequence(each, batch_first=True)
        present = pad_sequence([torch.ones(len(mine)) for mine in sets], batch_first=True)
        with torch.no_grad():
            return (self.compute(features, present).double() * self.compute_ms).numpy()


@dataclass(frozen=True, slots=True)
class _Parts:
    """The column parts to place, with each part's table, columns, bytes, and scaled features."""

    table: tuple[int, ...]
    dims: Floats
    held: Floats
    features: Tensor


def _parts(setting: Setting, scaling: Scaling, cuts: Sequence[int]) -> _Parts:
    table = tuple(t for t, cut in enumerate(cuts) for _ in range(cut))
    share = np.array([float(cuts[t]) for t in table])
    raw = setting.features[list(table)].copy()
    raw[:, 0] /= share
    raw[:, 3] /= share
    return _Parts(
        table=table,
        dims=raw[:, 0],
        held=setting.held_bytes[list(table)] / share,
        features=scaling(raw)[:, WITHOUT_SIZE],
    )


def _column_shape(cut: int) -> Shape:
    return WHOLE if cut == 1 else Shape("S(1)", "columns", (1, cut))


class _Beam:
    def __init__(self, model: NeuroShard, setting: Setting) -> None:
        self.model, self.setting = model, setting
        self.known: dict[tuple[tuple[int, int], ...], float] = {}

    def run(self) -> Assignment:
        cuts: tuple[int, ...] = (1,) * len(self.setting.tables)
        placed, cost = self._place(cuts)
        best = (cost, cuts, placed)
        beam = [(cost, cuts)]
        seen: set[tuple[int, ...]] = {cuts}
        for _ in range(DEPTH):
            tried: list[tuple[float, tuple[int, ...]]] = []
            for _, parent in beam:
                for table in self._worth_cutting(parent):
                    cut = (*parent[:table], 2 * parent[table], *parent[table + 1 :])
                    shape = _column_shape(cut[table])
                    if cut in seen or self.setting.option(table, shape) is None:
                        continue
                    seen.add(cut)
                    placed, cost = self._place(cut)
                    tried.append((cost, cut))
                    if cost < best[0]:
                        best = (cost, cut, placed)
            if not tried:
                break
            beam = sorted(tried, key=lambda cut: cut[0])[:BEAM]
        return self._assignment(best[1], best[2])

    def _worth_cutting(self, cuts: tuple[int, ...]) -> list[int]:
        count = len(cuts)
        if count <= CANDIDATES:
            return list(range(count))
        parts = _parts(self.setting, self.model.scaling, cuts)
        first = [parts.table.index(table) for table in range(count)]
        alone = self.model.compute_of(parts, [[part] for part in first])
        large = np.argsort(-parts.held[first], kind="stable")[:CANDIDATES]
        dear = np.argsort(-alone, kind="stable")[:CANDIDATES]
        return sorted({*large.tolist(), *dear.tolist()})

    def _place(self, cuts: tuple[int, ...]) -> tuple[list[list[int]] | None, float]:
        """Return (parts by device, predicted cost) for the best limit on columns."""
        parts = _parts(self.setting, self.model.scaling, cuts)
        alone = self.model.compute_of(parts, [[n] for n in range(len(parts.table))])
        order = np.argsort(-alone, kind="stable").tolist()
        best: tuple[list[list[int]] | None, float] = (None, float("inf"))
        for scale in SCALES:
            placed, limited = self._greedy(parts, order, scale)
            if placed is not None:
                cost = self._cost(parts, placed)
                if cost < best[1]:
                    best = (placed, cost)
            if not limited:  # a larger limit would give the same placement
                break
        return best

    def _greedy(
        self, parts: _Parts, order: list[int], scale: float
    ) -> tuple[list[list[int]] | None, bool]:
        """Return the parts by device, or None, and whether the column limit mattered."""
        size = self.setting.num_ranks
        placed: list[list[int]] = [[] for _ in range(size)]
        held, dims, costs = np.zeros(size), np.zeros(size), np.zeros(size)
        most = scale * parts.dims.sum() / size
        limited = False
        for part in order:
            table = parts.table[part]
            legal = held + parts.held[part] <= self.setting.room_bytes
            legal &= np.array([all(parts.table[n] != table for n in mine) for mine in placed])
            narrow = dims + parts.dims[part] <= max(most, parts.dims[part])
            limited = limited or bool((legal & ~narrow).any())
            fits = np.flatnonzero(legal & narrow)
            if not len(fits):
                return None, limited
            device = int(fits[np.lexsort((held[fits], costs[fits]))[0]])
            placed[device].append(part)
            held[device] += parts.held[part]
            dims[device] += parts.dims[part]
            costs[device] = self._compute(parts, placed[device])
        return placed, limited

    def _compute(self, parts: _Parts, mine: list[int]) -> float:
        key = tuple(sorted((parts.table[n], int(parts.dims[n])) for n in mine))
        if key not in self.known:
            self.known[key] = float(self.model.compute_of(parts, [mine])[0])
        return self.known[key]

    def _cost(self, parts: _Parts, placed: list[list[int]]) -> float:
        compute = np.array([self._compute(parts, mine) for mine in placed])
        dims = torch.tensor([[float(parts.dims[mine].sum()) for mine in placed]])
        exchange = self.model.exchange(dims / self.model.columns)[0].double()
        return float((compute + (exchange * self.model.exchange_ms).numpy()).max())

    def _assignment(self, cuts: tuple[int, ...], placed: list[list[int]] | None) -> Assignment:
        if placed is None:  # no cut fits, so return a greedy plan of whole tables
            return size_greedy(self.setting)
        parts = _parts(self.setting, self.model.scaling, cuts)
        ranks: list[list[int]] = [[] for _ in cuts]
        for device, mine in enumerate(placed):
            for part in mine:
                ranks[parts.table[part]].append(device)
        moves: list[Move] = []
        for table, (cut, mine) in enumerate(zip(cuts, ranks, strict=True)):
            options = self.setting.problem.options[table]
            number = option_number(options, _column_shape(cut))
            if number is None:
                number = self.setting.whole_option[table]
            # On a single rank, a whole table is a copy, which has no shards.
            moves.append(Move(number, tuple(sorted(mine)) if options[number].num_shards else ()))
        return tuple(moves)


def _train(settings: Sequence[Setting], random: np.random.Generator, amount: Amount) -> NeuroShard:
    model = NeuroShard(settings[0].num_ranks, settings)
    features, present, compute = _sets(settings, model.scaling, random, amount.sets)
    sums, exchange = _placements(settings, random, amount.placements)
    model.compute_ms.fill_(float(compute.mean()))
    model.exchange_ms.fill_(max(float(exchange.mean()), 1e-9))
    model.columns.fill_(float(sums.mean()))
    target = (torch.from_numpy(compute) / model.compute_ms).float()
    _fit(model.compute, (features, present), target, random, amount)
    sent = (torch.from_numpy(exchange) / model.exchange_ms).float()
    of_sums = ((torch.from_numpy(sums) / model.columns).float(),)
    _fit(model.exchange, of_sums, sent, random, amount)
    return model


def _sets(
    settings: Sequence[Setting], scaling: Scaling, random: np.random.Generator, count: int
) -> tuple[Tensor, Tensor, Floats]:
    """Sample sets of column parts on one device, and compute the ms of each set."""
    features = torch.zeros(count, LARGEST_SET, len(WITHOUT_SIZE))
    present = torch.zeros(count, LARGEST_SET)
    measured = np.zeros(count)
    for row in range(count):
        setting = settings[int(random.integers(len(settings)))]
        most = min(LARGEST_SET, len(setting.tables))
        tables = random.choice(len(setting.tables), int(random.integers(1, most + 1)), False)
        total = setting.problem.base[0].copy()
        cuts = [1] * len(setting.tables)
        for table in tables.tolist():
            cut = int(random.choice((1, 1, 2, 4)))
            option = setting.option(table, _column_shape(cut))
            if option is None:
                option, cut = setting.option(table, _column_shape(1)), 1
            if option is None:
                continue
            cuts[table] = cut
            total += option.shards[0] if option.num_shards else option.home
        parts = _parts(setting, scaling, cuts)
        first = [parts.table.index(table) for table in tables.tolist()]
        features[row, : len(first)] = parts.features[first]
        present[row, : len(first)] = 1.0
        measured[row] = total[0]
    return features, present, measured


def _placements(
    settings: Sequence[Setting], random: np.random.Generator, count: int
) -> tuple[Floats, Floats]:
    """Sample placements: [count, devices] column sums, and the ms of each device's exchange."""
    size = settings[0].num_ranks
    sums, exchange = np.zeros((count, size)), np.zeros((count, size))
    for row in range(count):
        setting = settings[int(random.integers(len(settings)))]
        devices = random_devices(setting, random)
        np.add.at(sums[row], devices, setting.dims)
        loads = price_of(setting.problem, setting.whole(devices)).loads
        exchange[row] = loads[:, 1:BYTES].sum(axis=1)
    return sums, exchange


def _fit(
    net: nn.Module,
    inputs: tuple[Tensor, ...],
    target: Tensor,
    random: np.random.Generator,
    amount: Amount,
) -> None:
    """Train with the MSE loss and Adam at a learning rate of 1e-3; keep the weights of the epoch
    with the lowest error on a held-out tenth.
    """
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    order = torch.from_numpy(random.permutation(len(target)))
    held, trained = order[: len(order) // 10], order[len(order) // 10 :]
    best = (float("inf"), {name: value.clone() for name, value in net.state_dict().items()})
    for _ in range(amount.epochs):
        shuffled = trained[torch.from_numpy(random.permutation(len(trained)))]
        for rows in shuffled.split(amount.batch):
            descend(optimizer, (net(*(x[rows] for x in inputs)) - target[rows]).square().mean())
        with torch.no_grad():
            error = float((net(*(x[held] for x in inputs)) - target[held]).square().mean())
        if error < best[0]:
            best = (error, {name: value.clone() for name, value in net.state_dict().items()})
    net.load_state_dict(best[1])

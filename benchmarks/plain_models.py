"""The models in plain PyTorch, in one process, for comparison. sbpflow is used only for initial
values and parameter names. The models follow the papers and the public code listed in
docs/models.md. Tables are nn.Embedding, and normalization and dropout come from torch.
``forward(dense, ids)`` returns logits of shape [rows].
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sbpflow.runtime.random.streams import fill_uniform

NORMS = {"none": None, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


def hidden_layers(
    inputs: int, hidden: Sequence[int], norm: str = "none", dropout: float = 0.0
) -> list[nn.Module]:
    """Build linear, norm, ReLU, and dropout layers for each width in ``hidden``."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers.append(nn.Linear(inputs, size))
        if (kind := NORMS[norm]) is not None:
            layers.append(kind(size))
        layers += [nn.ReLU(), nn.Dropout(dropout)]
        inputs = size
    return layers


def named_layers(name: str, layers: nn.Sequential) -> dict[str, tuple[Tensor, float]]:
    """Return an MLP's parameters in the format of ``PlainModel.named``."""
    found: dict[str, tuple[Tensor, float]] = {}
    index = -1
    for layer in layers:
        if isinstance(layer, nn.Linear):
            index += 1
            found |= named_linear(f"{name}.{index}", layer)
        elif isinstance(layer, nn.BatchNorm1d | nn.LayerNorm):
            found[f"{name}.{index}.norm.weight"] = layer.weight, 0.0
            found[f"{name}.{index}.norm.bias"] = layer.bias, 0.0
    return found


def named_linear(name: str, linear: nn.Linear) -> dict[str, tuple[Tensor, float]]:
    """Return a linear layer's weight and bias in the format of ``PlainModel.named``."""
    bound = (6 / (linear.in_features + linear.out_features)) ** 0.5
    found = {f"{name}.weight": (linear.weight, bound)}
    return found if linear.bias is None else found | {f"{name}.bias": (linear.bias, 0.0)}


@torch.no_grad()
def start_as_sbpflow(parameters: Mapping[str, tuple[Tensor, float]], seed: int) -> None:
    """Fill the parameters with the initial values of a run with this seed."""
    for name, (value, bound) in parameters.items():
        if bound:
            width = value.shape[-1]
            fill_uniform(value.data, seed=seed, name=name, bound=bound, num_columns=width)
        elif not name.endswith("norm.weight"):
            value.zero_()


class PlainModel(nn.Module):
    """Base class for the models: vector tables ``deep`` and, in some models, weight tables ``wide``
    and vectors of dense fields.
    """

    def __init__(self, rows: Sequence[int], num_dense: int, dim: int, sparse: bool) -> None:
        super().__init__()
        self.dim, self.num_dense = dim, num_dense
        self.deep = nn.ModuleList(nn.Embedding(n, dim, sparse=sparse) for n in rows)
        self.wide = nn.ModuleList()

    def add_wide(self, rows: Sequence[int], sparse: bool) -> None:
        """Add one weight per value of every field."""
        self.wide = nn.ModuleList(nn.Embedding(n, 1, sparse=sparse) for n in rows)
        self.wide_numeric = nn.Linear(self.num_dense, 1, bias=False)

    def add_number_vectors(self) -> None:
        """Add a vector per dense field."""
        self.numbers = nn.Parameter(torch.empty(self.num_dense, self.dim))

    def named(self, fields: Sequence[str]) -> dict[str, tuple[Tensor, float]]:
        """Return {sbpflow's parameter name: (the parameter, the bound of its initial values)}.

        Initial values are uniform. The bound is Glorot's for linear layers, 0.05 for tables and
        vectors, and 0 for a constant.
        """
        found: dict[str, tuple[Tensor, float]] = {}
        for kind in ("wide", "deep"):
            for field, table in zip(fields, getattr(self, kind), strict=False):
                found[f"{kind}.{field}"] = table.weight, 0.05
        if hasattr(self, "numbers"):
            found["numeric.weight"] = self.numbers, 0.05
        if len(self.wide):
            found |= named_linear("wide_numeric", self.wide_numeric)
        for part in ("mlp", "bottom", "top"):
            if isinstance(layers := getattr(self, part, None), nn.Sequential):
                found |= named_layers(part, layers)
        return found

    def tables(self) -> list[nn.Parameter]:
        return [table.weight for table in [*self.deep, *self.wide]]

    def others(self) -> list[nn.Parameter]:
        tables = {id(table) for table in self.tables()}
        return [parameter for parameter in self.parameters() if id(parameter) not in tables]

    def vectors(self, ids: Tensor) -> list[Tensor]:
        return [table(ids[:, n]) for n, table in enumerate(self.deep)]

    def with_numbers(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Return the vectors ([rows, fields, dim]), with the dense fields last."""
        numbers = [dense[:, n : n + 1] * self.numbers[n] for n in range(self.num_dense)]
        return torch.stack([*self.vectors(ids), *numbers], 1)

    def first_order(self, dense: Tensor, ids: Tensor) -> Tensor:
        weights = sum(table(ids[:, n]) for n, table in enumerate(self.wide))
        return weights + self.wide_numeric(dense)


class PlainWide(PlainModel):
    """Computes Wide & Deep as in FuxiCTR: a first-order term plus an MLP over all vectors."""

    def __init__(
        self, rows: Sequence[int], num_dense: int, dim: int, hidden: Sequence[int],
        norm: str = "none", dropout: float = 0.0, sparse: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(rows, num_dense, dim, sparse)
        self.add_wide(rows, sparse)
        self.add_number_vectors()
        layers = hidden_layers((len(rows) + num_dense) * dim, hidden, norm, dropout)
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        vectors = self.with_numbers(dense, ids)
        return (self.first_order(dense, ids) + self.mlp(vectors.flatten(1))).squeeze(1)


class PlainDeepFm(PlainWide):
    """Computes DeepFM: a first-order term plus the dot products of all pairs plus an MLP."""

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        vectors = self.with_numbers(dense, ids)
        pairs = torch.einsum("bid,bjd->bij", vectors, vectors).triu(1).sum((1, 2))
        return super().forward(dense, ids) + pairs


class PlainDlrm(PlainModel):
    """Implements DLRM: a bottom MLP, dot products of all pairs in the row order of the lower
    triangle, and a top MLP.
    """

    def __init__(
        self, rows: Sequence[int], num_dense: int, dim: int, bottom: Sequence[int],
        top: Sequence[int], norm: str = "none", dropout: float = 0.0, sparse: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(rows, num_dense, dim, sparse)
        below = hidden_layers(num_dense, bottom, norm)
        self.bottom = nn.Sequential(
            *below, nn.Linear(bottom[-1] if bottom else num_dense, dim), nn.ReLU()
        )
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(
            *hidden_layers(dim + pairs, top, norm, dropout), nn.Linear(top[-1], 1)
        )
        self.pairs = torch.tensor([(i, j) for i in range(len(rows) + 1) for j in range(i)]).t()

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = self.bottom(dense)
        vectors = torch.stack([first, *self.vectors(ids)], 1)
        products = torch.einsum("bid,bjd->bij", vectors, vectors)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([first, pairs], 1)).squeeze(1)


class PlainDcn(PlainModel):
    """Computes DCN-V2: full-rank crosses in parallel with an MLP, or a bottom MLP and crosses of
    rank ``rank`` before a top MLP.
    """

    def __init__(
        self, rows: Sequence[int], num_dense: int, dim: int, hidden: Sequence[int],
        crosses: int = 3, rank: int | None = None, bottom: Sequence[int] | None = None,
        norm: str = "none", dropout: float = 0.0, sparse: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(rows, num_dense, dim, sparse)
        width = (len(rows) + (num_dense if bottom is None else 1)) * dim
        self.bottom = None
        if bottom is None:
            self.add_number_vectors()
        else:
            below = hidden_layers(num_dense, bottom, norm)
            self.bottom = nn.Sequential(*below, nn.Linear(bottom[-1], dim), nn.ReLU())
        if rank is None:
            self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(crosses))
        else:
            self.cross = nn.ModuleList(
                nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
                for _ in range(crosses)
            )
        self.mlp = nn.Sequential(*hidden_layers(width, hidden, norm, dropout))
        self.output = nn.Linear(hidden[-1] + (0 if self.bottom is not None else width), 1)

    def named(self, fields: Sequence[str]) -> dict[str, tuple[Tensor, float]]:
        found = super().named(fields)
        for index, cross in enumerate(self.cross):
            if isinstance(cross, nn.Linear):
                found |= named_linear(f"cross.{index}", cross)
            else:
                found |= named_linear(f"cross.{index}.v", cross[0])
                found |= named_linear(f"cross.{index}.w", cross[1])
        last = "output"
        if self.bottom is not None:
            last = f"mlp.{sum(isinstance(layer, nn.Linear) for layer in self.mlp)}"
        return found | named_linear(last, self.output)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        if self.bottom is None:
            start = self.with_numbers(dense, ids).flatten(1)
        else:
            start = torch.cat([self.bottom(dense), *self.vectors(ids)], 1)
        x = start
        for layer in self.cross:
            x = start * layer(x) + x
        last = self.mlp(x) if self.bottom is not None else torch.cat([x, self.mlp(start)], 1)
        return self.output(last).squeeze(1)

"""Learns an ensemble of corrections for phases with fused work, because sums of counts cannot
describe it.

Each member is trained on a resample of the tasks. A member is a sum of powers of non-negative mixes
of the counts, so more work never costs less. The ratios that were measured bound it. A phase is
corrected only if the correction also helps on tasks that the member was not trained on: otherwise,
a search that minimizes a correction fitted to noise finds plans that look fast only because of the
noise. The forward and backward phases of the dense part have no correction, because one learned
from the tasks' narrow layers is wrong for wide layers.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from sbpflow.costs.ids import Floats
from sbpflow.planner.calibration.cross_validation import FLOOR_MS
from sbpflow.planner.calibration.records import Record
from sbpflow.planner.costs.profile import Fusion
from sbpflow.planner.costs.simulate import KINDS, MOVES, PHASE, PHASES

LEAST_LEARNED_MS = 0.3  # phases with a shorter mean time get no correction
# smallest reduction of the error on held-out tasks that justifies the risk of a correction
LEAST_GAIN = 0.05
MEMBERS, EPOCHS = 5, 150
_POWERS = (0.7, 0.9, 1.0, 1.2)  # initial values


def examples_of(records: Sequence[Record], name: str) -> tuple[Floats, Floats]:
    """Return ([n, F], [n] ms): one row per rank for a move; one row per plan, of its busiest rank,
    for a transfer.
    """
    place = PHASE[name]
    if name in MOVES:
        x = np.concatenate([record.totals for record in records])
        return x, np.concatenate([record.phases[:, place] for record in records])
    x = np.stack([record.totals.max(0) for record in records])
    return x, np.array([record.phases[:, place].max() for record in records])


def learn_corrections(
    records: Sequence[Record], matrix: Floats, terms: Mapping[str, Sequence[str]], seed: int
) -> list[dict[str, Fusion]]:
    """Return ``MEMBERS`` corrections for each phase that is long enough and improves with them.

    Each correction is trained on a resample of the tasks. ``matrix`` [F, P] contains the weights,
    and ``terms`` contains the features that a phase can depend on.
    """
    random = np.random.default_rng(seed)
    names = sorted({record.sample for record in records})
    times = np.stack(
        [
            np.bincount(random.choice(len(names), len(names)), minlength=len(names))
            for _ in range(MEMBERS)
        ]
    )
    of_record = times[:, [names.index(record.sample) for record in records]].astype(np.float64)
    members: list[dict[str, Fusion]] = [{} for _ in range(MEMBERS)]
    for name in PHASES:
        x, y = examples_of(records, name)
        weights = matrix[:, PHASE[name]]
        linear = x @ weights
        used = linear > LEAST_LEARNED_MS
        # dense layers may be far larger than the layers of the tasks
        fused = KINDS.get(name) != "dense"
        if not fused or y.mean() < LEAST_LEARNED_MS or len(terms[name]) < 3 or used.sum() < 20:
            continue
        ratio = (y[used] + FLOOR_MS) / (linear[used] + FLOOR_MS)
        low, high = np.quantile(ratio, [0.02, 0.98])
        bounds = (float(np.clip(low, 0.4, 1.0)), float(np.clip(high, 1.0, 2.5)))
        counted = np.repeat(of_record, x.shape[0] // len(records), axis=1)
        fusions, corrected = _train(x, y, weights, counted, bounds)
        if _helps(corrected, linear, y, counted):
            for member, fusion in zip(members, fusions, strict=True):
                member[name] = fusion
    return members


def _helps(corrected: Floats, linear: Floats, y: Floats, counted: Floats) -> bool:
    """Return whether ``corrected`` [members, n] has a smaller error than the plain sum ``linear``
    [n].

    The error is measured on the examples that a member was not trained on. The gain must reach
    ``LEAST_GAIN``.
    """
    others = counted == 0
    if not others.any():
        return True
    target = np.log(y + FLOOR_MS)
    error = np.abs(np.log(corrected + FLOOR_MS) - target)[others].mean()
    plain = np.broadcast_to(np.abs(np.log(linear + FLOOR_MS) - target), others.shape)[others]
    return bool(error < (1.0 - LEAST_GAIN) * plain.mean())


def _train(
    x: Floats, y: Floats, weights: Floats, counted: Floats, bounds: tuple[float, float]
) -> tuple[list[Fusion], Floats]:
    """Train all members at once: minimize the squared log error with Adam, starting near the
    weights.

    ``counted`` [members, n] is the weight of each example for each member. Returns the corrections
    and their predictions [members, n] in ms.
    """
    low, high = bounds
    generator = torch.Generator().manual_seed(7)
    used = np.flatnonzero(weights > 0)
    parts = torch.from_numpy(x[:, used] * weights[used]).float()  # ms by term
    target = torch.from_numpy(y + FLOOR_MS).float().log()
    share = torch.from_numpy(counted / counted.sum(1, keepdims=True)).float()
    linear = parts.sum(1)
    reference = float(linear.median().clamp_min(1e-3))
    num, powers = len(counted), len(_POWERS)
    mix = (torch.rand(num, powers, len(used), generator=generator) * 0.2).requires_grad_()
    scale = torch.full((num, powers), -math.log(powers)).requires_grad_()
    start = torch.tensor([math.log(p / (2.0 - p)) for p in _POWERS])
    power = start.repeat(num, 1).requires_grad_()
    optimizer = torch.optim.Adam([mix, scale, power], lr=0.05)

    def corrected() -> tuple[torch.Tensor, torch.Tensor]:
        """Return [members, n] ms, without and with the bounds."""
        inside = (torch.einsum("nf,mkf->mkn", parts, mix.exp()) / reference).clamp_min(1e-9)
        raised = inside ** (2.0 * torch.sigmoid(power))[..., None] * scale.exp()[..., None]
        total = reference * raised.sum(1)
        return total, torch.maximum(torch.minimum(total, high * linear), low * linear)

    for _ in range(EPOCHS):
        optimizer.zero_grad()
        total, bounded = corrected()
        # Values outside the bounds have no gradient, so a small part of the unbounded error is
        # added.
        error = ((bounded + FLOOR_MS).log() - target).square()
        error = error + 0.1 * ((total + FLOOR_MS).log() - target).square()
        loss = (error * share).sum() + 1e-3 * (mix.square().mean() + scale.square().mean())
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        _, bounded = corrected()
        wide = np.zeros((num, powers, len(weights)))
        wide[..., used] = (mix.exp() / reference).numpy() * weights[used]
        scales = (reference * scale.exp()).tolist()
        exponents = (2.0 * torch.sigmoid(power)).tolist()
    fusions = [
        Fusion(
            mix=tuple(tuple(row) for row in wide[number].tolist()),
            scale=tuple(scales[number]),
            power=tuple(exponents[number]),
            low=low,
            high=high,
        )
        for number in range(num)
    ]
    return fusions, bounded.double().numpy()

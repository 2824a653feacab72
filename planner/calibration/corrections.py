"""What sums of counts leave out of fused work: corrections learned per phase, as an ensemble.

Each member is trained on a resample of the tasks; it is a sum of powers of non-negative mixes of
the counts, so that more work never costs less, and bounded to the ratios that were measured. A
phase is corrected only where that helps on the tasks that a member was not trained on: a search
that minimises a correction of noise finds plans that only the noise makes fast. Passes through the
dense part have none: what is learned of the tasks' narrow layers is wrong of wide ones.
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

LEAST_LEARNED_MS = 0.3  # phases shorter than this on average get no correction
LEAST_GAIN = 0.05  # of the error on tasks left out: less is not worth what it says of larger ones
MEMBERS, EPOCHS = 5, 150
_POWERS = (0.7, 0.9, 1.0, 1.2)  # where training starts


def examples_of(records: Sequence[Record], name: str) -> tuple[Floats, Floats]:
    """([n, F], [n] ms): per rank for a move; per plan, of the busiest, for a transfer."""
    place = PHASE[name]
    if name in MOVES:
        x = np.concatenate([record.totals for record in records])
        return x, np.concatenate([record.phases[:, place] for record in records])
    x = np.stack([record.totals.max(0) for record in records])
    return x, np.array([record.phases[:, place].max() for record in records])


def learn_corrections(
    records: Sequence[Record], matrix: Floats, terms: Mapping[str, Sequence[str]], seed: int
) -> list[dict[str, Fusion]]:
    """``MEMBERS`` corrections of every phase that is long enough and that they help, each from a
    resample of tasks. ``matrix`` [F, P] are the weights, ``terms`` what a phase can depend on.
    """
    random = np.random.default_rng(seed)
    names = sorted({record.sample for record in records})
    times = np.stack(
        [np.bincount(random.choice(len(names), len(names)), minlength=len(names))
         for _ in range(MEMBERS)]
    )  # fmt: skip
    of_record = times[:, [names.index(record.sample) for record in records]].astype(np.float64)
    members: list[dict[str, Fusion]] = [{} for _ in range(MEMBERS)]
    for name in PHASES:
        x, y = examples_of(records, name)
        weights = matrix[:, PHASE[name]]
        linear = x @ weights
        used = linear > LEAST_LEARNED_MS
        fused = KINDS.get(name) != "dense"  # whose layers are priced beyond those of the tasks
        if not fused or y.mean() < LEAST_LEARNED_MS or len(terms[name]) < 3 or used.sum() < 20:
            continue
        ratio = (y[used] + FLOOR_MS) / (linear[used] + FLOOR_MS)
        low, high = np.quantile(ratio, [0.02, 0.98])
        bounds = (float(np.clip(low, 0.4, 1.0)), float(np.clip(high, 1.0, 2.5)))
        counted = np.repeat(of_record, x.shape[0] // len(records), axis=1)
        fusions, said = _train(x, y, weights, counted, bounds)
        if _helps(said, linear, y, counted):
            for member, fusion in zip(members, fusions, strict=True):
                member[name] = fusion
    return members


def _helps(said: Floats, linear: Floats, y: Floats, counted: Floats) -> bool:
    """Whether corrections [members, n] are nearer to ``y`` than the plain sum is, by a share of
    ``LEAST_GAIN`` at least, on the examples that a member was not trained on.
    """
    others = counted == 0
    if not others.any():
        return True
    target = np.log(y + FLOOR_MS)
    corrected = np.abs(np.log(said + FLOOR_MS) - target)[others].mean()
    plain = np.broadcast_to(np.abs(np.log(linear + FLOOR_MS) - target), others.shape)[others]
    return bool(corrected < (1.0 - LEAST_GAIN) * plain.mean())


def _train(
    x: Floats, y: Floats, weights: Floats, counted: Floats, bounds: tuple[float, float]
) -> tuple[list[Fusion], Floats]:
    """Adam on the squared log error of all members at once; starts near the weights themselves.

    ``counted`` [members, n] is how often each example counts for each. Also what they say [members,
    n] ms.
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
        """[members, n] ms as they come out, and within the bounds."""
        inside = (torch.einsum("nf,mkf->mkn", parts, mix.exp()) / reference).clamp_min(1e-9)
        raised = inside ** (2.0 * torch.sigmoid(power))[..., None] * scale.exp()[..., None]
        total = reference * raised.sum(1)
        return total, torch.maximum(torch.minimum(total, high * linear), low * linear)

    for _ in range(EPOCHS):
        optimizer.zero_grad()
        total, kept = corrected()
        # A little of the unbounded error, for what lies at a bound has no gradient.
        error = ((kept + FLOOR_MS).log() - target).square()
        error = error + 0.1 * ((total + FLOOR_MS).log() - target).square()
        loss = (error * share).sum() + 1e-3 * (mix.square().mean() + scale.square().mean())
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        _, kept = corrected()
        wide = np.zeros((num, powers, len(weights)))
        wide[..., used] = (mix.exp() / reference).numpy() * weights[used]
        scales = (reference * scale.exp()).tolist()
        found = (2.0 * torch.sigmoid(power)).tolist()
    fusions = [
        Fusion(
            mix=tuple(tuple(row) for row in wide[number].tolist()),
            scale=tuple(scales[number]),
            power=tuple(found[number]),
            low=low,
            high=high,
        )
        for number in range(num)
    ]
    return fusions, kept.double().numpy()

"""Implements DreamShard: measured placements train a cost network, and the cost network trains a
policy.

Source: NeurIPS'22; daochenzha/dreamshard 73128ed and e76a4ad (``models.py``, ``env.py``,
``training.py``). The outputs of an MLP over each table's 21 features are summed per device. Two
heads predict a device's work and exchange, and another head predicts the cost of the whole
placement from the maximum over devices. The policy places tables in descending order of predicted
cost, with a probability for every device with enough memory. The policy learns by REINFORCE only
from the cost network's prediction. As in the source, the policy sees the order of the tables but
not the table that it places. Between the updates, placements of the policy are measured, and the
cost network is trained on all measurements so far.

Differences: One head predicts forward and backward work together, because prices do not separate
the two. This machine's prices of whole plans replace measurements; they are divided by the mean of
the first prices, because the learning rates were chosen for milliseconds on another machine. The
features for rows, size, and pooling are logarithms, and are scaled by statistics of the training
tables instead of those of each task's own tables. Devices without enough memory also have
probability 0 in training. The episodes of a batch run in parallel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sbpflow.planner.published.nets import Scaling, descend, mlp, sums
from sbpflow.planner.published.setting import NUM_FEATURES, Setting
from sbpflow.planner.search.problem import BYTES, Assignment, Ints, price_of

LATENT = 32
NUM_PARTS = 2
ENTROPY = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """The amount of measurement and training, with the defaults of the source."""

    iterations: int = 10
    placements: int = 10  # placements measured in each iteration
    cost_steps: int = 300
    batch: int = 64
    policy_steps: int = 10
    episodes: int = 10  # number of episodes per policy step


class Net(nn.Module):
    """The cost network and the policy, with the same layer widths as in the source."""

    def __init__(self) -> None:
        super().__init__()
        self.table = mlp(NUM_FEATURES, 128, LATENT, last=True)
        self.heads = nn.ModuleList(mlp(LATENT, 64, 1) for _ in range(NUM_PARTS))
        self.overall = mlp(LATENT, 64, 1)
        self.policy_table = mlp(NUM_FEATURES, 128, LATENT, last=True)
        self.policy_cost = mlp(NUM_PARTS, 64, 32, last=True)
        self.policy = nn.Linear(LATENT + 32, 1)

    def parts(self, summed: Tensor) -> Tensor:
        """Map device vectors [.., LATENT] to [.., NUM_PARTS]: work and exchange."""
        return torch.cat([head(summed) for head in self.heads], dim=-1)

    def whole(self, summed: Tensor) -> Tensor:
        """Map [.., devices, LATENT] to [..]: the cost of a placement."""
        return self.overall(summed.amax(dim=-2)).squeeze(-1)

    def logits(self, policy_sums: Tensor, cost_sums: Tensor) -> Tensor:
        """Map the placed tables' sums of both embeddings to logits [.., devices]."""
        with torch.no_grad():
            costs = self.parts(cost_sums)
        both = torch.cat([policy_sums, self.policy_cost(costs)], dim=-1)
        return self.policy(both).squeeze(-1)


class DreamShard(nn.Module):
    """The networks, which have the same form for any number of ranks, and the unit of the predicted
    costs. The networks are untrained, but scale features for the tables of ``settings``.
    """

    unit_ms: Tensor

    def __init__(self, num_ranks: int, settings: Sequence[Setting] = ()) -> None:
        super().__init__()
        self.net, self.scaling = Net(), Scaling(settings)
        self.register_buffer("unit_ms", torch.ones((), dtype=torch.float64))

    @staticmethod
    def trained(
        settings: Sequence[Setting], seed: int, amount: Amount | None = None
    ) -> "DreamShard":
        """Train on tasks, using their prices in place of measurements."""
        return _Training(settings, seed, amount or Amount()).run()

    def plan(self, setting: Setting) -> Assignment:
        """Place the tables one after another, each on its most likely device."""
        with torch.no_grad():
            devices, _, _ = self.episodes(setting, 1, None)
        return setting.whole(devices[0])

    def episodes(
        self, setting: Setting, count: int, generator: torch.Generator | None
    ) -> tuple[Ints, Tensor, Tensor]:
        """Generate parallel placements: devices [count, T], and log-probabilities and entropies
        [count].

        ``generator`` samples the devices; without it, the most likely devices are used.
        """
        features, size = self.scaling(setting.features), setting.num_ranks
        cost, policy = self.net.table(features).detach(), self.net.policy_table(features)
        cost_sums = torch.zeros(count, size, LATENT)
        policy_sums = torch.zeros(count, size, LATENT)
        room = torch.from_numpy(np.tile(setting.room_bytes, (count, 1)))
        held = torch.from_numpy(setting.held_bytes)
        devices = np.zeros((count, len(features)), dtype=np.int64)
        likely, entropy = torch.zeros(count), torch.zeros(count)
        alone = self.net.parts(cost).sum(-1).detach()  # the predicted cost of each table alone
        for table in np.argsort(-alone.numpy(), kind="stable").tolist():
            legal = room >= held[table]
            legal |= ~legal.any(dim=1, keepdim=True) & (room == room.amax(dim=1, keepdim=True))
            logits = self.net.logits(policy_sums, cost_sums).masked_fill(~legal, -torch.inf)
            log_p = functional.log_softmax(logits, dim=-1)
            p = log_p.exp()
            if generator is None:
                chosen = log_p.argmax(dim=-1)
            else:
                chosen = torch.multinomial(p, 1, generator=generator).squeeze(1)
            one_hot = functional.one_hot(chosen, size).float()
            likely = likely + (log_p.masked_fill(~legal, 0.0) * one_hot).sum(-1)
            entropy = entropy - (p * log_p.masked_fill(~legal, 0.0)).sum(-1)
            cost_sums = cost_sums + one_hot[..., None] * cost[table]
            policy_sums = policy_sums + one_hot[..., None] * policy[table]
            room = room - one_hot.double() * held[table]
            devices[:, table] = chosen.numpy()
        return devices, likely, entropy


@dataclass(frozen=True, slots=True)
class _Sample:
    """A priced placement: the costs of each device [devices, NUM_PARTS] and of the whole placement,
    in the unit of the predicted costs.
    """

    features: Tensor
    devices: Tensor
    parts: Tensor
    whole: float


class _Training:
    def __init__(self, settings: Sequence[Setting], seed: int, amount: Amount) -> None:
        self.settings, self.amount = settings, amount
        self.generator = torch.Generator().manual_seed(seed)
        self.random = np.random.default_rng(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = DreamShard(settings[0].num_ranks, settings)
        self.samples: list[_Sample] = []

    def run(self) -> DreamShard:
        optimizer = torch.optim.Adam(self.model.net.parameters(), lr=5e-4)
        total = self.amount.iterations
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / total)
        for _ in range(total):
            self._measure()
            for _ in range(self.amount.cost_steps):
                self._learn_cost(optimizer)
            for _ in range(self.amount.policy_steps):
                self._learn_policy(optimizer)
            decay.step()
        return self.model

    def _any(self) -> Setting:
        return self.settings[int(self.random.integers(len(self.settings)))]

    def _measure(self) -> None:
        measurements = []
        for _ in range(self.amount.placements):
            setting = self._any()
            with torch.no_grad():
                devices, _, _ = self.model.episodes(setting, 1, self.generator)
            measured = price_of(setting.problem, setting.whole(devices[0]))
            measurements.append((setting, devices[0], measured))
        if not self.samples:
            self.model.unit_ms.fill_(float(np.mean([m.ms for _, _, m in measurements])))
        unit_ms = self.model.unit_ms.item()
        for setting, devices, measured in measurements:
            exchange = measured.loads[:, 1:BYTES].sum(axis=1)
            parts = np.stack([measured.loads[:, 0], exchange], axis=1)
            self.samples.append(
                _Sample(
                    features=self.model.scaling(setting.features),
                    devices=torch.from_numpy(devices),
                    parts=torch.from_numpy(parts / unit_ms).float(),
                    whole=measured.ms / unit_ms,
                )
            )

    def _learn_cost(self, optimizer: torch.optim.Optimizer) -> None:
        numbers = self.random.integers(len(self.samples), size=self.amount.batch)
        drawn = [self.samples[int(n)] for n in numbers]
        net = self.model.net
        first = np.cumsum([0, *(len(sample.parts) for sample in drawn)])
        shifted = [sample.devices + n for sample, n in zip(drawn, first[:-1], strict=True)]
        devices = torch.cat(shifted)
        latents = net.table(torch.cat([sample.features for sample in drawn]))
        summed = sums(latents, devices, int(first[-1]))
        of = torch.repeat_interleave(torch.arange(len(drawn)), torch.from_numpy(np.diff(first)))
        rows = of[:, None].expand_as(summed)
        largest = torch.zeros(len(drawn), LATENT).scatter_reduce(0, rows, summed, "amax")
        whole = torch.tensor([sample.whole for sample in drawn])
        loss = (net.overall(largest).squeeze(-1) - whole).square().mean()
        parts = torch.cat([sample.parts for sample in drawn])
        loss = loss + (net.parts(summed) - parts).square().mean(0).sum()
        descend(optimizer, loss)

    def _learn_policy(self, optimizer: torch.optim.Optimizer) -> None:
        setting = self._any()
        devices, likely, entropy = self.model.episodes(
            setting, self.amount.episodes, self.generator
        )
        with torch.no_grad():
            latents = self.model.net.table(self.model.scaling(setting.features))
            placed = functional.one_hot(torch.from_numpy(devices), setting.num_ranks).float()
            reward = -self.model.net.whole(placed.transpose(1, 2) @ latents)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
        steps = devices.shape[1]
        loss = -(likely * advantage).mean() / steps - ENTROPY * entropy.mean() / steps
        descend(optimizer, loss)

"""AutoShard: an LSTM policy that places tables one by one, trained by V-trace on balance.

Source: KDD'22; daochenzha/autoshard e861ecb and 06f6304 (``training.py``, ``bench.py``). A table's
21 features pass an MLP that state, actions and cost head share; an LSTM of two layers reads the
tables in order; every device is scored from the state, the sum of its tables, its predicted cost
and its bytes. The reward, at the end of an episode, is the least over the greatest compute time of
the devices: balance, not time, and no exchange. Memory is no limit but a penalty: a plan over it
gets how much it is over, and may be returned. The cost head learns from the measured devices by
MSE.
Differences: episodes of a batch are of one task and run whole, side by side, in place of unrolls
of 100 steps by processes; the acting copy is one update behind; 20,000 steps in place of 100,000,
and the rates decay over them; costs are divided by the mean of the first batch; features are
scaled as for the other learned planners.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sbpflow.planner.published.nets import Scaling, mlp
from sbpflow.planner.published.setting import NUM_FEATURES, Setting
from sbpflow.planner.search.problem import Assignment, Ints

WIDTH = 32
ENTROPY, BASELINE, MOST_GRADIENT = 0.001, 0.5, 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much is tried and trained."""

    steps: int = 20_000  # tables placed
    episodes: int = 8  # side by side
    cost_updates: int = 20  # after each of the policy
    replay: int = 5_000  # devices
    batch: int = 512


class Net(nn.Module):
    """The widths of the source."""

    def __init__(self) -> None:
        super().__init__()
        self.table = mlp(NUM_FEATURES, 128, WIDTH, last=True)
        self.place = mlp(1, WIDTH, last=True)
        self.device = mlp(2, WIDTH, last=True)
        self.core = nn.LSTM(2 * WIDTH, 2 * WIDTH, 2)
        self.policy = mlp(6 * WIDTH, 128, 128, 64, 1)
        self.value = mlp(2 * WIDTH, 64, 1)
        self.cost = mlp(WIDTH, 64, 1)

    def states(self, latents: Tensor) -> Tensor:
        """[T, WIDTH] of tables in order -> [T, 2 WIDTH]; what was chosen does not enter."""
        share = torch.arange(len(latents), dtype=torch.float32)[:, None] / len(latents)
        core, _ = self.core(torch.cat([latents, self.place(share)], dim=-1)[:, None])
        return core[:, 0]

    def logits(self, states: Tensor, summed: Tensor, held: Tensor) -> Tensor:
        """[..] states of shape [.., 2 WIDTH], devices' sums [.., D, WIDTH] and bytes [.., D]."""
        with torch.no_grad():
            costs = self.cost(summed)
        actions = torch.cat([summed, self.device(torch.cat([costs, held[..., None]], -1))], -1)
        spread = states[..., None, :].expand(actions.shape)
        return self.policy(torch.cat([spread, actions, spread * actions], -1)).squeeze(-1)


@dataclass(frozen=True, slots=True)
class _Episodes:
    """Placements side by side, tables in the order they were placed."""

    features: Tensor  # [T, 21]
    sizes: Tensor  # [T], as shares of a device's room
    chosen: Tensor  # [T, E] devices
    logits: Tensor  # [T, E, D] of who acted
    order: Ints


@dataclass
class AutoShard:
    """The trained networks."""

    net: Net
    scaling: Scaling
    unit_ms: float = 1.0

    @classmethod
    def blank(cls, num_ranks: int) -> "AutoShard":
        """Untrained; the networks are the same for any number of ranks."""
        return cls(Net(), Scaling.none())

    @staticmethod
    def train(settings: Sequence[Setting], seed: int, amount: Amount | None = None) -> "AutoShard":
        """From tasks to train on, each with the prices that stand for measurements."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return _Training(settings, seed, amount or Amount()).run()

    def plan(self, setting: Setting) -> Assignment:
        """The most likely device for every table, one after another; it may not fit."""
        with torch.no_grad():
            found = self.act(setting, self.net, 1, sample=False)
        devices = np.zeros(len(found.order), dtype=np.int64)
        devices[found.order] = found.chosen[:, 0].numpy()
        return setting.whole(devices)

    def act(self, setting: Setting, net: Net, count: int, *, sample: bool) -> _Episodes:
        features = self.scaling.apply(setting.features)
        alone = net.cost(net.table(features)).squeeze(-1)
        order = np.argsort(-alone.numpy(), kind="stable")
        features = features[torch.from_numpy(order)]
        sizes = torch.from_numpy(setting.held_bytes[order] / setting.room_bytes.mean()).float()
        latents = net.table(features)
        states = net.states(latents)
        summed = torch.zeros(count, setting.num_ranks, WIDTH)
        held = torch.zeros(count, setting.num_ranks)
        chosen: list[Tensor] = []
        logits: list[Tensor] = []
        for table in range(len(features)):
            scores = net.logits(states[table].expand(count, -1), summed, held)
            device = scores.argmax(-1)
            if sample:
                device = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
            one_hot = functional.one_hot(device, setting.num_ranks).float()
            summed = summed + one_hot[..., None] * latents[table]
            held = held + one_hot * sizes[table]
            chosen.append(device)
            logits.append(scores)
        return _Episodes(features, sizes, torch.stack(chosen), torch.stack(logits), order)


class _Training:
    def __init__(self, settings: Sequence[Setting], seed: int, amount: Amount) -> None:
        self.settings, self.amount = settings, amount
        self.random = np.random.default_rng(seed)
        every = np.concatenate([setting.features for setting in settings])
        self.model = AutoShard(Net(), Scaling.of(every))
        self.optimizer = torch.optim.Adam(self.model.net.parameters(), lr=1e-3)
        self.sets: list[Tensor] = []  # of the tables of measured devices
        self.costs: list[float] = []
        self.done = 0

    def run(self) -> AutoShard:
        decay = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda _: max(1.0 - self.done / self.amount.steps, 0.0)
        )
        actor = copy.deepcopy(self.model.net)
        while self.done < self.amount.steps:
            setting = self.settings[int(self.random.integers(len(self.settings)))]
            with torch.no_grad():
                found = self.model.act(setting, actor, self.amount.episodes, sample=True)
            actor.load_state_dict(self.model.net.state_dict())
            self._learn(found, self._rewards(setting, found))
            self._learn_costs()
            self.done += found.chosen.numel()
            decay.step()
        return self.model

    def _rewards(self, setting: Setting, found: _Episodes) -> Tensor:
        """[E]; measured devices go to the replay of the cost head."""
        rewards: list[float] = []
        first = not self.costs
        for chosen in found.chosen.T:
            devices = np.zeros(len(found.order), dtype=np.int64)
            devices[found.order] = chosen.numpy()
            measured = setting.measure(setting.whole(devices))
            ms = measured.forward + measured.backward
            if first and not self.costs:
                self.model.unit_ms = max(float(ms.mean()), 1e-9)
            for device, cost in enumerate(ms):
                self.sets.append(found.features[chosen == device])
                self.costs.append(float(cost) / self.model.unit_ms)
            held = [
                float(found.sizes[chosen == device].sum()) for device in range(setting.num_ranks)
            ]
            left = 1.0 - max(held)
            rewards.append(left if left < 0 else float(ms.min() / max(ms.max(), 1e-9)))
        self.sets = self.sets[-self.amount.replay :]
        self.costs = self.costs[-self.amount.replay :]
        return torch.tensor(rewards)

    def _learn(self, found: _Episodes, rewards: Tensor) -> None:
        net = self.model.net
        latents = net.table(found.features)
        states = net.states(latents)
        one_hot = functional.one_hot(found.chosen, found.logits.shape[-1]).float()
        placed = (one_hot[..., None] * latents[:, None, None]).cumsum(0)
        summed = torch.cat([torch.zeros_like(placed[:1]), placed[:-1]])
        sizes = (one_hot * found.sizes[:, None, None]).cumsum(0)
        held = torch.cat([torch.zeros_like(sizes[:1]), sizes[:-1]])
        count = found.chosen.shape[1]
        spread = states[:, None].expand(-1, count, -1)
        log_p = net.logits(spread, summed, held).log_softmax(-1)
        values = net.value(spread).squeeze(-1)
        likely = (log_p * one_hot).sum(-1)
        acted = (found.logits.log_softmax(-1) * one_hot).sum(-1)
        targets, advantages = vtrace(likely.detach() - acted, values.detach(), rewards)
        policy = -(likely * advantages).sum()
        baseline = 0.5 * (targets - values).square().sum()
        entropy = (log_p.exp() * log_p).sum()
        self._step(policy + BASELINE * baseline + ENTROPY * entropy)

    def _learn_costs(self) -> None:
        net = self.model.net
        for _ in range(self.amount.cost_updates):
            rows = self.random.integers(len(self.sets), size=min(self.amount.batch, len(self.sets)))
            drawn = [self.sets[int(row)] for row in rows]
            of = torch.repeat_interleave(
                torch.arange(len(drawn)), torch.tensor([len(one) for one in drawn])
            )
            latents = net.table(torch.cat(drawn))
            summed = torch.zeros(len(drawn), WIDTH).index_add(0, of, latents)
            costs = torch.tensor([self.costs[int(row)] for row in rows])
            self._step((net.cost(summed).squeeze(-1) - costs).square().mean())

    def _step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.net.parameters(), MOST_GRADIENT)
        self.optimizer.step()


def vtrace(log_ratios: Tensor, values: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Targets of the value and advantages of the policy, [T, E] both (Espeholt et al. 2018).

    ``log_ratios`` are log(learned / acted) of what was chosen; the only reward [E] is the last
    step's, nothing is discounted, both ratios are clipped at 1.
    """
    ratios = log_ratios.exp().clamp(max=1.0)
    following = torch.cat([values[1:], torch.zeros_like(values[:1])])
    paid = torch.zeros_like(values)
    paid[-1] = rewards
    errors = ratios * (paid + following - values)
    correction = torch.zeros_like(rewards)
    corrections: list[Tensor] = []
    for step in reversed(range(len(values))):
        correction = errors[step] + ratios[step] * correction
        corrections.append(correction)
    targets = values + torch.stack(corrections[::-1])
    after = torch.cat([targets[1:], torch.zeros_like(targets[:1])])
    return targets, ratios * (paid + after - values)

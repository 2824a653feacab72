"""Implements AutoShard: an LSTM policy places tables one by one; V-trace trains it to balance
devices.

Source: KDD'22; daochenzha/autoshard e861ecb and 06f6304 (``training.py``, ``bench.py``). State,
actions and cost head share an MLP over a table's 21 features. A two-layer LSTM reads the tables in
order. The score of a device depends on the state and on the device's table sum, predicted cost, and
bytes. The reward at the end of an episode is the smallest compute time of any device divided by the
largest. It measures balance, not time, and ignores exchanges. Memory is a penalty, not a limit: the
reward of a plan that exceeds the memory is the negative excess, and the planner may return such a
plan. The cost head is trained on measured devices with a mean squared error loss.

Differences: All episodes of a batch belong to one task and run to the end in parallel; the source
runs several processes in unrolls of 100 steps. The policy that acts is one update older than the
one that learns. Training takes 20,000 steps instead of 100,000, and the learning rates decay during
training. Costs are divided by the mean of the first batch. Features are scaled as for the other
learned planners.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sbpflow.planner.published.nets import Scaling, descend, mlp, sums
from sbpflow.planner.published.setting import NUM_FEATURES, Setting
from sbpflow.planner.search.problem import Assignment, Ints, price_of

WIDTH = 32
ENTROPY, BASELINE, MOST_GRADIENT = 0.001, 0.5, 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """The amount of training."""

    steps: int = 20_000  # number of tables to place
    episodes: int = 8  # number of episodes in parallel
    cost_updates: int = 20  # updates of the cost head after each update of the policy
    replay: int = 5_000  # number of devices in the replay buffer
    batch: int = 512


class Net(nn.Module):
    """The networks, with the same layer widths as in the source."""

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
        """Map the tables in order, [T, WIDTH], to states [T, 2 WIDTH], for any devices."""
        share = torch.arange(len(latents), dtype=torch.float32)[:, None] / len(latents)
        core, _ = self.core(torch.cat([latents, self.place(share)], dim=-1)[:, None])
        return core[:, 0]

    def logits(self, states: Tensor, summed: Tensor, held: Tensor) -> Tensor:
        """Map states [.., 2 WIDTH], device sums [.., D, WIDTH], and bytes [.., D] to [.., D]."""
        with torch.no_grad():
            costs = self.cost(summed)
        actions = torch.cat([summed, self.device(torch.cat([costs, held[..., None]], -1))], -1)
        spread = states[..., None, :].expand(actions.shape)
        return self.policy(torch.cat([spread, actions, spread * actions], -1)).squeeze(-1)


@dataclass(frozen=True, slots=True)
class _Episodes:
    """Parallel placements, with the tables in the order in which they were placed."""

    features: Tensor  # [T, 21]
    sizes: Tensor  # [T], as shares of the devices' mean available memory
    chosen: Tensor  # [T, E]
    logits: Tensor  # [T, E, D], from the copy of the policy that placed the tables
    order: Ints

    def devices(self, number: int) -> Ints:
        """Return the devices of one placement, in the task's table order."""
        devices = np.zeros(len(self.order), dtype=np.int64)
        devices[self.order] = self.chosen[:, number].numpy()
        return devices


class AutoShard(nn.Module):
    """The networks, which have the same form for any number of ranks. They are untrained, but scale
    features for the tables of ``settings``.
    """

    def __init__(self, num_ranks: int, settings: Sequence[Setting] = ()) -> None:
        super().__init__()
        self.net, self.scaling = Net(), Scaling(settings)

    @staticmethod
    def trained(
        settings: Sequence[Setting], seed: int, amount: Amount | None = None
    ) -> "AutoShard":
        """Train on tasks, using their prices in place of measurements."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return _Training(settings, seed, amount or Amount()).run()

    def plan(self, setting: Setting) -> Assignment:
        """Place the tables one by one, each on its most likely device; the plan may not fit."""
        with torch.no_grad():
            episodes = self.act(setting, self.net, 1, sample=False)
        return setting.whole(episodes.devices(0))

    def act(self, setting: Setting, net: Net, count: int, *, sample: bool) -> _Episodes:
        """Place a task's tables ``count`` times, on sampled or on the most likely devices."""
        features = self.scaling(setting.features)
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
        self.model = AutoShard(settings[0].num_ranks, settings)
        self.optimizer = torch.optim.Adam(self.model.net.parameters(), lr=1e-3)
        self.sets: list[Tensor] = []  # the table features of each measured device
        self.costs: list[float] = []
        self.unit_ms, self.done = 1.0, 0

    def run(self) -> AutoShard:
        decay = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda _: max(1.0 - self.done / self.amount.steps, 0.0)
        )
        actor = copy.deepcopy(self.model.net)
        while self.done < self.amount.steps:
            setting = self.settings[int(self.random.integers(len(self.settings)))]
            with torch.no_grad():
                episodes = self.model.act(setting, actor, self.amount.episodes, sample=True)
            actor.load_state_dict(self.model.net.state_dict())
            self._learn(episodes, self._rewards(setting, episodes))
            self._learn_costs()
            self.done += episodes.chosen.numel()
            decay.step()
        return self.model

    def _rewards(self, setting: Setting, episodes: _Episodes) -> Tensor:
        """Return the rewards [E], and add the devices to the replay buffer of the cost head."""
        rewards: list[float] = []
        for number, chosen in enumerate(episodes.chosen.T):
            ms = price_of(setting.problem, setting.whole(episodes.devices(number))).loads[:, 0]
            if not self.costs:
                self.unit_ms = max(float(ms.mean()), 1e-9)
            for device, cost in enumerate(ms):
                self.sets.append(episodes.features[chosen == device])
                self.costs.append(float(cost) / self.unit_ms)
            held = [
                float(episodes.sizes[chosen == device].sum()) for device in range(setting.num_ranks)
            ]
            room = 1.0 - max(held)
            rewards.append(room if room < 0 else float(ms.min() / max(ms.max(), 1e-9)))
        self.sets = self.sets[-self.amount.replay :]
        self.costs = self.costs[-self.amount.replay :]
        return torch.tensor(rewards)

    def _learn(self, episodes: _Episodes, rewards: Tensor) -> None:
        net = self.model.net
        latents = net.table(episodes.features)
        states = net.states(latents)
        one_hot = functional.one_hot(episodes.chosen, episodes.logits.shape[-1]).float()
        placed = (one_hot[..., None] * latents[:, None, None]).cumsum(0)
        summed = torch.cat([torch.zeros_like(placed[:1]), placed[:-1]])
        sizes = (one_hot * episodes.sizes[:, None, None]).cumsum(0)
        held = torch.cat([torch.zeros_like(sizes[:1]), sizes[:-1]])
        count = episodes.chosen.shape[1]
        spread = states[:, None].expand(-1, count, -1)
        log_p = net.logits(spread, summed, held).log_softmax(-1)
        values = net.value(spread).squeeze(-1)
        likely = (log_p * one_hot).sum(-1)
        acted = (episodes.logits.log_softmax(-1) * one_hot).sum(-1)
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
                torch.arange(len(drawn)), torch.tensor([len(tables) for tables in drawn])
            )
            summed = sums(net.table(torch.cat(drawn)), of, len(drawn))
            costs = torch.tensor([self.costs[int(row)] for row in rows])
            self._step((net.cost(summed).squeeze(-1) - costs).square().mean())

    def _step(self, loss: Tensor) -> None:
        descend(self.optimizer, loss, most_gradient=MOST_GRADIENT)


def vtrace(log_ratios: Tensor, values: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value targets and the policy advantages, both [T, E] (Espeholt et al. 2018).

    ``log_ratios`` contains log(learned / acted) of the chosen devices. Only the last step has a
    reward [E]. Rewards are not discounted, and both ratios are clipped at 1.
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

"""Implements Wide & Deep without sbpflow: one process, whole tables, plain autograd. This reference
for testing layouts and world sizes shares only the initial values with sbpflow. Lookups, gradients
and all optimizer rules are implemented separately, over whole tables and a mask of touched rows.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class SparseRule:
    name: str
    lr: float
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0


@dataclass
class ReferenceWdl:
    """The parameters; ``wide`` and ``deep`` map table names to (feature column, [rows, dim]
    tensor).
    """

    wide: dict[str, tuple[int, Tensor]]
    deep: dict[str, tuple[int, Tensor]]
    linears: list[tuple[Tensor, Tensor]]  # (weight [out, in], bias [out])
    rule: SparseRule
    dense_optimizer: torch.optim.Optimizer | None = None
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    num_steps: int = 0
    wide_rule: SparseRule | None = None

    def tables(self) -> dict[str, tuple[int, Tensor]]:
        return {**self.wide, **self.deep}

    def logits(self, dense: Tensor, ids: Tensor) -> Tensor:
        logit = torch.zeros(ids.shape[0], 1, dtype=dense.dtype)
        for column, table in self.wide.values():
            logit = logit + table[ids[:, column].long()]
        if self.linears:
            vectors = [table[ids[:, column].long()] for column, table in self.deep.values()]
            x = torch.cat([*vectors, dense], 1)
            for weight, bias in self.linears[:-1]:
                x = F.relu(x @ weight.t() + bias)
            weight, bias = self.linears[-1]
            logit = logit + x @ weight.t() + bias
        return logit.squeeze(1)

    def step(self, labels: Tensor, dense: Tensor, ids: Tensor) -> float:
        for _, table in self.tables().values():
            table.requires_grad_(True).grad = None
        for weight, bias in self.linears:
            weight.grad = bias.grad = None
        logit = self.logits(dense, ids)
        # -[y log s(x) + (1 - y) log(1 - s(x))] = softplus(x) - y x
        loss = (F.softplus(logit) - labels * logit).mean()
        loss.backward()
        self.num_steps += 1
        for name, (column, table) in self.tables().items():
            touched = torch.zeros(table.shape[0], dtype=torch.bool)
            touched[ids[:, column].long()] = True
            self._update(name, table.detach(), table.grad, touched)
            table.requires_grad_(False)
        if self.dense_optimizer is not None:
            self.dense_optimizer.step()
        return float(loss.detach())

    def _update(self, name: str, table: Tensor, grad: Tensor, touched: Tensor) -> None:
        state = self.state.setdefault(name, {})
        rule, mask = self.rule, touched.unsqueeze(1)
        if name in self.wide and self.wide_rule is not None:
            rule = self.wide_rule
        if rule.name == "sgd":
            step = rule.lr * grad
        elif rule.name == "adagrad":
            total = state.setdefault("sum", torch.zeros_like(table))
            total += torch.where(mask, grad**2, 0.0)
            step = rule.lr * grad / (total**0.5 + rule.eps)
        elif rule.name == "rowwise_adagrad":
            total = state.setdefault("sum", torch.zeros(table.shape[0], dtype=table.dtype))
            total += torch.where(touched, (grad**2).mean(1), 0.0)
            step = rule.lr * grad / (total**0.5 + rule.eps).unsqueeze(1)
        elif rule.name == "ftrl":
            total = state.setdefault("sum", torch.zeros_like(table))
            linear = state.setdefault("linear", torch.zeros_like(table))
            sigma = ((total + grad**2) ** 0.5 - total**0.5) / rule.lr
            linear += torch.where(mask, grad - sigma * table, 0.0)
            total += torch.where(mask, grad**2, 0.0)
            target = -(linear - linear.sign() * rule.l1) / (
                (rule.beta + total**0.5) / rule.lr + rule.l2
            )
            step = table - torch.where(linear.abs() <= rule.l1, 0.0, target)
        else:
            mean = state.setdefault("exp_avg", torch.zeros_like(table))
            square = state.setdefault("exp_avg_sq", torch.zeros_like(table))
            beta1, beta2 = rule.betas
            mean.copy_(torch.where(mask, beta1 * mean + (1 - beta1) * grad, mean))
            square.copy_(torch.where(mask, beta2 * square + (1 - beta2) * grad**2, square))
            unbiased_mean = mean / (1 - beta1**self.num_steps)
            unbiased_square = square / (1 - beta2**self.num_steps)
            step = rule.lr * unbiased_mean / (unbiased_square**0.5 + rule.eps)
        table.copy_(torch.where(mask, table - step, table))

"""A slow reference for embedding training: one process, float64, row by row in NumPy, without
sbpflow. It supports bags of any length, sums and means, weights, and shared tables; optimizers
follow their papers and torch. State is per logical row.
"""

from dataclasses import dataclass, field

import numpy as np

Bag = tuple[list[int], list[float]]  # ids and their weights


@dataclass
class ReferenceTable:
    """The weights, the pooling, and the optimizer state of one table."""

    weights: np.ndarray
    pooling: str
    state: dict[str, np.ndarray] = field(default_factory=dict)

    def vector(self, bag: Bag) -> np.ndarray:
        ids, weights = bag
        total = np.zeros(self.weights.shape[1])
        for row, weight in zip(ids, weights, strict=True):
            total += weight * self.weights[row]
        return total / len(ids) if self.pooling == "mean" and ids else total

    def gradients(self, bags: list[Bag], grads: np.ndarray) -> dict[int, np.ndarray]:
        """Return the summed gradient of each row that is in a bag."""
        rows: dict[int, np.ndarray] = {}
        for (ids, weights), grad in zip(bags, grads, strict=True):
            share = 1.0 / len(ids) if self.pooling == "mean" and ids else 1.0
            for row, weight in zip(ids, weights, strict=True):
                rows[row] = rows.get(row, 0.0) + share * weight * grad
        return rows

    def update(self, rule, rows: dict[int, np.ndarray], step: int, lr: float) -> None:
        width = self.weights.shape[1]
        for row, grad in rows.items():
            w = self.weights[row] * (1.0 - lr * rule.decay)
            if rule.name == "sgd":
                w = w - lr * grad
            elif rule.name in ("adagrad", "rowwise_adagrad"):
                shape = (len(self.weights),) + ((width,) if rule.name == "adagrad" else ())
                start = np.full(shape, float(rule.initial_accumulator))
                total = self.state.setdefault("sum", start)
                total[row] += grad**2 if rule.name == "adagrad" else np.mean(grad**2)
                w = w - lr * grad / (np.sqrt(total[row]) + rule.eps)
            elif rule.name == "lazy_adam":
                b1, b2 = rule.betas
                m = self.state.setdefault("exp_avg", np.zeros_like(self.weights))
                v = self.state.setdefault("exp_avg_sq", np.zeros_like(self.weights))
                m[row] = b1 * m[row] + (1 - b1) * grad
                v[row] = b2 * v[row] + (1 - b2) * grad**2
                scaled = np.sqrt(v[row] / (1 - b2**step)) + rule.eps
                w = w - lr * (m[row] / (1 - b1**step)) / scaled
            elif rule.name == "ftrl":  # this form assumes a constant learning rate
                lr = rule.lr
                start = np.full_like(self.weights, rule.initial_accumulator)
                n = self.state.setdefault("sum", start)
                z = self.state.setdefault("linear", np.zeros_like(self.weights))
                sigma = (np.sqrt(n[row] + grad**2) - np.sqrt(n[row])) / lr
                z[row] += grad - sigma * w
                n[row] += grad**2
                bottom = (rule.beta + np.sqrt(n[row])) / lr + rule.l2
                top = np.sign(z[row]) * rule.l1 - z[row]
                small = np.abs(z[row]) <= rule.l1
                w = np.where(small, 0.0, np.divide(top, bottom, where=~small, out=np.zeros(width)))
            else:
                raise AssertionError(rule.name)
            self.weights[row] = w

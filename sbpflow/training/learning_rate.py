"""Computes learning rate schedules (warm-up, constant, decay) as factors of the configured rate."""

import math
from collections.abc import Callable

from sbpflow.config.train_options import DecayShape, ScheduleConfig
from sbpflow.errors import unknown_value

RateFactor = Callable[[int], float]


def constant(step: int) -> float:
    """Return 1.0, the factor of a constant learning rate."""
    del step
    return 1.0


def rate_factor(config: ScheduleConfig) -> RateFactor:
    """Return a function that maps the step, counted from 1, to the factor.

    The factor rises linearly to 1 over ``warmup_steps``. From ``decay_start`` on, it falls to
    ``end_factor`` over ``decay_steps`` and then stays constant. The decay follows (1 - progress) **
    power (MLPerf's DLRM uses power 2) or half a cosine wave (Loshchilov and Hutter, SGDR, 2017,
    equation 5, without restarts).
    """

    def factor(step: int) -> float:
        if step <= config.warmup_steps:
            return step / (config.warmup_steps + 1)
        if config.decay_steps is None or step <= config.decay_start:
            return 1.0
        progress = min(1.0, (step - config.decay_start) / config.decay_steps)
        if config.shape == "cosine":
            remaining = (1.0 + math.cos(math.pi * progress)) / 2.0
        elif config.shape == "polynomial":
            remaining = (1.0 - progress) ** config.power
        else:
            raise unknown_value("optimizer.schedule.shape", config.shape, DecayShape)
        return config.end_factor + (1.0 - config.end_factor) * remaining

    return factor

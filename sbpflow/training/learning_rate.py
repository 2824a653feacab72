"""Learning rates over a run: warm-up, plateau and decay, as a factor of the configured rate."""

from collections.abc import Callable

from sbpflow.config.schema import ScheduleConfig

RateFactor = Callable[[int], float]


def constant(step: int) -> float:
    """The configured rate at every step."""
    del step
    return 1.0


def rate_factor(config: ScheduleConfig) -> RateFactor:
    """The factor at a step, counted from 1.

    Rises linearly to 1 over ``warmup_steps``; from ``decay_start`` falls to ``end_factor`` over
    ``decay_steps`` as (1 - progress) ** power, and stays there (MLPerf's DLRM has power 2).
    """

    def factor(step: int) -> float:
        if step <= config.warmup_steps:
            return step / (config.warmup_steps + 1)
        if config.decay_steps is None or step <= config.decay_start:
            return 1.0
        progress = min(1.0, (step - config.decay_start) / config.decay_steps)
        return config.end_factor + (1.0 - config.end_factor) * (1.0 - progress) ** config.power

    return factor

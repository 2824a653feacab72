"""What a sparse optimizer is: a frozen dataclass of its constants, with the step that it takes.

Adding one takes a module like those beside this one and a function for each kernel that has it. An
optimizer takes one step on the rows of a batch and leaves all others alone. State belongs to the
logical row, whatever part of its columns a rank stores.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal, NamedTuple, get_args, get_type_hints

from torch import Tensor

from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Key
from sbpflow.runtime.fields.ranges import LearningRate, NonNegative, broken_rule

StateSize = Literal["row", "element"]
CompiledKernel = Literal["numba", "fbgemm", "triton"]
SumOverColumns = Callable[[Tensor], Tensor]
RowDecay = Annotated[
    NonNegative,
    Key("results", "Each touched row shrinks by lr * weight_decay before its step."),
]


class StepNumbers(NamedTuple):
    """What an optimizer takes of a step: numbers of the host, or 0-d tensors of the device.

    Those of the device, of the arithmetic's dtype and int64, are for CUDA graphs.
    """

    rate: float | Tensor  # what a step is multiplied by
    decay: float | Tensor  # what weights are multiplied by before it
    step: int | Tensor  # of the job, counted from 1
    correction: float | Tensor = 1.0  # whatever else depends on the step, as lazy Adam's


@dataclass(slots=True, kw_only=True)
class RowBlock:
    """What one step works on: this rank's columns of some rows, each row once."""

    weights: Tensor  # [touched, width] in the dtype of the arithmetic; a step changes it in place
    state: dict[str, Tensor]  # of all slots; ``take`` and ``put`` know those of the block
    rows: Tensor  # [touched] int64: the slots where ``state`` has the rows
    grads: Tensor  # [touched, width], summed over the batch
    numbers: StepNumbers
    squares: Tensor | None = None  # [touched], as ``mean_squares`` has them

    @property
    def mean_squares(self) -> Tensor:
        """[touched]: the mean square of each row's gradient, over the table's full width.

        Only an optimizer with state by row has them: ranks that share a row add up theirs.
        """
        if self.squares is None:
            raise RuntimeError("mean squares are for optimizers with state by row")
        return self.squares

    def take(self, name: str) -> Tensor:
        """The state of the rows, a copy: [touched], or [touched, width]."""
        return self.state[name].index_select(0, self.rows)

    def put(self, name: str, values: Tensor) -> None:
        """Store the state of the rows."""
        self.state[name].index_copy_(0, self.rows, values)

    def subtract(self, values: Tensor) -> None:
        """weights -= rate * values."""
        rate = self.numbers.rate
        if isinstance(rate, Tensor):
            self.weights.addcmul_(values, rate, value=-1.0)
        else:
            self.weights.add_(values, alpha=-rate)

    def subtract_quotient(self, values: Tensor, divisors: Tensor) -> None:
        """weights -= rate * (values / divisors)."""
        rate = self.numbers.rate
        if isinstance(rate, Tensor):
            self.weights.addcmul_(values / divisors, rate, value=-1.0)
        else:
            self.weights.addcdiv_(values, divisors, value=-rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizer(ABC):
    """How the rows that a batch touches change, with the constants that a configuration gives.

    A class of its own names its ``state`` and the ``kernels`` that have it, and takes its ``step``
    in torch. Where it has a field ``weight_decay``, each touched row shrinks by lr * weight_decay
    before the step (decoupled, as AdamW). Raises ConfigError for a constant out of its range.
    """

    name: str
    lr: LearningRate = 0.05

    # What is kept: one number per row, or one per element.
    state: ClassVar[Mapping[str, StateSize]] = {}
    # Which kernels have the step, as "package.module:function"; torch takes ``step``.
    kernels: ClassVar[Mapping[CompiledKernel, str]] = {}
    # Why the rate may not change during a run, if it may not.
    one_rate: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        own = self.__dataclass_fields__["name"].default
        if self.name != own and ":" not in self.name:
            raise ConfigError(f"sparse optimizer {self.name!r}: this class is {own}; leave it out")
        if unknown := set(self.kernels) - set(get_args(CompiledKernel)):
            known = ", ".join(get_args(CompiledKernel))
            raise ConfigError(
                f"sparse optimizer {self.name}: kernels has {', '.join(unknown)}; use {known}"
            )
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and (rule := broken_rule(value, hints[field.name])):
                raise ConfigError(
                    f"sparse optimizer {self.name}: {field.name} {value}; use {rule}, for example "
                    f"{field.name}={field.default!r}"
                )

    @abstractmethod
    def step(self, block: RowBlock) -> None:
        """Change the weights and the state of a block: what every kernel must do."""

    @property
    def decay(self) -> float:
        """``weight_decay`` of those that have it."""
        return getattr(self, "weight_decay", 0.0)

    @property
    def has_row_state(self) -> bool:
        """Whether a number is kept per row: then a step has the rows' mean squares."""
        return "row" in self.state.values()

    @property
    def shares_row_state(self) -> bool:
        """Whether ranks that hold different columns of a row need one another's gradients."""
        return self.has_row_state

    def state_shape(self, name: str, rows: int, width: int) -> tuple[int, ...]:
        """[rows] or [rows, width]."""
        return (rows,) if self.state[name] == "row" else (rows, width)

    @property
    def state_counts(self) -> tuple[int, int]:
        """How many numbers are kept per row, and how many per element."""
        sizes = list(self.state.values())
        return sizes.count("row"), sizes.count("element")

    def initial_state(self, name: str) -> float:
        """What a state starts with."""
        del name
        return 0.0

    def numbers(self, lr: float, step: int) -> StepNumbers:
        """At the learning rate ``lr`` and a step of the job, on the host."""
        return StepNumbers(lr, 1.0 - lr * self.decay, step)

    def apply(self, block: RowBlock) -> None:
        """One step, weight decay included."""
        if self.decay:
            block.weights.mul_(block.numbers.decay)
        self.step(block)

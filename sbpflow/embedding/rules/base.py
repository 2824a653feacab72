"""Defines the interface of sparse optimizers: frozen dataclasses with a ``step`` method.

To add an optimizer, write a module in this package, and a function for each compiled kernel that
should support it (``registry.function_path``). A step changes only the rows of a batch. State
belongs to the logical row, even if a rank stores only some of its columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal, NamedTuple, get_args, get_type_hints

from torch import Tensor

from sbpflow.embedding.rules.kernels import COMPILED, CompiledKernel
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Key
from sbpflow.runtime.fields.ranges import LearningRate, NonNegative, broken_rule

StateSize = Literal["row", "element"]
SumOverColumns = Callable[[Tensor], Tensor]
RowDecay = Annotated[
    NonNegative,
    Key("results", "Each step first multiplies the rows of the batch by 1 - lr * weight_decay."),
]


class StepNumbers(NamedTuple):
    """The numbers of an optimizer that change from step to step.

    The numbers are Python numbers or, for CUDA graphs, 0-d tensors on the device, in the compute
    dtype (``step`` is int64).
    """

    rate: float | Tensor  # Multiplies the step.
    decay: float | Tensor  # Multiplies the weights before the step.
    step: int | Tensor  # Training step within the job, starting at 1.
    correction: float | Tensor = 1.0  # Another factor that changes from step to step (lazy Adam).


@dataclass(slots=True, kw_only=True)
class RowBlock:
    """The distinct rows of one step, with the columns that this rank stores."""

    weights: Tensor  # In the compute dtype, [touched, width]; changed in place.
    # State of all slots; use ``take`` and ``put`` for the state of this block's rows.
    state: dict[str, Tensor]
    rows: Tensor  # Slots of the rows in ``state``, int64 [touched].
    grads: Tensor  # Summed over the batch, [touched, width].
    numbers: StepNumbers
    squares: Tensor | None = None  # [touched], see ``mean_squares``

    @property
    def mean_squares(self) -> Tensor:
        """Return the mean square of each row's gradient ([touched]) over the table's full width or,
        if ranks do not share row state, over the columns on this rank.

        Only optimizers with row state can use this value, because ranks that share a row sum their
        squared gradients only for these optimizers.
        """
        if self.squares is None:
            raise RuntimeError(
                "mean_squares is available only to optimizers with row state, which this "
                "optimizer does not have; use grads"
            )
        return self.squares

    def take(self, name: str) -> Tensor:
        """Return a copy of the rows' state: [touched], or [touched, width]."""
        return self.state[name].index_select(0, self.rows)

    def put(self, name: str, values: Tensor) -> None:
        """Store the state ``name`` of the rows."""
        self.state[name].index_copy_(0, self.rows, values)

    def subtract(self, values: Tensor) -> None:
        """Compute weights -= rate * values."""
        rate = self.numbers.rate
        if isinstance(rate, Tensor):
            self.weights.addcmul_(values, rate, value=-1.0)
        else:
            self.weights.add_(values, alpha=-rate)

    def subtract_quotient(self, values: Tensor, divisors: Tensor) -> None:
        """Compute weights -= rate * (values / divisors)."""
        rate = self.numbers.rate
        if isinstance(rate, Tensor):
            self.weights.addcmul_(values / divisors, rate, value=-1.0)
        else:
            self.weights.addcdiv_(values, divisors, value=-rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizer(ABC):
    """Updates the rows that a batch touches. The dataclass fields are the optimizer's configurable
    constants.

    A subclass declares its ``state`` and the ``kernels`` that support it, and implements ``step``
    in torch. If a subclass has a field ``weight_decay``, each touched row shrinks by the fraction
    lr * weight_decay before the step (decoupled, as in AdamW). An out-of-range constant raises
    ConfigError.
    """

    name: str
    lr: LearningRate = 0.05

    # ``state`` maps the name of each state to its shape: one value per row, or one per element.
    state: ClassVar[Mapping[str, StateSize]] = {}
    # ``kernels`` maps each supported kernel to the optimizer's function, as
    # "package.module:function".
    kernels: ClassVar[Mapping[CompiledKernel, str]] = {}
    # The kernels that support a built-in optimizer without this mapping: their modules of rules
    # have a function with the optimizer's name.
    built_into: ClassVar[tuple[CompiledKernel, ...]] = ("numba", "triton")
    # ``one_rate`` is the reason why the learning rate must stay constant during a run; ``None`` if
    # the learning rate may change.
    one_rate: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        own = self.__dataclass_fields__["name"].default
        if self.name != own and ":" not in self.name:
            raise ConfigError(f"sparse optimizer: the name must be {own!r}, got {self.name!r}")
        if unknown := sorted(set(self.kernels) - set(COMPILED)):
            raise ConfigError(
                f"sparse optimizer {self.name}: kernels contains {', '.join(unknown)}; use one of "
                f"{', '.join(COMPILED)}"
            )
        if unknown := sorted({*map(str, self.state.values())} - {*get_args(StateSize)}):
            raise ConfigError(
                f"sparse optimizer {self.name}: state contains {', '.join(unknown)}; use "
                "element (one value per element) or row (one per row)"
            )
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                hash(value)  # tables with equal optimizers share a store
            except TypeError as error:
                raise ConfigError(
                    f"sparse optimizer {self.name}: {field.name} must be a number, a string, or a "
                    f"tuple of these, got {value}"
                ) from error
            if field.name != "name" and (rule := broken_rule(value, hints[field.name])):
                raise ConfigError(
                    f"sparse optimizer {self.name}: {field.name} must be {rule}, got {value} (for "
                    f"example, {field.name}={field.default!r})"
                )

    @abstractmethod
    def step(self, block: RowBlock) -> None:
        """Update the weights and state of a block. All kernels must compute the same results."""

    @property
    def decay(self) -> float:
        """Return ``weight_decay``, or 0 if the optimizer does not have this constant."""
        return getattr(self, "weight_decay", 0.0)

    @property
    def has_row_state(self) -> bool:
        """Return True if there is state per row; steps then receive each row's mean squared
        gradient.
        """
        return "row" in self.state.values()

    @property
    def shares_row_state(self) -> bool:
        """Return True if ranks that store different columns of a row must sum their squared
        gradients.
        """
        return self.has_row_state

    def state_shape(self, name: str, rows: int, width: int) -> tuple[int, ...]:
        """Return the shape of the state ``name``: [rows] or [rows, width]."""
        return (rows,) if self.state[name] == "row" else (rows, width)

    @property
    def state_counts(self) -> tuple[int, int]:
        """Return the number of state values per row and per element."""
        sizes = list(self.state.values())
        return sizes.count("row"), sizes.count("element")

    def initial_state(self, name: str) -> float:
        """Return the initial value of the state ``name``."""
        return 0.0

    def numbers(self, lr: float, step: int) -> StepNumbers:
        """Return the ``StepNumbers`` for learning rate ``lr`` and training step ``step``, as Python
        numbers.
        """
        return StepNumbers(lr, 1.0 - lr * self.decay, step)

    def apply(self, block: RowBlock) -> None:
        """Take a step, including weight decay."""
        if self.decay:
            block.weights.mul_(block.numbers.decay)
        self.step(block)

"""Tests loss options against plain torch, and tables with separate learning rates, decays and
initial values.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Config, DenseAdagrad, DenseSgd, RmsProp, TableChanges
from sbpflow.config.train_options import LossConfig, ScheduleConfig
from sbpflow.embedding.plan.tables import OutputConfig
from sbpflow.embedding.rules.adagrad import Adagrad
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.embedding.rules.sgd import Sgd
from sbpflow.errors import ConfigError, SbpError
from sbpflow.run.model.spec import (
    Fields,
    ParameterSpec,
    embedding_output,
    make_parameters,
    schemes_of,
)
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.batch import check_batch
from sbpflow.training.dense_optimizers import make_dense_optimizer, state_per_element
from sbpflow.training.learning_rate import rate_factor
from sbpflow.training.losses import row_losses
from tests.training.wdl_case import FIELDS, make_batches, make_config, make_job, pieces_of

LOGITS = torch.tensor([-30.0, -2.0, -0.5, 0.0, 0.3, 1.0, 4.0, 30.0], dtype=torch.float64)
LABELS = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)


def focal(logits: torch.Tensor, labels: torch.Tensor, gamma: float) -> torch.Tensor:
    """Compute the focal loss, equation 4 of the paper."""
    p = torch.sigmoid(logits)
    chance = torch.where(labels == 1, p, 1.0 - p)
    return -((1.0 - chance) ** gamma) * torch.log(chance)


CASES = {
    "positive weight": (
        LossConfig(positive_weight=3.0),
        lambda x, y: F.binary_cross_entropy_with_logits(
            x, y, reduction="none", pos_weight=torch.tensor(3.0, dtype=x.dtype)
        ),
    ),
    "smoothed": (
        LossConfig(label_smoothing=0.2),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y * 0.8 + 0.1, reduction="none"),
    ),
    "focal": (LossConfig(focal_gamma=2.0), lambda x, y: focal(x, y, 2.0)),
    "focal and weighted": (
        LossConfig(focal_gamma=0.5, positive_weight=0.25),
        lambda x, y: focal(x, y, 0.5) * torch.where(y == 1, 0.25, 1.0),
    ),
}


class PlainModel:
    """The methods of a dense part that losses use."""

    parameters: dict[str, GlobalTensor] = {}  # noqa: RUF012 -- as the protocol has it

    def row_losses(self, logits: GlobalTensor, labels: GlobalTensor) -> GlobalTensor:
        return ops.bce_with_logits(logits, labels, reduction="none")


def losses_of(world: World, config: LossConfig) -> tuple[Any, Any]:
    """Return this rank's losses, and the gradient of their sum with respect to its logits."""
    boxing = Boxing(world)
    layout = Layout(Placement.line("cpu", world.size), (Split(0),))
    rows = slice(*((8 * (world.rank + n)) // world.size for n in (0, 1)))
    given = [tensor[rows].clone().unsqueeze(1) for tensor in (LOGITS, LABELS)]
    logits, labels = (GlobalTensor.from_local(part, layout, (8, 1), boxing) for part in given)
    logits.requires_grad_()
    losses: Any = row_losses(PlainModel(), logits, labels, config)  # type: ignore[arg-type]
    losses.part.sum().backward()
    return losses.part.detach().squeeze(1).numpy(), logits.part.grad.squeeze(1).numpy()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_equals_that_of_plain_torch(ranks, world_size, case):
    config, plain = CASES[case]
    results = ranks(world_size, losses_of, config)
    logits = LOGITS.clone().requires_grad_()
    want = plain(logits, LABELS)
    # Far from the label, the paper's formula loses precision, but ours does not.
    near = LOGITS.abs() < 20
    (gradient,) = torch.autograd.grad(want[near].sum(), logits)
    got = np.concatenate([losses for losses, _ in results])
    np.testing.assert_allclose(got[near], want.detach()[near], rtol=1e-12)
    slope = np.concatenate([gradient for _, gradient in results])
    np.testing.assert_allclose(slope[near], gradient[near], rtol=1e-10)
    assert np.isfinite(got).all()
    assert np.isfinite(slope).all()


def test_focal_loss_with_smoothed_labels_is_refused():
    with pytest.raises(
        ConfigError, match=r"^train\.loss\.focal_gamma: 2.0 cannot be combined with"
    ):
        LossConfig(focal_gamma=2.0, label_smoothing=0.1)


def train(world: World, config: Config) -> list[float]:
    job = make_job(world, config)
    return [
        float(job.trainer.step(b.part(world.rank, world.size))) for b in make_batches(4, 30)[:3]
    ]


def test_a_changed_loss_trains_equally_on_several_ranks(ranks):
    """Some linear layers are split, so the plan must contain their conversions."""
    config = make_config("1", "sgd", dense_layouts={"mlp.0.*": "S(0)", "mlp.1.weight": "S(1)"})
    loss = LossConfig(positive_weight=2.0, focal_gamma=1.5)
    changed = replace(config, train=replace(config.train, loss=loss))
    (alone,) = ranks(1, train, changed)
    for losses in ranks(2, train, changed):
        assert losses == pytest.approx(alone, rel=1e-12)
    assert alone != pytest.approx(ranks(1, train, config)[0], rel=1e-2)


@dataclass(frozen=True, kw_only=True)
class LinearModel:
    """A linear model that computes its logits or its row losses with ``layout``."""

    layout: Layout | None = None
    moves: str = "logits"
    name: str = "linear"

    def spec(self, fields: Fields) -> "LinearSpec":
        return LinearSpec(self, (embedding_output("fields", fields.sparse, dim=5),))


@dataclass(frozen=True)
class LinearSpec:
    model: LinearModel
    outputs: tuple[OutputConfig, ...]
    splits_parameters = True
    hashed_columns = ()

    @property
    def parameters(self) -> dict[str, ParameterSpec]:
        return {"weight": ParameterSpec(shape=(1, self.outputs[0].width), bound=0.5)}

    @property
    def schemes(self) -> Any:
        return schemes_of(self.outputs)

    def build(self, layouts: Any, boxing: Boxing, **options: Any) -> "LinearPart":
        return LinearPart(self.model, make_parameters(self.parameters, layouts, boxing, **options))


class LinearPart:
    def __init__(self, model: LinearModel, parameters: dict[str, GlobalTensor]) -> None:
        self.model, self.parameters = model, parameters
        self.buffers: dict[str, GlobalTensor] = {}

    def moved(self, x: GlobalTensor, part: str) -> GlobalTensor:
        layout = self.model.layout
        return x if layout is None or part != self.model.moves else x.to(layout, id=f"moved.{part}")

    def forward(self, vectors: Any, dense: GlobalTensor, **_: Any) -> GlobalTensor:
        logits = ops.linear(vectors["fields"], self.parameters["weight"], id="linear")
        return self.moved(logits, "logits")

    def row_losses(self, logits: GlobalTensor, labels: GlobalTensor) -> GlobalTensor:
        return self.moved(ops.bce_with_logits(logits, labels, reduction="none"), "losses")


@pytest.mark.parametrize("moves", ["logits", "losses"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(Placement.of("cpu", [[0, 1], [2, 3]]), "(S(0), B)"),
        Layout(Placement.of("cpu", [2, 1]), "S(0)"),
    ],
    ids=str,
)
def test_logits_and_losses_may_be_on_any_ranks(ranks, layout, moves):
    loss = LossConfig(positive_weight=2.0, focal_gamma=1.5)
    config = make_config("3", "sgd")
    config = replace(config, train=replace(config.train, loss=loss), model=LinearModel())
    (alone,) = ranks(1, train, config)
    for losses in ranks(4, train, replace(config, model=LinearModel(layout=layout, moves=moves))):
        assert losses == pytest.approx(alone, rel=1e-12)


def test_a_part_without_columns_has_initial_values():
    layout = Layout(Placement.line("cpu", 2), "S(1)[6, 0]")
    boxing, spec = DryBoxing(2, rank=1, device="cpu"), ParameterSpec(shape=(4, 6), bound=0.5)
    made = make_parameters({"w": spec}, {"w": layout}, boxing, seed=0, dtype=torch.float32)
    assert made["w"].part.shape == (4, 0)


def test_a_cosine_is_half_a_wave():
    config = ScheduleConfig(decay_start=2, decay_steps=4, shape="cosine", end_factor=0.2)
    wave = [1.0, 1.0, *(0.2 + 0.4 * (1 + np.cos(np.pi * n / 4)) for n in (1, 2, 3, 4)), 0.2]
    assert [rate_factor(config)(step) for step in range(1, 8)] == pytest.approx(wave)
    with pytest.raises(
        ConfigError, match=r"^optimizer\.schedule\.power: 2.0 applies only to shape: poly"
    ):
        ScheduleConfig(decay_steps=4, shape="cosine", power=2.0)


@pytest.mark.parametrize(
    ("config", "plain", "states"),
    [
        (
            DenseAdagrad(lr=0.1, initial_accumulator=0.5),
            lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5, eps=1e-10),
            1,
        ),
        (
            RmsProp(lr=0.1, alpha=0.9, momentum=0.5),
            lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, momentum=0.5),
            2,
        ),
        (
            DenseSgd(lr=0.1, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            1,
        ),
    ],
)
def test_dense_optimizers_are_those_of_torch(config, plain, states):
    one, other = (torch.full((3,), 2.0, requires_grad=True) for _ in range(2))
    mine, theirs = make_dense_optimizer(config, [one]), plain([other])
    for step in range(4):
        for value, optimizer in ((one, mine), (other, theirs)):
            value.grad = torch.tensor([1.0, -0.5, step])
            optimizer.step()
    assert torch.equal(one, other)
    calls: list[str] = []
    for optimizer in (mine, theirs):
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after")).remove()
        optimizer.step()
    assert torch.equal(one, other)
    assert calls == ["before", "before"]
    kept = [value for value in mine.state[one].values() if value.shape == one.shape]
    assert len(kept) == state_per_element(config) == states
    with pytest.raises(
        ConfigError, match=r"^optimizer\.dense\.nesterov: true has no effect without momentum"
    ):
        DenseSgd(nesterov=True)


def with_tables(config: Config, tables: dict[str, Any]) -> Config:
    return replace(config, optimizer=replace(config.optimizer, tables=tables))


def test_overrides_are_merged_with_earlier_ones():
    tables = {
        "deep.*": Adagrad(lr=0.3),
        "*.C1": TableChanges(lr=0.7),
        "*": TableChanges(weight_decay=0.1),
        "deep.C2": TableChanges(initial_range=0.5),
    }
    _, plan = plan_run(
        with_tables(make_config("1", "sgd"), tables), FIELDS, world_size=2, device_type="cpu"
    )
    found = {t.name: t for out in plan.embeddings.outputs for t in out.tables}
    rule = found["deep.C1"].optimizer
    assert (rule.name, rule.lr, rule.weight_decay) == ("adagrad", 0.7, 0.1)
    rule = found["deep.C2"].optimizer
    assert (rule.name, rule.lr, found["deep.C2"].initial_range) == ("adagrad", 0.3, 0.5)
    rule = found["wide.C1xC2"].optimizer
    assert (rule.name, rule.lr, rule.weight_decay) == ("sgd", 0.1, 0.1)
    assert found["wide.C1xC2"].initial_range == 0.05


def test_unsupported_optimizer_changes_are_refused():
    tables = {"wide.*": Ftrl(), "*": TableChanges(weight_decay=0.1)}
    with pytest.raises(
        ConfigError,
        match=r"^optimizer\.tables\.\*: wide\.C1xC2: .*ftrl has no option weight_decay; .* l2",
    ):
        plan_run(
            with_tables(make_config("1", "sgd"), tables), FIELDS, world_size=1, device_type="cpu"
        )


OWN = {
    "deep.C1": TableChanges(lr=0.3, initial_range=0.5),
    "deep.C2": TableChanges(weight_decay=0.5),
    "wide.C3xC4": Sgd(lr=0.02),
}


@pytest.mark.parametrize(
    ("scheme", "groups"),
    [
        # Each output uses one exchange, regardless of the rates.
        ("1", ["wide/reduce", "deep/columns"]),
        ("2", ["wide/reduce", "deep/reduce"]),
        # Single rows are exchanged per store, and a store has one rate, so other rates need
        # groups of their own.
        (
            "3",
            ["wide/unique.0", "wide/unique.1", "deep/unique.0", "deep/unique.1", "deep/unique.2"],
        ),
    ],
)
def test_table_rates_split_groups_only_if_rows_are_exchanged(scheme, groups):
    config = with_tables(make_config(scheme, "sgd"), OWN)
    _, plan = plan_run(config, FIELDS, world_size=2, device_type="cpu")
    assert [group.name for group in plan.embeddings.groups] == groups
    for group in plan.embeddings.groups:
        for stack in group.stacks:
            assert len({table.optimizer or stack.optimizer for table in stack.tables}) == 1


def one_step(world: World, config: Config) -> list[tuple[str, Any, Any]]:
    """Return (table, position, values before and after a step) for this rank's shards."""
    job = make_job(world, config)
    before = pieces_of(job)
    job.trainer.step(make_batches(2, 30)[0].part(world.rank, world.size))
    return [
        (name, place, old, new)
        for (name, place, old, _), (_, _, new, _) in zip(before, pieces_of(job), strict=True)
    ]


@pytest.mark.parametrize("scheme", ["dp", "1", "2", "3"])
def test_every_table_has_its_rate_decay_and_start(ranks, scheme):
    """SGD computes w - lr (g + decay w) on touched rows; g comes from a step with equal rates."""
    (plain,) = ranks(
        1, one_step, with_tables(make_config("dp", "sgd"), {"deep.C1": OWN["deep.C1"]})
    )
    starts = {name: old for name, _, old, _ in plain}
    rates = {"deep.C1": 0.3, "wide.C3xC4": 0.02}
    gradients = {
        name: (old - new) / (0.3 if name == "deep.C1" else 0.1) for name, _, old, new in plain
    }
    for result in ranks(2, one_step, with_tables(make_config(scheme, "sgd"), OWN)):
        for name, (r0, r1, c0, c1), old, new in result:
            start, g = (full[name][r0:r1, c0:c1] for full in (starts, gradients))
            np.testing.assert_array_equal(old, start)
            decay = 0.5 if name == "deep.C2" else 0.0
            touched = np.abs(gradients[name][r0:r1]).max(1, keepdims=True) > 0
            want = np.where(touched, old * (1 - 0.1 * decay) - rates.get(name, 0.1) * g, old)
            np.testing.assert_allclose(new, want, rtol=0, atol=1e-13, err_msg=name)
    assert np.abs(starts["deep.C1"]).max() > 0.4
    assert np.abs(starts["deep.C2"]).max() <= 0.05


@dataclass(frozen=True)
class WrongPart:
    """A dense part that returns one mean instead of a loss per row, or logits without columns."""

    wrong: str

    def row_losses(self, logits: GlobalTensor, labels: GlobalTensor) -> GlobalTensor:
        reduction = "mean" if self.wrong == "row_losses" else "none"
        return ops.bce_with_logits(logits, labels, reduction=reduction)


@pytest.mark.parametrize(
    ("wrong", "shape", "found"), [("row_losses", (6, 1), r"\[\]"), ("forward", (6,), r"\[6\]")]
)
def test_a_dense_part_without_a_value_per_row_is_refused(wrong, shape, found):
    layout, boxing = Layout(Placement.line("cpu", 1), (Split(0),)), DryBoxing(1, device="cpu")
    logits, labels = (
        GlobalTensor.from_local(torch.zeros(each), layout, each, boxing) for each in (shape, (6, 1))
    )
    message = rf"{wrong} returned a tensor of shape {found} for 6 rows; return .* \[6, 1\]"
    with pytest.raises(SbpError, match=message):
        row_losses(WrongPart(wrong), logits, labels, LossConfig())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", torch.zeros(4, 1), r"labels must have shape \[rows\], got \[4, 1\]"),
        ("weights", torch.ones(4, 1), r"weights must have shape \[rows\], got \[4, 1\]"),
        ("dense", torch.zeros(4), r"dense must have shape \[rows, dense fields\], got \[4\]"),
    ],
)
def test_batches_with_values_of_another_shape_are_refused(name, value, message):
    """Weights [rows, 1] would be averaged, and thus have no effect on the rows."""
    batch = SimpleNamespace(
        labels=torch.zeros(4), dense=torch.zeros(4, 2), ids=torch.zeros(4, 3).int(), batch_size=4
    )
    check_batch(batch)
    setattr(batch, name, value)
    with pytest.raises(SbpError, match=message):
        check_batch(batch)

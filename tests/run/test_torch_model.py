"""Tests a torch module as the dense part: training on N ranks equals plain torch, and mistakes are
reported.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from examples import own_module
from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Config, DataConfig, DenseSgd, OptimizerConfig
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.embedding.plan.tables import INITIAL_RANGE
from sbpflow.embedding.rules.sgd import Sgd
from sbpflow.errors import ConfigError, SbpError
from sbpflow.run.execution.job import Job, start_job
from sbpflow.run.model.spec import Fields, embedding_output
from sbpflow.run.model.torch_model import TorchModel
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.random.streams import fill_uniform, stream_key
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.sbp import balanced_sizes
from sbpflow.training.health import check_replicas
from tests import deadlines

ROOT = Path(__file__).resolve().parents[2]
FIELDS = Fields.of(["I1", "I2"], {"C1": 37, "C2": 11, "C3": 53})
DIM, BATCH, STEPS, LR, SEED = 4, 24, 12, 0.1, 7
WIDTH = 3 * DIM + 2


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 9)
        self.norm = norm(9)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(9, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        x = torch.cat([vectors["deep"], dense], 1)
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model whose ``kind`` selects the module; ``dropout`` applies to the plain module."""

    name: str = "own"
    kind: str = "plain"
    dropout: float = 0.0

    def spec(self, fields: Fields) -> TorchModel:
        outputs = [embedding_output("deep", fields.sparse, dim=DIM)]
        if self.kind == "unused output":
            outputs.append(embedding_output("unused", fields.sparse[:2], dim=DIM))
        kinds = {
            **NETS,
            "plain": lambda: Net(self.dropout),
            "compiled batch norm": lambda: torch.compile(NETS["batch norm"](), backend="aot_eager"),
            # `aot_eager` traces like the default backend, but needs no compiler.
            "compiled": lambda: torch.compile(Net(), backend="aot_eager"),
            "apart": Apart,
            "in turn": InTurn,
            "autocast": Net,
            "float16": Net,
            **WRONG,
        }
        options = {"mean loss": {"row_loss": mean_loss}, "autocast": {"autocast": torch.bfloat16}}
        options["float16"] = {"autocast": torch.float16}
        return TorchModel(
            outputs=tuple(outputs), make=kinds[self.kind], **options.get(self.kind, {})
        )


class NormOfDense(Net):
    """A net that also normalizes the dense fields, which need no gradient."""

    def __init__(self) -> None:
        super().__init__(norm=nn.BatchNorm1d)
        self.of_dense = nn.BatchNorm1d(2)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        return super().forward(vectors, self.of_dense(input=dense))


class TwoNames(Net):
    """A net whose norm has two names; ``forward`` uses the second."""

    def __init__(self) -> None:
        super().__init__(norm=nn.BatchNorm1d)
        self.alias = self._modules.pop("norm")
        self.norm = self.alias


NETS = {
    "plain": Net,
    "batch norm": partial(Net, norm=nn.BatchNorm1d),
    "norm of dense fields": NormOfDense,
    "norm with two names": TwoNames,
    "unused output": Net,
}


class Odd(Net):
    """A net with a mistake in its forward."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong
        self.register_buffer("count", torch.zeros(1))

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        logits = super().forward(vectors, dense)
        if self.wrong == "buffer":
            self.count += 1
        if self.wrong == "data":
            self.count.data += 1
        results = {"shape": lambda: logits.mean(0), "whole": logits.long, "detached": logits.detach}
        return results.get(self.wrong, lambda: logits)()


class OddNorm(Net):
    """A net that normalizes the columns of its transposed rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(BATCH)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        x = self.first(torch.cat([vectors["deep"], dense], 1))
        if len(x) < BATCH:  # the dry run, which uses two rows of zeros
            return self.last(x)
        return self.last(self.norm(x.t()).t())


def with_complex_buffer() -> nn.Module:
    net = Net()
    net.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    return net


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - labels).square().mean()


SHARED = Net()
WRONG = {
    "norm of images": lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm2d(3)),
    "norm of a batch": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "norm of all batches": lambda: nn.BatchNorm1d(3, momentum=None),
    "norm of columns": lambda: OddNorm(),
    "shared": lambda: SHARED,
    "no module": lambda: "Net",
    "sparse": lambda: nn.Embedding(5, 2, sparse=True),
    "data": lambda: Odd("data"),
    "detached": lambda: Odd("detached"),
    "whole": lambda: Odd("whole"),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3)),
    "buffer": lambda: Odd("buffer"),
    "complex buffer": with_complex_buffer,
    "shape": lambda: Odd("shape"),
    "mean loss": Net,
}


@dataclass(frozen=True)
class Rows:
    labels: Tensor
    dense: Tensor
    ids: Tensor
    batch_size: int

    def part(self, rank: int, size: int) -> "Rows":
        sizes = balanced_sizes(self.batch_size, size)
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return Rows(self.labels[mine], self.dense[mine], self.ids[mine], self.batch_size)


def batches() -> list[Rows]:
    """Return batches; the fifth is short, and the last has only two rows."""
    rng = torch.Generator().manual_seed(3)
    made = []
    for step in range(STEPS):
        n = {STEPS - 1: 2, 4: BATCH - 7}.get(step, BATCH)
        sizes = torch.tensor([field.rows for field in FIELDS.ids])
        ids = (torch.rand(n, 3, generator=rng) ** 3 * sizes).int()
        labels = (torch.rand(n, generator=rng) < 0.4).float()
        made.append(Rows(labels, torch.randn(n, 2, generator=rng), ids, n))
    return made


def config(
    scheme: str, model: Model, dense: dict[str, str] | None = None, dtype: str = "float64"
) -> Config:
    return Config(
        model=model,
        data=DataConfig(batch_size=BATCH),
        parallel=ParallelConfig(
            scheme=scheme, dtype=dtype, kernel="torch", device="cpu", dense=dense or {}
        ),
        optimizer=OptimizerConfig(sparse=Sgd(lr=LR), dense=DenseSgd(lr=LR)),
    )


def train(
    world: World, scheme: str, model: Model, dtype: str = "float64"
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the final parameters of the module."""
    world.checked = False
    job = start_job(config(scheme, model, dtype=dtype), FIELDS, Boxing(world))
    before = torch.random.get_rng_state()
    losses = run(job, world)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's generator is unchanged"
    check_replicas(job.copies, job.embeddings, job.boxing)
    return losses, {name: copy_.part.detach() for name, copy_ in job.copies.items()}


def run(job: Job, world: World) -> list[float]:
    parts = [batch.part(world.rank, world.size) for batch in batches()]
    return [float(loss) for loss in job.trainer.train_on(parts)]


def expected(make: Callable[[], nn.Module] = Net) -> tuple[list[float], dict[str, Tensor]]:
    """Train in plain torch (one process, dense tables, one optimizer); the result includes
    buffers.
    """
    with torch.random.fork_rng():
        torch.manual_seed(stream_key(SEED, "module"))
        net = make().double()
    tables = []
    for field in FIELDS.sparse:
        table = torch.empty(field.rows, DIM, dtype=torch.float64)
        name = f"deep.{field.name}"
        fill_uniform(table, seed=SEED, name=name, bound=INITIAL_RANGE, num_columns=DIM)
        tables.append(table.requires_grad_())
    optimizer = torch.optim.SGD([*net.parameters(), *tables], lr=LR)
    losses = []
    for batch in batches():
        vectors = [table[batch.ids[:, n].long()] for n, table in enumerate(tables)]
        logits = net({"deep": torch.cat(vectors, 1)}, batch.dense.double()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    running = {name: one for name, one in net.named_buffers() if "running" in name}
    return losses, dict(net.named_parameters()) | running


KINDS = [*NETS, "compiled", "compiled batch norm"]
PLACES = [("dp", 2), ("2", 1), ("1", 3), ("3", 4)]


# Each rank's compilation takes seconds, so further cases are marked slow.
most_ranks = {"plain": 4, "batch norm": 3, "compiled": 1, "compiled batch norm": 0}


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("kind", "scheme", "size"),
    [
        pytest.param(kind, *place, marks=[pytest.mark.slow] * (place[1] > most_ranks.get(kind, 2)))
        for kind in KINDS
        for place in PLACES
    ],
)
def test_ranks_equal_plain_torch(ranks, scheme, size, kind):
    losses, parameters = expected(NETS.get(kind.removeprefix("compiled "), Net))
    for found, weights in ranks(size, train, scheme, Model(kind=kind)):
        # Values are float64; sums over rows use a different order, with errors of 1e-16 each.
        assert found == pytest.approx(losses, abs=1e-12)
        assert weights.keys() == parameters.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, parameters[name].detach(), rtol=0, atol=1e-12)


class InTurn(nn.Module):
    """A net that calls its norms in a different order than it creates them."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.BatchNorm1d(1), nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        x = self.first(torch.cat([vectors["deep"], dense], 1))
        return self.second(self.last(x))


def test_transfers_of_batch_norms_are_in_the_plan():
    """The plan must list transfers in the order of the calls, because a run executes the plan."""
    given = config("3", Model(kind="in turn"))
    _, plan = plan_run(given, FIELDS, world_size=2, device_type="cpu")
    found = [(step.id, step.total_bytes) for step in plan.dense_forward]
    # For each column, both phases of an all-reduce send a float64 sum and a sum of squares.
    names = [("module.first.moments/fwd", 4 * WIDTH * 8), ("module.second.moments/fwd", 4 * 8)]
    assert found == names
    assert [step.id for step in plan.dense_backward] == [
        "module.second.moments/bwd",
        "module.first.moments/bwd",
    ]


def test_norms_called_in_another_order_run_as_planned(ranks):
    for losses, _ in ranks(2, train, "3", Model(kind="in turn")):
        assert all(loss > 0 for loss in losses)


def test_autocast_equals_torch_s(ranks):
    exact, _ = expected()
    ((narrow, _),) = ranks(1, train, "3", Model(kind="autocast"), "float32")
    # bfloat16 has 8 significant bits, so losses are close but not equal.
    assert narrow == pytest.approx(exact, abs=0.02)
    assert narrow != pytest.approx(exact, abs=1e-5)


def test_dropout_depends_only_on_step_and_rank(ranks):
    one, again = (ranks(2, train, "3", Model(dropout=0.5))[0][0] for _ in range(2))
    assert one == again
    assert one != ranks(2, train, "3", Model())[0][0]


def refusal(world: World, kind: str) -> str:
    with pytest.raises(SbpError) as caught:
        run(start_job(config("3", Model(kind=kind)), FIELDS, Boxing(world)), world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        (
            "autocast",
            "autocast: torch.bfloat16 applies only to float32, got torch.float64; .*float32",
        ),
        ("float16", "autocast: torch.float16 is not supported, .* use torch.bfloat16"),
        ("norm of images", "module 1: BatchNorm2d .* nn.BatchNorm1d.features. over"),
        ("norm of all batches", "module BatchNorm1d: BatchNorm1d has momentum=None"),
        (
            "norm of columns",
            r"module norm: BatchNorm1d got an input of shape \[9, 24\] for 24 rows;",
        ),
        ("lazy", "parameter 0.weight .*no shape yet"),
        ("buffer", "Odd: forward changed the buffer count in training"),
        ("complex buffer", r"buffer phase has dtype torch\.complex64, .*torch\.view_as_real"),
        ("shape", r"Odd.forward: returned \[1\] for 24 rows; return one logit per row"),
        ("norm of a batch", "module BatchNorm1d: BatchNorm1d .*track_running_stats=False"),
        ("shared", "make returned the same Net twice;"),
        ("no module", r"make returned a str, not a torch\.nn\.Module"),
        ("sparse", "module Embedding: Embedding with sparse=True has sparse gradients"),
        ("data", "Odd: forward changed the buffer count in training"),
        ("detached", "Odd.forward: returned logits without a gradient"),
        ("whole", "Odd.forward: returned torch.int64 logits; .*float32"),
        ("mean loss", r"row_loss returned \[\] for 24 rows; .*reduction='none'"),
    ],
)
def test_modules_that_would_train_incorrectly_are_refused(ranks, kind, pattern):
    (message,) = ranks(1, refusal, kind)
    assert re.search(pattern, message), message


class Apart(Net):
    """Initializes weights without torch's generator, so that ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.last.weight.fill_(float(os.getpid()))


def apart(world: World) -> str:
    with pytest.raises(SbpError) as caught:
        start_job(config("3", Model(kind="apart")), FIELDS, Boxing(world))
    return str(caught.value)


def test_different_initial_values_are_reported_before_the_first_step(ranks):
    for message in ranks(2, apart):
        assert "parameter or buffer last.weight: its initial values differ between ranks" in message


class Wanders:
    """A dense part that makes one more or one fewer conversion, starting at some step."""

    def __init__(self, part: object, extra: bool) -> None:
        self.part, self.extra, self.steps = part, extra, 0
        self.parameters = part.parameters
        self.row_losses = part.row_losses

    def forward(self, vectors, dense, **more):
        self.steps += 1
        if self.extra and self.steps > 1:
            dense = dense.to("B", id="more").to("S(0)", id="back")
        return self.part.forward(vectors, dense, **more)


def wander(world: World) -> list[str]:
    from tests.training.wdl_case import make_batches, make_config, make_job

    messages = []
    for extra in (True, False):
        job = make_job(world, make_config("1", "sgd", dense_layouts={"mlp.1.weight": "S(1)"}))
        part = Wanders(job.trainer._model, extra)
        job.trainer._model = part
        batches = [batch.part(world.rank, world.size) for batch in make_batches(3, 30)]
        job.trainer.step(batches[0])
        if not extra:
            part.part = type("Less", (), {"forward": staticmethod(lambda v, d, **_: v["wide"])})()
        with pytest.raises(SbpError) as caught:
            job.trainer.step(batches[1])
        messages.append(str(caught.value))
    return messages


def test_a_forward_with_unplanned_conversions_is_refused(ranks):
    for more, less in ranks(2, wander):
        assert "the dense part requests more/fwd" in more
        assert "requests" in less
        assert "but the plan of this run expects mlp" in less


def test_parameters_of_a_torch_module_cannot_be_split():
    given = config("3", Model(), dense={"first.*": "S(0)"})
    with pytest.raises(
        ConfigError, match=r"parallel\.dense\.first\.\*: the parameters of own, a torch module"
    ):
        plan_run(given, FIELDS, world_size=2, device_type="cpu")


def test_an_incomplete_spec_is_refused_with_the_missing_parts():
    given = config("3", Model())
    object.__setattr__(
        given, "model", type("NoSpec", (), {"name": "own", "spec": lambda *_: None})()
    )
    with pytest.raises(SbpError, match="returned a NoneType without outputs, parameters"):
        plan_run(given, FIELDS, world_size=2, device_type="cpu")


def run_example(num_ranks: int) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={num_ranks}", "examples/own_module.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = deadlines.run(command, 60, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_example_here(world: World) -> str:
    """Run the example on existing ranks, with only its startup replaced; return its output."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(World, "start", lambda device: nullcontext(world))
        own_module.main()
    return printed.getvalue()


@pytest.mark.slow
def test_the_example_prints_equal_losses_on_any_number_of_ranks(ranks):
    started = run_example(2)
    losses = [float(line.split()[-1]) for line in started.splitlines()]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert [ranks(size, run_example_here)[0] for size in (1, 4)] == [started] * 2


def test_a_configuration_may_name_a_user_s_class(tmp_path):
    from sbpflow.config.load import dump_config, load_config
    from sbpflow.models.registry import MODELS

    path = tmp_path / "own.yaml"
    path.write_text("model: {name: 'examples.own_module:OwnModel', dim: 12}\n")
    loaded = load_config(path, ["model.dim=16"], models=MODELS)
    assert loaded.model.dim == 16
    assert loaded.model.name == "examples.own_module:OwnModel"
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(loaded))
    assert load_config(copy, models=MODELS) == loaded
    for name, message in {
        "examples.own_module:OwnModle": "has no 'OwnModle'; did you mean OwnModel",
        "examples.no_such:Model": "module examples.no_such does not exist; put its folder on",
        "examples.own_module:Net": "is not a model configuration",
        ":Model": "does not have the form package.module:Class",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_config(path, [f"model.name={name}"], models=MODELS)
    with pytest.raises(ConfigError, match=r"model\.dimm: unknown key; did you mean model\.dim"):
        load_config(path, ["model.dimm=3"], models=MODELS)
    assert dataclasses.is_dataclass(loaded.model)

"""Tests torch modules whose losses or fixed tensors are unusual."""

import os
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.embedding.state import LogicalTensor
from sbpflow.errors import ConfigError, SbpError
from sbpflow.run.execution.job import start_job
from sbpflow.run.export.plain_model import dense_part
from sbpflow.run.model.spec import Fields, embedding_output
from sbpflow.run.model.torch_model import TorchModel
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.saved.save import Saver
from sbpflow.run.saved.saved_model import load_values
from sbpflow.runtime.processes.garbage import collecting_later
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.placement import Placement
from sbpflow.tensor.global_tensor import replicated
from sbpflow.training.health import check_replicas
from tests.run.test_torch_model import DIM, FIELDS, Net, config, run


def exact_bce(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss in float64, as users do for precision."""
    return F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none")


class Fixed(Net):
    """A net with a frozen parameter and buffers of several dtypes; ``differs`` names one of them,
    whose value differs between processes.
    """

    def __init__(self, differs: str) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)
        if differs:
            getattr(self, differs).fill_(os.getpid() % 2**16)


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str = "own"
    differs: str = ""
    compiled: bool = False
    exact: bool = False

    def spec(self, fields: Fields) -> TorchModel:
        outputs = (embedding_output("deep", fields.sparse, dim=DIM),)
        options = {"row_loss": exact_bce} if self.exact else {}
        return TorchModel(outputs=outputs, make=self.make, **options)

    def make(self) -> nn.Module:
        net = Fixed(self.differs)
        return torch.compile(net, backend="aot_eager") if self.compiled else net


def losses(world: World, exact: bool) -> list[float]:
    given = config("3", Model(exact=exact), dtype="float32")
    return run(start_job(given, FIELDS, Boxing(world)), world)


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_in_float64_trains_a_float32_module(ranks, size):
    (wanted,) = ranks(1, losses, False)
    for found in ranks(size, losses, True):
        assert found == pytest.approx(wanted, abs=1e-5)


def refusal(world: World, differs: str, compiled: bool) -> str:
    model = Model(differs=differs, compiled=compiled)
    with pytest.raises(SbpError) as caught:
        start_job(config("3", model), FIELDS, Boxing(world))
    return str(caught.value)


@pytest.mark.parametrize(("differs", "compiled"), [("frozen", True), ("scale", False)])
def test_fixed_tensors_that_differ_between_ranks_are_refused(ranks, differs, compiled):
    for message in ranks(2, refusal, differs, compiled):
        assert f"parameter or buffer {differs}: its initial values differ" in message


class PartlyCompiled(Net):
    """A net that compiles one of its layers, which has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = torch.compile(self.first, backend="aot_eager")


def test_the_plain_form_of_a_partly_compiled_module_has_the_names_of_the_spec():
    outputs = (embedding_output("deep", FIELDS.sparse, dim=DIM),)
    spec = TorchModel(outputs=outputs, make=PartlyCompiled)
    net = spec.plain(seed=7)
    assert set(dict(net.named_parameters())) == set(spec.parameters)
    assert net.again is net.first
    assert isinstance(net.first, nn.Linear)


def test_what_make_leaves_in_cycles_is_freed_though_a_run_starts_without_collections():
    class Loaded:
        def __init__(self) -> None:
            self.table, self.itself = torch.zeros(10), self

    freed: list[weakref.ref[Loaded]] = []

    def make() -> nn.Module:
        freed.append(weakref.ref(Loaded()))
        return Net()

    outputs = (embedding_output("deep", FIELDS.sparse, dim=DIM),)
    spec = TorchModel(outputs=outputs, make=make)
    with World.start("cpu") as world, collecting_later():
        layouts = dict.fromkeys(spec.parameters, replicated(Placement.line("cpu", 1)))
        spec.build(layouts, Boxing(world), seed=1, dtype=torch.float32)
        assert len(freed) == 2
        assert all(each() is None for each in freed)


class Loaded(Net):
    """A net with constants whose values come from outside, such as a file that may change."""

    value = 2.0

    def __init__(self) -> None:
        super().__init__(norm=nn.BatchNorm1d)
        self.norm.weight.requires_grad_(False).fill_(self.value)
        self.frozen = nn.Parameter(torch.full((2, 3), self.value), requires_grad=False)
        self.register_buffer("scale", torch.tensor(self.value))
        self.register_buffer("mask", torch.tensor([True, self.value > 1]))
        self.register_buffer("order", torch.tensor([int(self.value)], dtype=torch.int16))
        self.register_buffer("expanded", torch.tensor(self.value).expand(3))
        self.register_buffer("made", torch.tensor(self.value), persistent=False)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    name: str = "own"

    def spec(self, fields: Fields) -> TorchModel:
        return TorchModel(outputs=(embedding_output("deep", fields.sparse, dim=DIM),), make=Loaded)


def constants_of(module: nn.Module) -> dict[str, object]:
    names = ("norm.weight", "frozen", "scale", "mask", "order", "expanded", "made")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensors[name].tolist() for name in names}


def load_constants(world: World, folder: Path) -> dict[str, dict[str, object]]:
    """Save a job, change the values that ``make`` returns, and load the checkpoint in all ways."""
    given, boxing = config("3", LoadedModel()), Boxing(world)
    job = start_job(given, FIELDS, boxing)
    run(job, world)
    check_replicas(job.copies, job.embeddings, boxing)

    def without_constants() -> dict[str, LogicalTensor]:
        absent = {f"dense/{name}" for name in job.constants}
        return {name: value for name, value in job.state().items() if name not in absent}

    saver = partial(Saver, boxing=boxing, run="r", deadline_s=60)
    saved = open_checkpoint(saver(folder / "new", state=job.state).save(1, {}))
    old = open_checkpoint(saver(folder / "old", state=without_constants).save(1, {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loaded, "value", 0.5)
        resumed, predicting, of_old = (start_job(given, FIELDS, boxing) for _ in range(3))
        resumed.restore(saved)
        load_values(predicting, saved)
        of_old.restore(old)
        spec, plan = given.model.spec(FIELDS), job.plan.embeddings
        plain = dense_part(spec, plan, saved.tensor, saved.tensors, given.run.seed)
    modules = {"trained": job.model.module, "resumed": resumed.model.module, "plain": plain}
    modules |= {"predicting": predicting.model.module, "old": of_old.model.module}
    return {name: constants_of(module) for name, module in modules.items()}


@pytest.mark.parametrize("size", [1, 2])
def test_checkpoints_contain_frozen_parameters_and_persistent_buffers(ranks, memory, size):
    for name in ("new", "old"):
        (memory / name).mkdir()
    for found in ranks(size, load_constants, memory):
        wanted = {**found["trained"], "made": 0.5}
        assert (wanted["scale"], wanted["mask"], wanted["order"]) == (2.0, [True, True], [2])
        for way in ("resumed", "predicting", "plain"):
            assert found[way] == wanted
        assert found["old"]["norm.weight"] == [0.5] * 9
        assert found["old"]["scale"] == 0.5


def test_a_constant_of_another_shape_than_the_saved_one_is_refused():
    given = config("3", LoadedModel())
    spec, plan = plan_run(given, FIELDS, world_size=1, device_type="cpu")
    saved = {f"dense/{name}": value for name, value in Loaded().state_dict().items()}
    dense_part(spec, plan.embeddings, saved.__getitem__, saved, 1)
    saved["dense/frozen"] = torch.ones(2, 4)
    message = r"frozen has shape \[2, 3\] in plain\(\) of TorchModel, but \[2, 4\] in the check"
    with pytest.raises(ConfigError, match=message):
        dense_part(spec, plan.embeddings, saved.__getitem__, saved, 1)

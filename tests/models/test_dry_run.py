"""Tests that the steps of the dense part are the same for a dry run on the CPU and on the meta
device.
"""

from dataclasses import replace

import pytest

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.config.schema import Config
from sbpflow.run.planning import dense_steps
from sbpflow.run.planning.build_plan import plan_run
from tests.models.test_models import SPLIT
from tests.models.twins import MODELS, config_of
from tests.training.wdl_case import FIELDS


def steps_on(device: str, config: Config, size: int, patch: pytest.MonkeyPatch) -> list[object]:
    patch.setattr(dense_steps, "_device", lambda *_: device)
    _, plan = plan_run(config, FIELDS, world_size=size, device_type="cpu")
    return [plan.dense_forward, plan.dense_backward, plan.dense_conversions]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", [*MODELS])
def test_steps_do_not_depend_on_the_device_of_the_dry_run(monkeypatch, name, size):
    layouts = SPLIT.get(name, {}) if size > 1 else {}
    config = config_of(name, "2", dense_layouts=layouts)
    found = [steps_on(device, config, size, monkeypatch) for device in ("cpu", "meta")]
    assert found[0] == found[1]
    assert bool(found[0][0]) == bool(layouts)


def test_only_small_passes_run_on_the_cpu(monkeypatch):
    devices: list[str] = []

    class Recorded(DryBoxing):
        def __init__(self, size: int, rank: int = 0, device: str = "meta") -> None:
            devices.append(device)
            super().__init__(size, rank, device)

    monkeypatch.setattr(dense_steps, "DryBoxing", Recorded)
    config = config_of("wdl", "2")
    large = replace(config, data=replace(config.data, batch_size=4_000_000))
    plan_run(config, FIELDS, world_size=2, device_type="cpu")
    plan_run(large, FIELDS, world_size=2, device_type="cpu")
    plan_run(config, FIELDS, world_size=2, device_type="cuda")
    assert devices == ["cpu", "meta", "meta"]

"""Tests that an entry in ``COMPILED`` is enough to add a kernel: it is chosen, warmed up, trained,
measured, and checked by the doctor.
"""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from sbpflow.embedding.rules.kernels import COMPILED, StackFacts
from sbpflow.embedding.storage.choose import choose_kernel, kernel_faults, missing_kernels
from sbpflow.embedding.storage.measure import measure
from sbpflow.run.execution.kernel_checks import kernel_checks
from tests.embedding import own_kernel
from tests.embedding.cases import Case, Spec, join_outputs, train
from tests.embedding.own_rule import ScaledMomentum
from tests.embedding.test_measure import shape_of

RULE = ScaledMomentum(lr=0.05)
KERNELS = {"own": own_kernel.FUNCTION}
CASE = Case(
    tables={"deep": (("a", 41, 6), ("b", 64, 6))},
    specs={"a": Spec("S(0)", "unique"), "b": Spec("S(0)", "unique")},
    optimizer=RULE,
)


def train_with_own_kernel(world, case):
    """Return the results of training, and the calls of the kernel."""
    calls = (own_kernel.warmed, own_kernel.updates, own_kernel.indexers)
    for each in calls:
        each.clear()
    with (
        patch.dict(COMPILED, own=own_kernel.OWN),
        patch.object(ScaledMomentum, "kernels", KERNELS),
    ):
        result = train(world, case)
    return result, [len(each) for each in calls], list(own_kernel.warmed)


def test_a_kernel_of_the_registry_is_warmed_up_and_trains(ranks):
    results = ranks(2, train_with_own_kernel, replace(CASE, kernel="own"))
    for _, (num_warmed, num_updates, num_lookups), warmed in results:
        assert num_warmed == 1
        assert warmed == [(["scaled_momentum"], torch.float64, torch.float64)]
        assert num_updates == num_lookups == len(CASE.batch_sizes)
    outputs = join_outputs([result for result, *_ in results])
    for step, other in zip(outputs, join_outputs(ranks(2, train, CASE)), strict=True):
        assert all(np.array_equal(step[name], other[name]) for name in other)


def test_a_kernel_of_the_registry_is_chosen_measured_and_checked(monkeypatch):
    monkeypatch.setitem(COMPILED, "own", own_kernel.OWN)
    monkeypatch.setattr(ScaledMomentum, "kernels", KERNELS)
    facts = StackFacts(
        width=8,
        optimizer=ScaledMomentum(),
        dtype=torch.float32,
        row_dtype=torch.float32,
        column_split=False,
        device_type="cpu",
    )
    assert choose_kernel("auto", facts, missing_kernels("auto")).name == "own"
    faults = kernel_faults(replace(facts, width=64), {})
    assert list(faults) == ["torch", *COMPILED]
    assert faults["own"] == "own rows have fewer than 64 columns"
    assert list(measure(shape_of(optimizer=ScaledMomentum()), ["torch", "own"])) == ["torch", "own"]
    assert kernel_checks()["own"]().state == "ok"

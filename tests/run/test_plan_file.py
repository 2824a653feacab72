"""Tests that a plan is unchanged after writing and reading, and that other files are refused."""

import hashlib
import json

import pytest

from sbpflow.config.table_rules import TableRule
from sbpflow.errors import DataError
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.plan_file import plan_from_json, plan_to_json
from tests.training.wdl_case import FIELDS, make_config

MIXED = {
    "deep.C1": TableRule(sbp="S(0)", ranks=(0, 2), sizes=(30, 7)),
    "deep.C2": TableRule(sbp="B", ranks=(1,)),
    "deep.C3": TableRule(sbp="(S(0), S(1))", ranks=((0, 1), (2, 3))),
    "deep.C4": TableRule(sbp="B", comm_dtype="bfloat16"),
}


def plan_of(scheme, **more):
    config = make_config(scheme, "rowwise_adagrad", dtype="float32", **more)
    return plan_run(config, FIELDS, world_size=4, device_type="cpu")[1]


@pytest.mark.parametrize("scheme", ["dp", "1", "2", "3", "auto"])
def test_a_plan_is_equal_after_writing_and_reading(scheme):
    plan = plan_of(scheme, dim=8, dense_layouts={"mlp.0.weight": "S(1)"})
    assert plan_from_json(plan_to_json(plan)) == plan


def test_a_mixed_plan_is_equal_after_writing_and_reading():
    plan = plan_of("2", tables=MIXED, dim=8)
    again = plan_from_json(plan_to_json(plan))
    assert again == plan
    assert again.steps() == plan.steps()


def test_a_plan_with_the_former_names_of_classes_fields_and_moves_is_read():
    plan = plan_of("dp", dim=8)
    former = {"TableBatch": "Stack", "FeatureLookup": "Use", "dense_allreduce": "whole_gradients"}
    former |= {"start_id_exchange": "begin", "exchange_ids": "advance", "receive_ids": "receive"}
    former |= {"lookup": "look_up", "gather_outputs": "outputs", "send_grads": "push"}
    former |= {"receive_grads": "collect", "comm_dtype": "wire"}
    text = json.dumps(json.loads(plan_to_json(plan))["plan"])
    for now, then in former.items():
        assert f'"{now}"' in text
        text = text.replace(f'"{now}"', f'"{then}"')
    content = {"format": 3, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    assert plan_from_json(json.dumps({**content, "plan": json.loads(text)})) == plan


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2, "plan": {}}', '{"format": 1, "plan": {"is": "Path"}}']
)
def test_a_file_that_is_not_a_plan_is_refused(text):
    with pytest.raises(DataError, match=r"^the plan is not a valid plan\.json"):
        plan_from_json(text)


def test_a_changed_plan_is_refused():
    plan = plan_of("1", dim=8)
    content = json.loads(plan_to_json(plan))
    for key, value in {
        "batch_size": "abc",
        "kernels": None,
        "schedule": {"is": "Broadcast"},
    }.items():
        changed = {**content, "plan": {**content["plan"], key: value}}
        with pytest.raises(DataError, match="checksum"):
            plan_from_json(json.dumps(changed))
    with pytest.raises(DataError, match="format True"):
        plan_from_json(json.dumps({**content, "format": True}))
    with pytest.raises(DataError, match="more than 64 levels of nesting"):
        plan_from_json("[" * 100_000)


def test_a_plan_whose_optimizers_have_every_constant_is_read():
    """Older files contain the constants of all optimizers, because these were options of a single
    class.
    """
    plan = plan_of("3", dim=8)
    content = json.loads(plan_to_json(plan))

    def widen(value):
        if isinstance(value, dict):
            every = {"betas": [0.9, 0.999], "l1": 0.0, "l2": 0.0, "beta": 0.0}
            more = every if value.get("is") == "SparseOptimizer" else {}
            return {**more, **{key: widen(item) for key, item in value.items()}}
        return [widen(item) for item in value] if isinstance(value, list) else value

    content["plan"] = widen(content["plan"])
    assert "betas" in json.dumps(content)
    content["sha256"] = hashlib.sha256(json.dumps(content["plan"]).encode()).hexdigest()
    assert plan_from_json(json.dumps(content)) == plan

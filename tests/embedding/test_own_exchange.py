"""Tests that a user's exchange, defined in two files, works in training, plans, logs, prices, and
measurements.
"""

import ast
from dataclasses import replace

import numpy as np
import pytest

from sbpflow.config.table_rules import TableRule
from sbpflow.costs.counts import INDEX
from sbpflow.embedding.plan.price import plan_totals, price_plan
from sbpflow.embedding.storage.measure import StackShape
from sbpflow.errors import ConfigError
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost, count_work
from sbpflow.planner.search.auto import search
from sbpflow.planner.shapes import plan_of, problem_of, shapes_of
from sbpflow.planner.task import Shape, embedding_plan
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe, format_plan
from tests.embedding.cases import Spec, join_outputs, join_tables
from tests.embedding.cases import train as train_case
from tests.embedding.own_exchange import two_hops
from tests.embedding.own_exchange_group import TwoHopGroup
from tests.embedding.test_equality import make_case, reference
from tests.planner.problems import with_exchange
from tests.planner.tasks import make_task
from tests.repo.test_tree import PYTHON, name
from tests.training.wdl_case import FIELDS, make_config, train

PACKAGES = ("sbpflow", "planner", "models", "data")
STAGES = [f"deep/two_hops/{name}.{n}"
          for name, hops in (("fwd/counts", (0,)), ("fwd/ids", (0,)), ("fwd/counts", (1,)),
                             ("fwd/ids", (1,)), ("fwd/vectors", (1, 0)), ("bwd/gradients", (0, 1)))
          for n in hops]  # fmt: skip


def config_of(exchange):
    rules = {"deep.*": TableRule(sbp="S(0)", exchange=exchange)}
    return make_config("3", "rowwise_adagrad", tables=rules, dim=8)


def _train(world, exchange):
    with two_hops():
        return train(world, config_of(exchange), 6)


def _train_case(world, case):
    TwoHopGroup.num_received = 0
    world.log.records.clear()
    world.log.enabled = True
    try:
        with two_hops():
            return train_case(world, case) | {
                "num_received": TwoHopGroup.num_received,
                "rank": world.rank,
                "groups": [(r.step_id, r.group) for r in world.log.records],
            }
    finally:
        world.log.enabled = False


def test_an_exchange_with_two_rounds_of_ids_refuses_buffers_of_fixed_size():
    with two_hops():
        config = config_of("two_hops")
        config = replace(config, parallel=replace(config.parallel, row_buffer_fraction=0.5))
        with pytest.raises(ConfigError, match=r"of deep.* exchanges ids twice"):
            plan_run(config, FIELDS, world_size=4, device_type="cuda")


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "lazy_adam"])
def test_own_exchange_equals_the_reference_on_four_ranks(ranks, optimizer):
    with two_hops():
        case = make_case("unique", "unique", optimizer)
        case = replace(case, specs={
            name: Spec("S(0)", "two_hops") if name.startswith("deep") else spec
            for name, spec in case.specs.items()})  # fmt: skip
        results = ranks(4, _train_case, case)
        outputs, model = reference(case)
        for step, expected in zip(join_outputs(results), outputs, strict=True):
            for name, value in expected.items():
                np.testing.assert_allclose(step[name], value, rtol=0, atol=1e-12)
        for name, (weights, _) in join_tables(case, results).items():
            np.testing.assert_allclose(weights, model.deep[name][1].numpy(), rtol=0, atol=1e-12)
    # Each of the three deep tables has one lookup per sample, and the owners received all lookups.
    assert sum(result["num_received"] for result in results) == 3 * sum(case.batch_sizes)
    for result in results:
        rank, logged = result["rank"], dict(result["groups"])
        names = dict.fromkeys(name for name, _ in result["groups"])
        assert [name for name in names if "two_hops" in name] == STAGES
        assert logged[STAGES[0]] == ((0, 1), (2, 3))[rank // 2]
        assert logged[STAGES[3]] == ((0, 2), (1, 3))[rank % 2]


def test_own_exchange_gives_equal_losses(ranks):
    hops, unique = (ranks(4, _train, exchange) for exchange in ("two_hops", "unique"))
    np.testing.assert_allclose(hops[0]["losses"], unique[0]["losses"], rtol=1e-12)
    assert len(set(hops[0]["losses"])) == 6


def test_own_exchange_is_explained_and_measured_from_its_stages():
    with two_hops():
        _, plan = plan_run(config_of("two_hops"), FIELDS, world_size=4, device_type="cpu")
        facts, text = describe(plan), format_plan(plan)
        steps = {s["id"]: s for s in facts["steps"]}
        assert [name for name in steps if "deep/two_hops" in name] == STAGES
        assert steps[STAGES[1]]["groups"] == [[0, 1], [2, 3]]
        assert steps[STAGES[3]]["groups"] == [[0, 2], [1, 3]]
        assert steps[STAGES[3]]["what"] == "rows and their lookups"
        assert "[0, 2] [1, 3]" in text
        (group,) = [g for g in plan.embeddings.groups if g.exchange == "two_hops"]
        shape = StackShape.of(group, group.stacks[0], 30, plan.embeddings.row_dtype)
        assert shape.lists == 2  # merged rows come from two ranks


def test_own_exchange_is_priced_and_planned():
    task = make_task(rows=(4000, 900, 3000), dim=8)
    hops = Shape("S(0)", "two_hops", (4, 1))
    assert hops not in shapes_of(task, task.tables[0])
    with two_hops():
        assert hops in shapes_of(task, task.tables[0])
        cost = TaskCost(described("h100-dgx"), task)
        problem = with_exchange(problem_of(cost), "two_hops")
        plan = plan_of(task, problem, search(problem).assignment)
        assert {choice.shape for choice in plan.values()} == {hops}
        task.check(plan)
        engine = embedding_plan(task, plan)
        assert [group.exchange for group in engine.groups] == ["two_hops"]
        totals = count_work(task, plan)
        assert totals[0, INDEX["num_row_transfers"]] == 2  # one transfer in each of the two hops
        assert cost.predict(plan).step_ms > 0
        priced = plan_totals(engine, task.batch_size, {})
        assert priced[0, INDEX["num_row_transfers"]] == 2
        assert price_plan(engine, task.batch_size).ms > 0
        # A search without restrictions tries the exchange.
        free = problem_of(cost)
        assert all(hops in {option.shape for option in options} for options in free.options)


def test_own_exchange_rejects_unsupported_layouts():
    rule = TableRule(sbp="S(1)", exchange="two_hops")
    with two_hops():
        config = make_config("3", "sgd", tables={"deep.*": rule}, dim=8)
        with pytest.raises(ConfigError, match="two_hops does not support S\\(1\\)"):
            plan_run(config, FIELDS, world_size=4, device_type="cpu")
    with pytest.raises(ConfigError, match=r"columns, local, reduce, unique, got 'two_hops'"):
        rule.check("parallel.tables.deep.*")


def comparisons(tree):
    """Yield the numbers of the lines that compare an exchange name with strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            named = any(ast.unparse(side).split(".")[-1] == "exchange" for side in sides)
            texts = [n for side in sides for n in ast.walk(side) if isinstance(n, ast.Constant)]
            if named and any(isinstance(text.value, str) for text in texts):
                yield node.lineno


@pytest.mark.parametrize("code", ['g.exchange == "local"', 'exchange in ("reduce", "unique")'])
def test_comparisons_of_exchange_names_are_detected(code):
    assert list(comparisons(ast.parse(code))) == [1]


def test_code_does_not_compare_exchange_names():
    """Code must not test exchange names: all information about an exchange must come from its
    description.
    """
    files = [path for path in PYTHON if name(path).split("/")[0] in PACKAGES]
    found = [f"{name(path)}:{line}" for path in files
             for line in comparisons(ast.parse(path.read_text(encoding="utf-8")))]  # fmt: skip
    assert len(files) > 100
    assert found == []

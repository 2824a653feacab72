"""Builds the CTR model in sbpflow from a configuration, as ``train_wdl.py`` does."""

from collections import Counter

import torch
from torch import Tensor

from benchmarks.click_model import EARLY, LATE, Rows, Shape
from benchmarks.click_plan import planned_rules
from benchmarks.torchrec_models import config_of, fields_of
from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import (
    Config,
    DataConfig,
    DenseSgd,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from sbpflow.config.table_rules import ParallelConfig, TableRule
from sbpflow.embedding.rules.kernels import KernelRequest
from sbpflow.embedding.rules.rowwise_adagrad import RowwiseAdagrad
from sbpflow.run.execution.job import build_job
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor


class ClickTrainer:
    """Trains on this rank's batches, with the same interface as the other systems' classes."""

    def __init__(
        self,
        shape: Shape,
        batches: list[Rows],
        world: World,
        *,
        seed: int,
        comm_dtype: str,
        layout: str,
        kernel: KernelRequest = "auto",
        model: str = "wdl",
        profile: str | None = None,
    ) -> None:
        """Build the trainer: ``layout`` applies to all tables; with ``auto``, the planner chooses
        layouts by the prices in ``profile``.
        """
        rules: dict[str, dict[str, TableRule]] = {
            "auto": {},
            "unique": {"deep.*": TableRule(sbp="S(0)", exchange="unique")},
            EARLY: {"deep.*": TableRule(sbp="S(0)", exchange="unique")},
            LATE: {"deep.*": TableRule(sbp="S(0)", exchange="unique")},
            "two_level": {"deep.*": TableRule(sbp="(S(0), S(0))")},
            "reduce": {"deep.*": TableRule(sbp="S(0)", exchange="reduce")},
            "columns": {"deep.*": TableRule(sbp="S(1)", exchange="columns")},
            "unique_columns": {"deep.*": TableRule(sbp="S(1)", exchange="unique")},
            "whole": {
                name: TableRule(sbp="B", ranks=(index % world.size,), exchange="columns")
                for index, name in enumerate(shape.names)
            },
        }
        config = Config(
            run=RunConfig(seed=seed),
            train=TrainConfig(early_rows=layout in (EARLY, LATE), late_gradients=layout == LATE),
            data=DataConfig(batch_size=shape.rows_per_rank * world.size),
            model=config_of(model, shape),
            parallel=ParallelConfig(
                device=world.device.type,
                tables=rules[layout],
                plan="auto" if layout == "auto" else None,
                comm_dtype=comm_dtype,
                kernel=kernel,
            ),
            optimizer=OptimizerConfig(
                sparse=RowwiseAdagrad(lr=shape.lr), dense=DenseSgd(lr=shape.dense_lr)
            ),
        )
        fields = fields_of(shape)
        planned: dict[str, TableRule] | None = None
        self.predicted_ms: float | None = None
        if layout == "auto":
            planned, self.predicted_ms = planned_rules(shape, config, fields, world.size, profile)
        spec, plan = plan_run(
            config,
            fields,
            world_size=world.size,
            device_type=world.device.type,
            planned=planned,
            topology=world.topology,
        )
        self.layouts = Counter(
            str(one.layout.nd_sbp) + " " + one.exchange for one in plan.layouts.values()
        )
        self.job = build_job(config, spec, plan, Boxing(world))
        self._batches, self._place = batches, 0
        self.world, self.width = world, shape.num_tables * shape.dim

    def plain(self, steps: int) -> list[float]:
        """Return one loss per step, over the batch's rows on all ranks."""
        losses = []
        for _ in range(steps):
            losses.append(self.job.trainer.step(self._batch(self._place)))
            self._place += 1
        return [float(loss) for loss in losses]

    def pipelined(self, steps: int) -> list[float]:
        """Train like ``plain``, but exchange the next batch's ids during the step."""
        batches = [self._batch(self._place + step) for step in range(steps)]
        self._place += steps
        return [float(loss) for loss in list(self.job.trainer.train_on(batches))]

    def dense_alone(self, steps: int) -> None:
        """Run the dense part's forward and backward passes on this rank's rows."""
        home = Layout(Placement.line("cpu", self.world.size), (Split(0),))
        part, boxing = self._batches[0], self.job.boxing

        def rows(values: Tensor) -> GlobalTensor:
            return GlobalTensor(values, home, (part.batch_size, values.shape[1]), boxing)

        for _ in range(steps):
            vectors = rows(torch.zeros(len(part.labels), self.width)).requires_grad_()
            logits = self.job.model.forward(
                {"deep": vectors}, rows(part.dense), training=True, seed=0
            )
            losses = self.job.model.row_losses(logits, rows(part.labels.unsqueeze(1)))
            ops.reduce_mean(losses).backward()
        for parameter in self.job.model.parameters.values():
            parameter.part.grad = None

    def _batch(self, place: int) -> Rows:
        return self._batches[place % len(self._batches)]

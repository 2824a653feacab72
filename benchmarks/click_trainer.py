"""The click model in sbpflow, built from a configuration as ``train_wdl.py`` builds a run."""

from benchmarks.click_model import Rows, Shape
from models.wdl import WdlConfig, WideConfig
from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import (
    Config,
    DataConfig,
    DenseSgd,
    OptimizerConfig,
    RowwiseAdagrad,
    RunConfig,
)
from sbpflow.config.table_rules import ParallelConfig, TableRule
from sbpflow.embedding.storage.choose import KernelRequest
from sbpflow.run.build_plan import plan_run
from sbpflow.run.job import build_job
from sbpflow.run.model import Fields, IdField
from sbpflow.runtime.world import World


class ClickTrainer:
    """Trains on the batches of this rank; the mirror of a peer's class."""

    def __init__(
        self,
        shape: Shape,
        batches: list[Rows],
        world: World,
        *,
        seed: int,
        wire: str,
        layout: str,
        kernel: KernelRequest = "auto",
    ) -> None:
        rules = {
            "unique": {"deep.*": TableRule(sbp="S(0)", exchange="unique")},
            "reduce": {"deep.*": TableRule(sbp="S(0)", exchange="reduce")},
            "columns": {"deep.*": TableRule(sbp="S(1)", exchange="columns")},
            "whole": {
                name: TableRule(sbp="B", ranks=(index % world.size,), exchange="columns")
                for index, name in enumerate(shape.names)
            },
        }
        config = Config(
            run=RunConfig(seed=seed),
            data=DataConfig(batch_size=shape.rows_per_rank * world.size),
            model=WdlConfig(
                embedding_dim=shape.dim,
                hidden=(shape.hidden,),
                dropout=0.0,
                wide=WideConfig(crosses=()),
            ),
            parallel=ParallelConfig(
                device=world.device.type, tables=rules[layout], exchange_dtype=wire, kernel=kernel
            ),
            optimizer=OptimizerConfig(
                sparse=RowwiseAdagrad(lr=shape.lr), dense=DenseSgd(lr=shape.dense_lr)
            ),
        )
        fields = Fields(
            dense=tuple(f"I{index + 1}" for index in range(shape.num_dense)),
            sparse=tuple(
                IdField(name=name.removeprefix("deep."), rows=shape.table_rows, hotness=count)
                for name, count in zip(shape.names, shape.hotness, strict=True)
            ),
        )
        spec, plan = plan_run(config, fields, world_size=world.size, device_type=world.device.type)
        self.job = build_job(config, spec, plan, Boxing(world))
        self._batches, self._place = batches, 0

    def plain(self, steps: int) -> list[float]:
        """Losses over the whole batch, step by step."""
        losses = []
        for _ in range(steps):
            losses.append(self.job.trainer.step(self._batch(self._place)))
            self._place += 1
        return [float(loss) for loss in losses]

    def pipelined(self, steps: int) -> list[float]:
        """As ``plain``, with the ids of the next batch exchanged during the step."""
        losses = []
        for step in range(steps):
            ahead = self._batch(self._place + 1) if step + 1 < steps else None
            losses.append(self.job.trainer.step(self._batch(self._place), ahead))
            self._place += 1
        return [float(loss) for loss in losses]

    def _batch(self, place: int) -> Rows:
        return self._batches[place % len(self._batches)]

"""Times each model's dense part on one CPU thread, in float32 and bf16, eager and compiled.

    python -m benchmarks.dense_part [--rows 4096]

The variants take turns on random inputs (26 fields x 16 columns, 13 dense fields); times are
medians of forward plus backward. The results show the speedup of ``model.autocast: bf16`` and
``model.compile: true`` on this machine.
"""

import argparse
import dataclasses
import statistics
import time

import torch
from torch import Tensor

from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.models.dcnv2 import DcnV2Config
from sbpflow.models.deepfm import DeepFmConfig
from sbpflow.models.dlrm import DlrmConfig
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.model.spec import Fields
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor

FIELDS = Fields.of([f"I{n + 1}" for n in range(13)], {f"C{n + 1}": 100 for n in range(26)})
MODELS = {
    "wdl": WdlConfig(hidden=(1024, 1024), dropout=0.0, wide=WideConfig(crosses=())),
    "dlrm": DlrmConfig(bottom=(512, 256), top=(512, 256)),
    "deepfm": DeepFmConfig(hidden=(400, 400, 400)),
    "dcnv2": DcnV2Config(hidden=(500, 500, 500)),
}
KINDS = {
    "float32": {},
    "bf16": {"autocast": "bf16"},
    "compiled": {"compile": True},
    "compiled bf16": {"compile": True, "autocast": "bf16"},
}
ROWS = 4096


class Part:
    """One model's dense part and its inputs."""

    def __init__(self, model: str, kind: str, world: World, rows: int) -> None:
        self.boxing, self.rows = Boxing(world), rows
        self.line = Placement.line("cpu", 1)
        spec = dataclasses.replace(MODELS[model], **KINDS[kind]).spec(FIELDS)
        copied = {name: Layout(self.line, (Broadcast(),)) for name in spec.parameters}
        self.part = spec.build(copied, self.boxing, seed=1, dtype=torch.float32)
        generator = torch.Generator().manual_seed(2)
        self.vectors = {
            output.name: torch.randn(rows, output.width, generator=generator) * 0.1
            for output in spec.outputs
        }
        self.dense = torch.randn(rows, len(FIELDS.dense), generator=generator)
        self.labels = torch.randint(0, 2, (rows, 1), generator=generator).float()

    def step(self) -> float:
        """Run the forward pass, the loss, and the backward pass; return the loss."""
        vectors = {name: self._home(x).requires_grad_() for name, x in self.vectors.items()}
        logits = self.part.forward(vectors, self._home(self.dense), training=True, seed=0)
        loss = ops.reduce_mean(self.part.row_losses(logits, self._home(self.labels)))
        loss.backward()
        for parameter in self.part.parameters.values():
            parameter.part.grad = None
        return float(loss.part.detach())

    def _home(self, x: Tensor) -> GlobalTensor:
        layout = Layout(self.line, (Split(0),))
        return GlobalTensor(x.detach(), layout, tuple(x.shape), self.boxing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("dense_part", recorded=args.rows == ROWS)
    with World.start("cpu") as world:
        for model in MODELS:
            parts = {kind: Part(model, kind, world, args.rows) for kind in KINDS}
            losses = {kind: part.step() for kind, part in parts.items()}  # warm-up; also compiles
            for kind, loss in losses.items():
                if abs(loss - losses["float32"]) > (1e-2 if "bf16" in kind else 1e-5):
                    raise SystemExit(f"{model}: losses differ: {losses}")
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(args.repeats):
                for kind, part in parts.items():
                    start = time.perf_counter()
                    part.step()
                    times[kind].append(1e3 * (time.perf_counter() - start))
            median = {kind: statistics.median(values) for kind, values in times.items()}
            for kind, value in median.items():
                results.add(
                    benchmark="dense_part",
                    model=model,
                    kind=kind,
                    rows=args.rows,
                    step_ms=round(value, 2),
                    times_faster=round(median["float32"] / value, 2),
                )


if __name__ == "__main__":
    main()

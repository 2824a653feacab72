"""The ``checkpoint`` group: where and how often a run is saved, and what it goes on from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sbpflow.config.parse import Example, PathOr
from sbpflow.runtime.ranges import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """A run is saved every ``every`` steps and at its end; ``every: 0`` saves nothing.

    ``dir`` is ``checkpoints`` in ``run.dir`` by default, and must be the same folder for all ranks.
    The newest ``keep`` stay, and with ``keep_best`` that of the best validation AUC, which needs a
    ``train.eval_every`` that is a multiple of ``every``. With ``background`` a run trains on while
    it is being saved.

    ``resume``: auto goes on from the newest good checkpoint of an unfinished run in ``dir``, if
    all keys that results depend on are equal, and refuses otherwise; never starts anew, and moves
    what is there aside; a path goes on from that checkpoint, whichever run it is of.

    ``on_signal``: what the first Ctrl-C or SIGTERM does: save after the step under way and end, or
    end at once, as the second does.
    """

    dir: Annotated[Path | None, Example("runs/train/checkpoints")] = None
    every: Annotated[int, Range(low=0)] = 1000
    keep: Annotated[int, Range(low=1)] = 3
    keep_best: bool = False
    background: bool = True
    resume: Annotated[str, PathOr(("auto", "never"))] = "auto"
    on_signal: Literal["save", "end"] = "save"

"""The ``checkpoint`` group: where and how often a run is saved, and what it goes on from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sbpflow.config.parse import Example, PathOr
from sbpflow.runtime.fields.keys import Key
from sbpflow.runtime.fields.ranges import Count, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When a run is saved, what is kept, and what it resumes from.

    ``resume: auto`` takes the newest good checkpoint of an unfinished run in ``dir`` if all keys
    that must be equal are, and refuses to run otherwise. ``never`` starts anew and moves what is
    there aside. A path resumes from that checkpoint, whichever run it is of.
    """

    dir: Annotated[
        Path | None,
        Example("runs/train/checkpoints"),
        Key(
            "execution",
            "Folder of checkpoints, the same for all ranks; checkpoints/ in run.dir if not given.",
        ),
    ] = None
    every: Annotated[
        int,
        Range(low=0),
        Key("execution", "Steps between checkpoints; the end is saved, too. 0 saves nothing."),
    ] = 1000
    keep: Annotated[Count, Key("execution", "How many of the newest checkpoints stay.")] = 3
    keep_best: Annotated[
        bool,
        Key(
            "execution",
            "Also keep the checkpoint of the best AUC of val; train.eval_every must be a multiple "
            "of checkpoint.every.",
        ),
    ] = False
    background: Annotated[
        bool, Key("execution", "Train on while a checkpoint is being written.")
    ] = True
    resume: Annotated[
        str, PathOr(("auto", "never")), Key("execution", "What a run resumes from; see above.")
    ] = "auto"
    on_signal: Annotated[
        Literal["save", "end"],
        Key("execution", "What the first Ctrl-C or SIGTERM does; a second one ends at once."),
    ] = "save"

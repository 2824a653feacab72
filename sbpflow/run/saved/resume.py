"""What a run goes on from: decided by rank 0 from the folder of its checkpoints, told to all.

An unfinished run of the same results goes on; another one is refused, saying what differs; what
else is there makes room. Reads checkpoints, changes no tensor.
"""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbpflow.boxing.agreement import gather_facts, run_on_all_ranks
from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.folder import (
    DATA_FOLDER,
    checked,
    good_checkpoints,
    list_checkpoints,
    step_of,
    tidy,
)
from sbpflow.checkpoint.read import Checkpoint, open_checkpoint
from sbpflow.checkpoint.run_file import RUN_FILE, read_run
from sbpflow.config.load import config_facts
from sbpflow.config.renamed import current_key
from sbpflow.config.schema import Config
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.run.execution.job import Job
from sbpflow.run.saved.saved_documents import check_loop, check_start, saved_set
from sbpflow.runtime.files.run_folder import CHECKPOINTS_FOLDER, set_aside

logger = logging.getLogger(__name__)

_SET = "the set in data.path"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """A set, as far as a checkpoint must know it: the digests of its files, of its rows, of its
    vocabulary and of the ones that grew into it.
    """

    path: str
    fingerprint: str
    content_id: str
    vocabulary_digest: str | None = None
    ancestors: tuple[str, ...] = ()

    def relation(self, saved: Mapping[str, Any]) -> str:
        """What this set is to the one that ``saved`` is of: "same", "grown" or "other".

        The same rows in other files are the same set. A set of the same vocabulary is "grown" by no
        row: its ids mean the same.
        """
        if self.content_id == saved.get("content_id") or self.fingerprint == saved.get(
            "fingerprint"
        ):
            return "same"
        digest = saved.get("vocabulary_digest")
        known = digest is not None and digest in (self.vocabulary_digest, *self.ancestors)
        return "grown" if known else "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a run begins with. ``newest`` is the checkpoint to try first, None to start anew.

    ``run`` names the run. ``goes_on``: it is the same run, whose files are appended to; else it is
    a new one that starts from a checkpoint of another.
    """

    folder: Path
    run: str
    newest: Path | None = None
    goes_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins: ``training/loop.py`` says what step, epoch and steps_of_before are."""

    step: int = 0
    epoch: int = 0
    steps_of_before: int = 0
    cursor: Mapping[str, int | str] | None = None
    loop: Mapping[str, Any] = field(default_factory=dict[str, Any])
    going_on: tuple[int, int] | None = None
    best: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """A decision, what came of it, and the set that the run reads."""

    decision: Decision
    start: Start
    data: DataFacts


def checkpoint_dir(config: Config) -> Path:
    """Where the checkpoints of a run are; nothing is made."""
    return config.checkpoint.dir or config.run.dir / CHECKPOINTS_FOLDER


def relevant_facts(config: Config, data: DataFacts) -> dict[str, str]:
    """The keys that results depend on, and the set."""
    scores_decide = config.train.stop is not None or config.train.plateau is not None
    facts = config_facts(config, ("results", "scores") if scores_decide else ("results",))
    return {**facts, _SET: data.content_id[:16]}


def decide(config: Config, data: DataFacts, boxing: Boxing) -> Decision:
    """What the run begins with, the same on every rank; what is in the way is moved aside.

    ConfigError on every rank where that is not to be decided without the user.
    """
    folder, found = checkpoint_dir(config), Decision(folder=Path(), run="")

    def ask() -> Decision:
        if boxing.world.rank:
            return found
        try:
            return _decide(config, data, folder)
        except CheckpointError as error:
            raise ConfigError(f"checkpoint.resume: {error}") from error

    found = run_on_all_ranks(boxing, ask)
    if boxing.world.size == 1:
        return found
    newest = "" if found.newest is None else str(found.newest)
    facts = {"run": found.run, "newest": newest, "goes_on": "yes" if found.goes_on else ""}
    told = gather_facts(boxing, facts)[0]
    return Decision(
        folder=folder,
        run=told["run"],
        newest=Path(told["newest"]) if told["newest"] else None,
        goes_on=bool(told["goes_on"]),
    )


def _decide(config: Config, data: DataFacts, folder: Path) -> Decision:
    wanted = config.checkpoint.resume
    new = Decision(folder=folder, run=uuid.uuid4().hex[:12])
    if wanted not in ("auto", "never"):
        newest = _given(Path(wanted))
        if newest.parent.resolve() == folder.resolve():
            raise ConfigError(
                f"checkpoint.resume: {wanted} is in checkpoint.dir, {folder}, which a run that "
                "starts from it would move aside; use checkpoint.resume=auto to go on, or another "
                "run.dir"
            )
        _make_room(config)
        return Decision(folder=folder, run=new.run, newest=newest)
    facts = read_run(folder) if wanted == "auto" else None
    if facts is None or facts.status == "finished" or config.checkpoint.every == 0:
        _make_room(config)
        return new
    run = facts.run
    newest = next(good_checkpoints(folder, run=run), None)
    if newest is None and not list_checkpoints(folder):
        _make_room(config)  # it ended before it was saved
        return new
    _check_same(facts.facts, config, data, folder)
    if newest is None:
        raise ConfigError(
            f"checkpoint.resume: none of the checkpoints in {folder} can be used, as said above; "
            "use checkpoint.resume=never to start anew (they are moved aside), or another run.dir"
        )
    tidy(folder)
    return Decision(folder=folder, run=run, newest=newest.path, goes_on=True)


def _given(path: Path) -> Path:
    """A checkpoint, or the newest good one of a folder of them."""
    if list_checkpoints(path):
        found = next(good_checkpoints(path), None)
        if found is None:
            raise CheckpointError(f"{path}: none of its checkpoints can be used, as said above")
        return found.path
    return checked(path).path


def _check_same(saved: Mapping[str, str], config: Config, data: DataFacts, folder: Path) -> None:
    mine = relevant_facts(config, data)
    saved = {current_key(key): value for key, value in saved.items()}
    if saved.get(_SET) == data.fingerprint[:16]:  # what earlier versions wrote there
        saved = {**saved, _SET: mine[_SET]}
    differ = [
        f"{key} was {saved.get(key, 'not given')} and is {mine.get(key, 'not given')}"
        for key in sorted(saved.keys() | mine.keys())
        if saved.get(key) != mine.get(key)
    ]
    if differ:
        raise ConfigError(
            f"checkpoint.resume: the unfinished run in {folder} is another one: "
            f"{'; '.join(differ)}. Give it back these values to go on, or start anew with "
            "checkpoint.resume=never (it is moved aside) or another run.dir"
        )


def _make_room(config: Config) -> None:
    """Move what another run left in checkpoint.dir aside; within run.dir its report does."""
    folder = checkpoint_dir(config)
    if not folder.is_dir():
        return
    tidy(folder)
    if config.checkpoint.dir is None:
        return
    names = [path.name for path in list_checkpoints(folder)]
    aside = set_aside(folder, [*names, RUN_FILE, DATA_FOLDER])
    if aside is not None:
        logger.info("checkpoints of an earlier run in %s are now in %s", folder, aside)


def load(decision: Decision, job: Job, data: DataFacts, boxing: Boxing) -> Start:
    """Restore the job from the newest checkpoint that every rank can read; every rank calls it.

    Of a run that goes on a damaged one is named, and the one before it taken. ConfigError on every
    rank if there is none, or if it does not fit the job or the set.
    """
    newest = decision.newest
    if newest is None:
        return Start()
    while True:
        reason = _first(boxing, _restored(newest, job, data))
        if not reason:
            break
        following = _before(decision, newest, boxing) if decision.goes_on else None
        if following is None:
            raise ConfigError(f"checkpoint.resume: {reason}")
        logger.warning("skipped a checkpoint: %s", reason)
        newest = following
    start = _start(open_checkpoint(newest), decision, data)
    logger.info("goes on after step %d, from %s", start.step, newest)
    return start


def _restored(path: Path, job: Job, data: DataFacts) -> str:
    """Why this rank could not restore the job from there; "" if it has."""
    try:
        checkpoint = open_checkpoint(path)
        saved = saved_set(checkpoint)
        relation = data.relation(saved)
        if relation == "other":
            raise CheckpointError(
                f"{path}: was trained on the set {saved['path']}, whose ids are of another "
                f"vocabulary than those of {data.path}; use that set, or one that was grown from "
                "it (sbpflow prepare --like OLD --grow)"
            )
        check_loop(checkpoint) if relation == "grown" else check_start(checkpoint)
        job.restore(checkpoint, grown=relation == "grown")
    except CheckpointError as error:
        return str(error)
    return ""


def _first(boxing: Boxing, reason: str) -> str:
    """The first reason that a rank has; "" if none has one."""
    if boxing.world.size == 1:
        return reason
    return next(
        filter(None, (one["reason"] for one in gather_facts(boxing, {"reason": reason}))), ""
    )


def _before(decision: Decision, newest: Path, boxing: Boxing) -> Path | None:
    """The good checkpoint before ``newest``, which rank 0 looks for."""
    step, found = step_of(newest), ""
    if boxing.world.rank == 0:
        good = good_checkpoints(decision.folder, run=decision.run)
        found = next((str(one.path) for one in good if one.step < step), "")
    if boxing.world.size > 1:
        found = gather_facts(boxing, {"path": found})[0]["path"]
    return Path(found) if found else None


def _start(checkpoint: Checkpoint, decision: Decision, data: DataFacts) -> Start:
    documents, step = checkpoint.documents, checkpoint.step
    if data.relation(documents["data"]) == "grown":
        return Start(step=step, steps_of_before=step, loop=documents["loop"])
    cursor = documents["cursor"]
    return Start(
        step=step,
        epoch=cursor["epoch"],
        steps_of_before=documents["steps_of_before"],
        cursor=cursor,
        loop=documents["loop"],
        going_on=(step, documents["metrics_bytes"]) if decision.goes_on else None,
        best=documents["best"] if decision.goes_on else None,
    )

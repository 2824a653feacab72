"""Decides whether a run resumes, and from which checkpoint; rank 0 decides for all ranks.

An unfinished run resumes if every key that affects results has the same value. If values differ,
the command fails and lists the differences. A run that started from another run's checkpoint
(``checkpoint.resume: PATH``) also resumes if the same command is repeated. Checkpoints of a
finished run are moved aside.
"""

import logging
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from sbpflow.boxing.agreement import gather_values, run_on_all_ranks
from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.commands import checkpoint_folder
from sbpflow.checkpoint.folder import (
    DATA_FOLDER,
    checked,
    good_checkpoints,
    list_checkpoints,
    step_folder,
    step_of,
    tidy,
)
from sbpflow.checkpoint.format import digest_of
from sbpflow.checkpoint.read import Checkpoint, open_checkpoint
from sbpflow.checkpoint.run_file import RUN_FILE, RunFacts, read_run
from sbpflow.config.load import config_facts
from sbpflow.config.renamed import current_key
from sbpflow.config.schema import Config
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.run.execution.job import Job
from sbpflow.run.saved.saved_documents import check_loop, check_start, saved_set
from sbpflow.runtime.files.file_lock import HeldError, hold
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath, any_path
from sbpflow.runtime.files.run_folder import CHECKPOINTS_FOLDER, LOCK_FILE, RunLock, set_aside
from sbpflow.training.saving import Position

logger = logging.getLogger(__name__)

# Keys of run.json in addition to those of the configuration. ``_START``, the digest of the
# checkpoint from which the run started, is absent if the run started from scratch.
_SET, _START = "the set in data.path", "the checkpoint in checkpoint.resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Digests of a prepared set's files, rows, vocabulary, and dense transforms. ``ancestors`` are
    the vocabulary digests of the sets that this set was grown from.
    """

    path: str
    fingerprint: str
    content_id: str
    vocabulary_digest: str | None = None
    transforms_digest: str | None = None
    ancestors: tuple[str, ...] = ()

    def relation(self, saved: Mapping[str, Any]) -> str:
        """Return "same", "grown" or "other" for this set compared with the ``saved`` set. The same
        rows in different files are "same". Different rows with the same vocabulary are "grown",
        because ids keep their meaning.
        """
        if self.content_id == saved.get("content_id") or self.fingerprint == saved.get(
            "fingerprint"
        ):
            return "same"
        digest = saved.get("vocabulary_digest")
        known = digest is not None and digest in (self.vocabulary_digest, *self.ancestors)
        return "grown" if known else "other"

    def has_transforms_of(self, saved: Mapping[str, Any]) -> bool:
        """Return False if dense values in the ``saved`` set have other transforms or constants. If
        an earlier version saved the set, this is unknown, and the result is True.
        """
        digest = saved.get("transforms_digest")
        return digest is None or digest == self.transforms_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Describes how a run starts; ``newest`` is the first checkpoint to try, or None for a fresh
    run.

    ``run`` is the run's ID. If ``resumes``, ``run`` is the ID of the saved run, and new output is
    appended to its files. Otherwise the run is new, but may start from another run's checkpoint,
    whose digest is ``start``.
    """

    folder: AnyPath
    run: str
    newest: AnyPath | None = None
    resumes: bool = False
    start: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Position):
    """The position at which a run starts.

    ``cursor`` is the loader's position, and ``batches_left`` counts the batches of ``epoch`` after
    it. If the run resumes on the same set, ``going_on`` is the step and the length of
    metrics.jsonl.
    """

    cursor: Mapping[str, int | str] | None = None
    going_on: tuple[int, int] | None = None


class Read(Protocol):
    """The interface of a loader that can resume, such as ``data.read.loader.RowLoader``."""

    @property
    def num_steps_left(self) -> int:
        """Return the number of batches from the current position to the end of the epoch."""
        ...

    def state_after(self, batch: Any) -> dict[str, int | str]:  # noqa: ANN401 (of the loader)
        """Return the loader's position after ``batch``."""
        ...

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue reading from a saved position."""
        ...


@dataclass(frozen=True, slots=True)
class Resumed:
    """A decision, the resulting start, and the set that the run reads."""

    decision: Decision
    start: Start
    data: DataFacts


def checkpoint_dir(config: Config) -> AnyPath:
    """Return the folder of a run's checkpoints without creating it. Raises ConfigError as
    ``given_folder`` does.
    """
    return given_folder(config) or config.run.dir / CHECKPOINTS_FOLDER


def given_folder(config: Config) -> AnyPath | None:
    """Return ``checkpoint.dir``, or None if it is not given or is the default folder, which belongs
    to ``run.dir`` and is moved with the other files of an earlier run.

    Raises ConfigError for a folder that a new run would move aside together with its lock.
    """
    folder, run_dir = config.checkpoint.dir, config.run.dir.resolve()
    if not isinstance(folder, Path):
        return folder
    default = run_dir / CHECKPOINTS_FOLDER
    # Either of the two folders may be a symbolic link.
    places = (folder.resolve(), folder.parent.resolve() / folder.name)
    if default in places:
        return None
    if run_dir in places or any(default in place.parents for place in places):
        raise ConfigError(
            f"checkpoint.dir: {folder} must not be run.dir itself or a folder inside "
            f"{CHECKPOINTS_FOLDER}/ in run.dir; omit checkpoint.dir, or use, for example, "
            f"checkpoint.dir={config.run.dir / CHECKPOINTS_FOLDER}"
        )
    return folder


def relevant_facts(config: Config, data: DataFacts, start: str = "") -> dict[str, str]:
    """Return the keys and values that affect results, including the set's identity and ``start``,
    the digest of the checkpoint from which the run started, if any.
    """
    scores_matter = config.train.stop is not None or config.train.plateau is not None
    facts = config_facts(config, ("results", "scores") if scores_matter else ("results",))
    return {**facts, _SET: data.content_id[:16], **({_START: start} if start else {})}


def decide(config: Config, data: DataFacts, boxing: Boxing) -> Decision:
    """Decide how the run starts, with the same result on all ranks, and move older checkpoints
    aside.

    Every rank must call this function. Raises ConfigError on every rank if the user must decide.
    """
    folder = checkpoint_dir(config)
    decision = Decision(folder=folder, run="")

    def decide_on_rank_0() -> Decision:
        if boxing.world.rank:
            return decision
        try:
            return _decide(config, data, folder)
        except CheckpointError as error:
            raise ConfigError(f"checkpoint.resume: {error}") from error

    decision = run_on_all_ranks(boxing, decide_on_rank_0)
    newest = None if decision.newest is None else str(decision.newest)
    mine = (decision.run, newest, decision.resumes, decision.start)
    run, newest, resumes, start = gather_values(boxing, mine)[0]
    path = None if newest is None else any_path(newest)
    if path is not None:
        check_copies(path, boxing)
    return Decision(folder=folder, run=run, newest=path, resumes=resumes, start=start)


def check_copies(path: AnyPath, boxing: Boxing) -> None:
    """Raise ConfigError on every rank if some ranks do not see rank 0's checkpoint at ``path``,
    naming these ranks. Machines can have different files at the same local path.
    """
    if boxing.world.size == 1:
        return
    digest = ""
    with suppress(CheckpointError):
        digest = digest_of(open_checkpoint(path).index)
    first, *others = gather_values(boxing, digest)
    if blind := [rank for rank, each in enumerate(others, 1) if each != first]:
        raise ConfigError(
            f"checkpoint.resume: on ranks {blind}, {path} is not the checkpoint that rank 0 uses; "
            "use a folder that all machines share, or copy the checkpoint to all machines"
        )


def _decide(config: Config, data: DataFacts, folder: AnyPath) -> Decision:
    _restore_replaced(config, folder)
    resume = config.checkpoint.resume
    new_run = Decision(folder=folder, run=uuid.uuid4().hex[:12])
    if resume not in ("auto", "never"):
        return _decide_from(_checkpoint_at(any_path(resume)), config, data, new_run)
    saved = read_run(folder) if resume == "auto" else None
    if not config.checkpoint.every:
        is_moved = isinstance(folder, Path) and list_checkpoints(folder)
        if saved is not None and saved.status != "finished" and is_moved:
            raise ConfigError(
                f"checkpoint.every is 0, but {folder} contains checkpoints of an unfinished run, "
                "which a run without checkpoints would move aside; use checkpoint.resume=never to "
                "move them aside, or another run.dir"
            )
        saved = None
    elif resume == "auto" and saved is None:
        _check_no_checkpoints(folder)
    if saved is None or saved.status == "finished":
        _move_aside(config)
        return new_run
    newest = next(good_checkpoints(folder, run=saved.run), None)
    if newest is None and not list_checkpoints(folder):
        _move_aside(config)  # the earlier run ended before its first checkpoint
        return new_run
    _check_same(saved.facts, config, data, folder)
    if newest is None:
        raise ConfigError(
            f"checkpoint.resume: no checkpoint in {folder} is usable (see the warnings above); use "
            "checkpoint.resume=never to move the checkpoints aside and start from scratch, or "
            "another run.dir (or checkpoint.dir)"
        )
    return _continued(folder, saved, newest)


def _restore_replaced(config: Config, folder: AnyPath) -> None:
    """Restore checkpoints in a local folder whose replacement was interrupted."""
    if not isinstance(folder, Path) or not folder.is_dir():
        return
    with ExitStack() as opened:
        if given_folder(config) is None:  # else ``lock_given_folder`` has locked the folder
            opened.callback(RunLock(folder, rank=0, key="checkpoint.dir").close)
        tidy(folder)


def _continued(folder: AnyPath, saved: RunFacts, newest: Checkpoint) -> Decision:
    """Return the decision to continue the saved run from its newest checkpoint."""
    start = saved.facts.get(_START, "")
    return Decision(folder=folder, run=saved.run, newest=newest.path, resumes=True, start=start)


def _decide_from(given: Checkpoint, config: Config, data: DataFacts, new_run: Decision) -> Decision:
    """Start a new run from the checkpoint ``given``, or continue the unfinished run that an earlier
    start of the same command has left in ``checkpoint.dir``.
    """
    folder, start = new_run.folder, digest_of(given.index)
    if given.path.parent.resolve() == folder.resolve():
        raise ConfigError(
            f"checkpoint.resume: {given.path} is in checkpoint.dir ({folder}), whose checkpoints "
            "a new run would move aside; use checkpoint.resume=auto to continue the earlier "
            "run, or another run.dir (or checkpoint.dir) to start a new run from this "
            "checkpoint"
        )
    if given.path.parent.resolve() == (config.run.dir / CHECKPOINTS_FOLDER).resolve():
        raise ConfigError(
            f"checkpoint.resume: {given.path} is in run.dir, whose files a new run moves to "
            "previous-N, so the command could not be repeated; use another run.dir, such as "
            f"run.dir={config.run.dir}-2"
        )
    saved = read_run(folder) if config.checkpoint.every else None
    if saved is not None and saved.status == "training":
        newest = next(good_checkpoints(folder, run=saved.run), None)
        differences = _differences(saved.facts, config, data)
        if saved.facts.get(_START) != start:
            differences.append(f"it did not start from {given.path} in its present state")
        if newest is not None and not differences:
            return _continued(folder, saved, newest)
        logger.warning(
            "the unfinished run in %s is not resumed but moved aside: %s",
            folder,
            "; ".join(differences) or "it has no usable checkpoint",
        )
    _move_aside(config)
    return replace(new_run, newest=given.path, start=start)


def _check_no_checkpoints(folder: AnyPath) -> None:
    """Raise ConfigError if the folder has checkpoints but no run.json to identify their run."""
    if checkpoints := list_checkpoints(folder):
        raise ConfigError(
            f"checkpoint.resume is auto, but {folder} contains checkpoints without {RUN_FILE}, "
            "which identifies their run; restore that file; or use another run.dir (or "
            f"checkpoint.dir) with checkpoint.resume={checkpoints[0]} to start from the newest "
            "checkpoint; or use checkpoint.resume=never to move the checkpoints aside and start "
            "from scratch"
        )


def _checkpoint_at(path: AnyPath) -> Checkpoint:
    """Return the checkpoint at ``path``, or the newest good one in the folder ``path``, which may
    be a run folder.
    """
    folder = checkpoint_folder(path)
    # ``path`` itself may be a checkpoint whose replacement was interrupted.
    is_replaced = isinstance(path, Path) and (path.parent / f".replaced-{path.name}").exists()
    place = path.parent if is_replaced else folder
    if isinstance(place, Path) and any(place.glob(".replaced-step-*")):
        # Restore a checkpoint whose replacement was interrupted, unless a run is using the folder
        # or the folder is read-only.
        with suppress(HeldError, OSError), hold(place / LOCK_FILE):
            tidy(place)
    if not list_checkpoints(folder):
        return checked(path)
    for checkpoint in good_checkpoints(folder):
        return checkpoint
    raise CheckpointError(f"{path} contains no usable checkpoint (see the warnings above)")


def _differences(saved: Mapping[str, str], config: Config, data: DataFacts) -> list[str]:
    """Return the settings that affect results and differ from those of the saved run."""
    current = relevant_facts(config, data)
    saved = {current_key(key): value for key, value in saved.items() if key != _START}
    if saved.get(_SET) == data.fingerprint[:16]:  # earlier versions saved the set's fingerprint
        saved = {**saved, _SET: current[_SET]}
    return [
        f"{key} was {saved.get(key, 'not given')} and is now {current.get(key, 'not given')}"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key) != current.get(key)
    ]


def _check_same(saved: Mapping[str, str], config: Config, data: DataFacts, folder: AnyPath) -> None:
    if differences := _differences(saved, config, data):
        raise ConfigError(
            f"checkpoint.resume: the unfinished run in {folder} has different settings: "
            f"{'; '.join(differences)}. Restore these values to resume the run; or, to start from "
            "scratch, use checkpoint.resume=never, which moves that run aside, or another "
            "run.dir (or checkpoint.dir)"
        )


def _move_aside(config: Config) -> None:
    """Move another run's files in checkpoint.dir aside; ``training/report.py`` does the same in
    run.dir. At a URL, nothing can be moved, so a run that would save there is refused.
    """
    folder = checkpoint_dir(config)
    if isinstance(folder, RemotePath):
        if config.checkpoint.every and list_checkpoints(folder):
            raise ConfigError(
                f"checkpoint.dir: {folder} contains checkpoints of an earlier run, and "
                f"sbpflow cannot rename them at a URL; use, for example, checkpoint.dir={folder}-2"
                ", or remove these checkpoints"
            )
        return
    if not folder.is_dir() or given_folder(config) is None:
        return
    names = [path.name for path in list_checkpoints(folder)]
    aside = set_aside(folder, [*names, RUN_FILE, DATA_FOLDER])
    if aside is not None:
        logger.info("moved the checkpoints of an earlier run from %s to %s", folder, aside)


def load(decision: Decision, job: Job, data: DataFacts, boxing: Boxing) -> Start:
    """Restore the job from the newest checkpoint that every rank can read.

    Every rank must call this function. A resumed run skips checkpoints that are damaged or do not
    fit the job or the set, with a warning. Raises ConfigError on every rank if no checkpoint is
    usable or, for a new run, if the given one is not.
    """
    newest = decision.newest
    if newest is None:
        return Start()
    while reason := _first(boxing, _restore(newest, job, data)):
        previous = _previous(decision, newest, boxing) if decision.resumes else None
        if previous is None:
            raise ConfigError(f"checkpoint.resume: {reason}")
        logger.warning("skipped an unusable checkpoint: %s", reason)
        newest = previous
    start = _start(open_checkpoint(newest), decision, data)
    anew = "" if start.cursor else f", at the first row of {data.path}"
    logger.info("resuming after step %d from %s%s", start.step, newest, anew)
    return start


def _restore(path: AnyPath, job: Job, data: DataFacts) -> str:
    """Restore the job; return "" on success, or the reason for a failure on this rank."""
    try:
        checkpoint = open_checkpoint(path)
        saved = saved_set(checkpoint)
        relation = data.relation(saved)
        if relation == "other":
            raise CheckpointError(
                f"{path} was trained on the set {saved['path']}, whose vocabulary differs from "
                f"that of {data.path}; use the training set, or a set that was grown from it "
                "(sbpflow prepare --like OLD --grow), or, for a set with keys, convert the "
                "checkpoint first (sbpflow checkpoint to-keys)"
            )
        if relation == "grown" and not data.has_transforms_of(saved):
            raise CheckpointError(
                f"{path} was trained on the set {saved['path']}, whose dense columns have other "
                f"transforms or constants than those of {data.path}, so the same number would mean "
                "something else to the model; prepare the rows with `sbpflow prepare --like "
                f"{saved['path']}`"
            )
        check_loop(checkpoint) if relation == "grown" else check_start(checkpoint)
        job.restore(checkpoint, grown=relation == "grown")
    except CheckpointError as error:
        return str(error)
    return ""


def _first(boxing: Boxing, text: str) -> str:
    """Return, on every rank, the first non-empty text in rank order, or "" if all are empty."""
    return next(filter(None, gather_values(boxing, text)), "")


def _previous(decision: Decision, newest: AnyPath, boxing: Boxing) -> AnyPath | None:
    """Return the newest good checkpoint before ``newest``, as found by rank 0."""
    path = ""
    if boxing.world.rank == 0:
        good = good_checkpoints(decision.folder, run=decision.run)
        path = next((str(each.path) for each in good if each.step < step_of(newest)), "")
    path = _first(boxing, path)
    return any_path(path) if path else None


def _start(checkpoint: Checkpoint, decision: Decision, data: DataFacts) -> Start:
    documents, step = checkpoint.documents, checkpoint.step
    loop = dict(documents["loop"])
    if not decision.resumes:  # resets early stopping, but keeps the learning-rate factor
        loop.pop("stop", None)
        if "plateau" in loop:
            loop["plateau"] = {**loop["plateau"], "value": None, "step": 0, "waited": 0}
    best = loop.get("best", {}).get("step")
    if best and not (decision.resumes and step_folder(decision.folder, best).is_dir()):
        del loop["best"]
        if decision.resumes:
            logger.warning(
                "step-%d, the best checkpoint so far, is missing, so no best score is known", best
            )
    if data.relation(documents["data"]) == "grown":
        return Start(step=step, steps_of_before=step, loop=loop)
    cursor = documents["cursor"]
    return Start(
        step=step,
        epoch=cursor["epoch"],
        steps_of_before=documents["steps_of_before"],
        cursor=cursor,
        loop=loop,
        going_on=(step, documents["metrics_bytes"]) if decision.resumes else None,
    )


def at_cursor(start: Start, config: Config, read: Read) -> Start:
    """Move ``read`` to the position of ``start``, and return the start with the number of batches
    that are left.

    A new run with another seed or order of rows starts at the first row.
    """
    if start.cursor is None:
        return start
    order = {"seed": config.run.seed, "shuffle": config.data.shuffle}
    if start.going_on is None and any(start.cursor.get(key) != order[key] for key in order):
        logger.info("the order of rows differs from the checkpoint's; starting at the first row")
        return replace(start, epoch=0, steps_of_before=start.step, cursor=None)
    read.load_state_dict(start.cursor)
    return replace(start, batches_left=read.num_steps_left)

"""Decides when a run is saved, which documents it saves, and which checkpoints are kept."""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sbpflow.boxing.agreement import gather_values, run_on_all_ranks
from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.folder import Claim, checked, keep_only, step_folder, tidy
from sbpflow.checkpoint.format import Index, Previous, digest_of
from sbpflow.checkpoint.run_file import RunFacts, write_run
from sbpflow.config.checks import writable_folder
from sbpflow.config.metrics import Metric
from sbpflow.config.parse import plain
from sbpflow.config.schema import Config
from sbpflow.errors import CheckpointError, ConfigError, SbpError
from sbpflow.run.execution.job import Job
from sbpflow.run.execution.predict import on_rank_0
from sbpflow.run.planning.plan_file import plan_to_json
from sbpflow.run.saved.coordinated_stop import CoordinatedStop
from sbpflow.run.saved.resume import Read, Resumed, given_folder, relevant_facts
from sbpflow.run.saved.save import Saver
from sbpflow.run.saved.saved_model import load_values
from sbpflow.runtime.compute.versions import summary as version_summary
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath
from sbpflow.runtime.files.run_folder import RunLock
from sbpflow.runtime.processes.graceful_shutdown import (
    GracefulInterrupt,
    GracefulShutdown,
    watch_signals,
)
from sbpflow.training.batch import Batch
from sbpflow.training.dense_state import dense_state


class Checkpoints:
    """Saves a run according to ``config.checkpoint``; ``training/saving.py`` documents the methods.
    Every rank creates an instance. ``read`` is the loader of the train split. ``metrics_bytes``
    returns the current length of metrics.jsonl. ``keep_set`` copies the set's metadata to a folder.
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        read: Read,
        *,
        resumed: Resumed,
        metrics_bytes: Callable[[], int],
        keep_set: Callable[[AnyPath], None],
    ) -> None:
        decision, self.start, data = resumed.decision, resumed.start, resumed.data
        self._config, self._job, self._read = config, job, read
        self._data, self._metrics_bytes = data, metrics_bytes
        self._world = job.boxing.world
        self.best_metric: Metric | None = config.best_metric
        self._saver: Saver | None = None
        self._signals: GracefulShutdown | GracefulInterrupt | None = None
        self._stop: CoordinatedStop | None = None
        self.stops, self._last_saved = False, self.start.step
        self._lock: RunLock | Claim | None = None
        self._known: dict[str, Index] = {}  # indexes of checkpoints that later ones may continue
        if not config.checkpoint.every:
            return
        if config.checkpoint.deltas and config.parallel.cuda_graph is True:
            raise ConfigError(
                "checkpoint.deltas does not work with parallel.cuda_graph, because a graph cannot "
                "mark changed rows; use checkpoint.deltas=0 or parallel.cuda_graph=false"
            )
        # checked now, because the first save may be hours away
        run_on_all_ranks(job.boxing, lambda: _check_state(job))
        folder = run_on_all_ranks(job.boxing, lambda: _folder(decision.folder))
        check_shared(folder, job.boxing)
        facts = relevant_facts(config, data, decision.start)
        self._facts = RunFacts(run=decision.run, facts=facts, status="training")
        self._lock = run_on_all_ranks(job.boxing, lambda: _lock(config, folder, self._world.rank))

        def prepare() -> None:
            tidy(folder)
            keep_set(folder)
            write_run(folder, self._facts)

        on_rank_0(job.boxing, prepare)  # ``keep_set`` may download or upload vocabularies
        self._saver = Saver(
            folder,
            job.boxing,
            job.state,
            run=decision.run,
            deadline_s=config.parallel.timeout_s,
            stores=job.embeddings.stores,
            num_deltas=config.checkpoint.deltas,
            previous=_continued(folder, resumed),
            may_publish=self._lock.check if isinstance(self._lock, Claim) else lambda: None,
        )
        if {"save": True, "end": False}[config.checkpoint.on_signal]:
            self._signals = watch_signals()
        if self._signals is not None:
            timeout_s = config.parallel.timeout_s
            self._stop = CoordinatedStop(self._signals, self._world, timeout_s=timeout_s)

    def load_weights(self, step: int) -> None:
        if self._saver is None:
            raise RuntimeError(f"load_weights({step}): nothing is saved")
        saver = self._saver
        saver.wait()

        def load() -> None:
            try:
                load_values(self._job, checked(step_folder(saver.folder, step)))
            except CheckpointError as error:
                raise ConfigError(
                    f"{error}. This checkpoint contains the best weights of the run. To evaluate "
                    "the last weights instead, remove the checkpoint and run the same command again"
                ) from error

        run_on_all_ranks(self._job.boxing, load)

    def is_due(self, step: int, *, last: bool, best: bool) -> bool:
        if self._saver is None:
            return False
        self._saver.check()
        self.stops = self._stop is not None and self._stop.after(step)
        return last or best or self.stops or step % self._config.checkpoint.every == 0

    def save(self, step: int, batch: Batch, loop: Mapping[str, Any]) -> None:
        if self._saver is None:
            return
        self._last_saved = step
        self._job.trainer.settle()
        documents, best = self._documents(batch, loop), loop.get("best", {}).get("step")
        if self._config.checkpoint.background and not self.stops:
            self._saver.start(step, documents, lambda: self._prune(step, best))
        else:
            self._saver.save(step, documents)
            self._prune(step, best)

    def leave(self) -> None:
        if self._stop is None or self._saver is None:
            raise RuntimeError("this run did not receive a stop signal")
        path, given = step_folder(self._saver.folder, self._last_saved), self._config.checkpoint
        how = (
            "the same command resumes"
            if given.resume != "never"
            else "with checkpoint.resume=auto (now never), the same command resumes"
        )
        self._stop.leave(f"step {self._last_saved} is saved in {path}; {how} the run from it")

    def _prune(self, step: int, best: int | None) -> None:
        if self._saver is not None and self._world.rank == 0:
            keep = self._config.checkpoint.keep
            folder, known = self._saver.folder, self._known
            keep_only(folder, newest=keep, step=step, and_step=best, known=known)

    def finished(self) -> None:
        """Mark the run as finished, so that it is not resumed automatically."""
        self._end_signals()
        if self._saver is not None:
            self._saver.wait()
        if self._saver is not None and self._world.rank == 0:
            write_run(self._saver.folder, replace(self._facts, status="finished"))
        self.close()

    def close(self) -> None:
        """Restore the previous signal handlers, wait for any save in progress, and unlock the
        folder.
        """
        self._end_signals()
        if self._saver is not None:
            self._saver.wait()
            self._saver.close()
        if isinstance(self._lock, RunLock):
            self._lock.close()

    def _end_signals(self) -> None:
        signals, self._signals = self._signals, None
        if signals is not None:
            signals.end()

    def _documents(self, batch: Batch, loop: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's documents; {} on all ranks except rank 0, which writes them."""
        if self._world.rank:
            return {}
        names = ("path", "fingerprint", "content_id", "vocabulary_digest", "transforms_digest")
        return {
            "config": plain(self._config),
            "plan": json.loads(plan_to_json(self._job.plan)),
            "data": {name: getattr(self._data, name) for name in names},
            "cursor": self._read.state_after(batch),
            "steps_of_before": self.start.steps_of_before,
            "loop": dict(loop),
            "metrics_bytes": self._metrics_bytes(),
            "world_size": self._world.size,
            "versions": version_summary(),
        }


def _continued(folder: AnyPath, resumed: Resumed) -> Previous | None:
    """Return the base of the first delta, which is the checkpoint that the run resumed from, or
    None for a new run.
    """
    if not resumed.decision.resumes or not resumed.start.step:
        return None
    checkpoint = checked(step_folder(folder, resumed.start.step))
    digest, number = digest_of(checkpoint.index), checkpoint.chain_length
    return Previous(step=checkpoint.step, sha256=digest, number=number)


def lock_given_folder(config: Config, boxing: Boxing) -> RunLock | None:
    """Lock ``checkpoint.dir`` if it is a local folder other than the default, before files of an
    earlier run are read or moved. Raises ConfigError on every rank if another run has locked it.

    ``lock_run_folder`` protects the default folder until the files in ``run.dir`` are moved.
    """
    if not isinstance(config.checkpoint.dir, Path):
        return None
    rank = boxing.world.rank

    def lock() -> RunLock | None:
        folder = given_folder(config)
        if not isinstance(folder, Path):
            return None
        if config.checkpoint.every:
            return RunLock(_writable(folder), rank=rank, key="checkpoint.dir")
        exists = rank == 0 and folder.is_dir()
        return RunLock(folder, rank=rank, key="checkpoint.dir") if exists else None

    return run_on_all_ranks(boxing, lock)


def _check_state(job: Job) -> None:
    """Raise ConfigError if this rank's part of a dense parameter or buffer cannot be saved."""
    try:
        dense_state(job.model.parameters, job.model.buffers, None)
    except SbpError as error:
        raise ConfigError(f"parallel.dense: {error}, or checkpoint.every: 0") from error


def _folder(folder: AnyPath) -> AnyPath:
    return folder if isinstance(folder, RemotePath) else _writable(folder)


def _writable(folder: Path) -> Path:
    return writable_folder("checkpoint.dir", folder, "checkpoint.dir=runs/train/checkpoints")


def _lock(config: Config, folder: AnyPath, rank: int) -> RunLock | Claim | None:
    """On rank 0, lock the default folder, or claim a folder in an object store.
    ``lock_given_folder`` has already locked any other local folder.
    """
    if not isinstance(folder, RemotePath):
        if given_folder(config) is not None:
            return None
        return RunLock(folder, rank=rank, key="checkpoint.dir")
    try:
        return Claim(folder) if rank == 0 else None
    except OSError as error:
        raise ConfigError(
            f"checkpoint.dir: {error}; use a URL that you can write to, or a local folder"
        ) from error


def check_shared(folder: AnyPath, boxing: Boxing) -> None:
    """If some ranks do not see rank 0's folder, raise ConfigError on every rank, naming these
    ranks.

    Rank 0 writes a random number to a file in the folder, and the others read the number.
    """
    if boxing.world.size == 1:
        return
    file, number = folder / ".seen-by-all", uuid.uuid4().hex
    if boxing.world.rank == 0:
        file.write_bytes(number.encode())
    written = gather_values(boxing, number)[0]
    try:
        seen = file.read_bytes() == written.encode()
    except OSError:
        seen = False
    everyone = gather_values(boxing, seen)
    if boxing.world.rank == 0:
        file.unlink(missing_ok=True)
    if blind := [rank for rank, sees in enumerate(everyone) if not sees]:
        raise ConfigError(
            f"checkpoint.dir: on ranks {blind}, {folder} is not the folder that rank 0 uses; use "
            "a folder that all machines share, such as checkpoint.dir=/shared/runs/train, or "
            "checkpoint.every=0 to save nothing"
        )

"""Saves a job as a checkpoint in a run folder, with a copy of the set's manifest and
vocabularies.
"""

import json
import shutil
from pathlib import Path

from sbpflow.config.parse import plain
from sbpflow.config.schema import Config
from sbpflow.run.execution.job import Job
from sbpflow.run.planning.plan_file import plan_to_json
from sbpflow.run.saved.save import Saver


def save_job(folder: Path, job: Job, config: Config, step: int) -> Path:
    """Write ``checkpoints/step-N`` and ``checkpoints/data`` in ``folder``; called on every rank."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    if config.data.path is not None and job.boxing.world.rank == 0:
        copy_set(config.data.path, checkpoints / "data")
    saver = Saver(checkpoints, job.boxing, job.state, run="test", deadline_s=60)
    documents = {"config": plain(config), "plan": json.loads(plan_to_json(job.plan))}
    return saver.save(step, documents)


def copy_set(source: Path, target: Path) -> None:
    """Copy the manifest and vocabularies without the rows."""
    if target.exists():
        return
    target.mkdir()
    shutil.copy(source / "manifest.json", target)
    if (source / "vocabulary").exists():
        shutil.copytree(source / "vocabulary", target / "vocabulary")

"""Saves a one-rank job as a checkpoint in a run folder, with the run's copy of its set."""

import json
import shutil
from pathlib import Path

from sbpflow.checkpoint.folder import partial_folder, publish
from sbpflow.checkpoint.format import Index, SavedTensor, whole_of
from sbpflow.checkpoint.write import Part, write_parts
from sbpflow.config.parse import plain
from sbpflow.config.schema import Config
from sbpflow.data import load_manifest
from sbpflow.run.execution.job import Job
from sbpflow.run.planning.plan_file import plan_to_json


def save_job(folder: Path, job: Job, config: Config, step: int) -> Path:
    """Write ``folder/checkpoints/step-N`` and ``folder/checkpoints/data``."""
    checkpoints = folder / "checkpoints"
    partial = partial_folder(checkpoints, step, "ab")
    partial.mkdir(parents=True)
    state = job.state()
    parts = [
        Part(name=name, place=whole_of(tensor.shape), values=tensor.rectangles[0].values)
        for name, tensor in state.items()
    ]
    pieces = write_parts(partial / "rank-0.bin", parts)
    tensors = {
        name: SavedTensor(
            shape=state[name].shape, dtype=state[name].rectangles[0].values.dtype, pieces=(piece,)
        )
        for name, piece in pieces
    }
    if config.data.path is not None:
        copy_set(config.data.path, checkpoints / "data")
    return publish(
        checkpoints,
        partial,
        Index(
            step=step,
            run="test",
            tensors=tensors,
            files={"rank-0.bin": (partial / "rank-0.bin").stat().st_size},
            documents={"config": plain(config), "plan": json.loads(plan_to_json(job.plan))},
        ),
    )


def copy_set(source: Path, target: Path) -> None:
    """Copy the manifest and vocabularies without the rows."""
    if target.exists():
        return
    target.mkdir()
    shutil.copy(source / "manifest.json", target)
    if load_manifest(source).vocabulary_digest is not None:
        shutil.copytree(source / "vocabulary", target / "vocabulary")

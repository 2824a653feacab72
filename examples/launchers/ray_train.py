"""Train on a Ray cluster: python ray_train.py --workers N --config FILE key=value ...

Ray starts the workers, creates their torch process group, and restarts all of them after a failure;
the run then resumes from its last checkpoint. ``run.dir``, ``checkpoint.dir`` and ``data.path``
must be absolute paths on a disk that all machines share. ``--check FOLDER`` runs ``sbpflow doctor``
on the workers instead. Needs ``ray[default]`` and ``ray[train]``.
"""

import argparse
import os
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_worker(job: dict) -> None:
    """Train, or check the machines, as one rank in the process group that Ray has created."""
    if job["check"]:
        from sbpflow.commands.doctor import doctor

        doctor(["--dir", job["check"]])
        return
    from sbpflow.commands.train import run_rank

    run_rank(job["config"], job["overrides"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, required=True, help="number of ranks")
    parser.add_argument("--gpus", action="store_true", help="give each rank one GPU")
    parser.add_argument("--cpus", type=float, default=1, help="CPU cores of each rank")
    parser.add_argument("--max-failures", type=int, default=3, help="number of restarts")
    parser.add_argument("--config", type=Path, required=True, help="YAML file on the shared disk")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="run sbpflow doctor instead")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={
            "config": str(args.config.absolute()),
            "overrides": args.overrides,
            "check": str(args.check.absolute()) if args.check else "",
        },
        scaling_config=ScalingConfig(
            num_workers=args.workers,
            use_gpu=args.gpus,
            resources_per_worker={"CPU": args.cpus, **({"GPU": 1} if args.gpus else {})},
        ),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if args.gpus else "gloo"),
        run_config=RunConfig(
            # for Ray's own records; sbpflow writes its checkpoints itself
            storage_path=os.path.abspath(os.environ.get("RAY_RESULTS", "runs/ray")),
            failure_config=FailureConfig(max_failures=args.max_failures),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()

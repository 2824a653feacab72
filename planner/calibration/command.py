"""Implements ``sbpflow calibrate`` on each rank."""

import logging
import math
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch

from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.rules.registry import import_rule, rule_class
from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.calibrate import QUICK, Settings
from sbpflow.planner.calibration.calibrate import calibrate as run
from sbpflow.planner.costs.profile import Profile, default_path, write_profile
from sbpflow.runtime.processes.environment import env_int
from sbpflow.runtime.ranks.world import World

LOG = logging.getLogger(__name__)
_EQUAL = ("seconds", "rounds", "optimizer", "seed", "quick")  # must be the same on all machines


def run_calibration(args: Namespace) -> str:
    """Calibrate as one of the launched ranks; return the text that rank 0 prints."""
    settings = _settings(args)
    if torch.get_num_threads() > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    facts = {f"--{key}": str(getattr(args, key)) for key in _EQUAL}
    with World.start(args.device, facts=facts) as world:
        path = args.output or default_path(world.device.type)
        boxing = Boxing(world)
        profile = run(boxing, settings, path.with_suffix(".measured.jsonl"))
        save_on_all_hosts(boxing, profile, path)
    return "" if profile is None else f"{describe(profile)}\nprofile: {path}"


def save_on_all_hosts(boxing: Boxing, profile: Profile | None, path: Path) -> None:
    """Write rank 0's profile, if there is one, to ``path`` on every host; the first rank of each
    host writes the file.

    Every host needs the same profile, because in later runs each host plans from its own file, and
    all hosts must compute the same plan.
    """
    text = gather_values(boxing, "" if profile is None else profile.as_json())[0]
    if text and boxing.world.rank in [host[0] for host in boxing.world.topology.hosts]:
        write_profile(path, text)


def _settings(args: Namespace) -> Settings:
    settings = QUICK if args.quick else Settings()
    if ":" in args.optimizer:
        import_rule("--optimizer", args.optimizer)
    rule_class(args.optimizer)
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        raise ConfigError(
            f"--seconds must be above 0 and finite, got {args.seconds}; for example, --seconds 270"
        )
    rounds = settings.rounds if args.rounds is None else args.rounds
    if rounds < 1:
        raise ConfigError(f"--rounds must be 1 or more, got {rounds}; for example, --rounds 2")
    size = env_int("WORLD_SIZE", 1)
    if args.ranks not in (None, size):
        raise ConfigError(
            f"--ranks is {args.ranks}, but another launcher has started {size} (WORLD_SIZE); omit "
            "--ranks, or start the command without that launcher"
        )
    if args.output is not None and (args.output.is_dir() or not args.output.name):
        raise ConfigError(
            f"--output: {args.output} is a folder; use a file, such as --output profile.json"
        )
    seconds = settings.seconds if args.seconds is None else args.seconds
    return replace(
        settings, optimizer=args.optimizer, seed=args.seed, seconds=seconds, rounds=rounds
    )


def default_ranks(device: str) -> int:
    """Return how many ranks to start by default: one per GPU, or two on CPU."""
    return (0 if device == "cpu" else torch.cuda.device_count()) or 2


def describe(profile: Profile) -> str:
    """Format a profile's origin and prediction errors as text."""
    lines = [f"{key:<22} {value}" for key, value in profile.about.items()]
    lines += [f"{'source of ' + key:<22} {value}" for key, value in profile.sources.items()]
    factor = profile.run_factor
    lines.append(f"{'training runs':<22} {len(profile.runs)}, all prices times {factor:.3g}")
    for key, value in profile.errors.items():
        lines.append(f"held out: {key:<28} {value:.3f}")
    if profile.world_size > 1:
        link = profile.link
        rate, ms = link.within_gb_per_s, link.within_call_ms
        if link.ranks_per_node:  # only the links between hosts were measured
            rate, ms = link.between_gb_per_s, link.between_call_ms
        lines.append(f"{'link':<22} {rate:.3g} GB/s per rank, {ms:.3g} ms per call")
    return "\n".join(lines)

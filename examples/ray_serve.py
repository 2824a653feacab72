"""Serves a bundle under Ray Serve: replicas on several machines, with sbpflow's paths and metrics.

    pip install 'ray[serve]' 'sbpflow[serve]'
    SBPFLOW_BUNDLE=out/model serve run examples.ray_serve:app

Every replica memory-maps the bundle and loads its deltas, so the folder must exist on all machines.
Ray routes requests, and restarts and scales replicas. Each replica serves its own /metrics.
"""

import os
from pathlib import Path

from ray import serve

from sbpflow.serving.app import App
from sbpflow.serving.server import asgi_app


def build() -> App:
    """Load the bundle inside the replica, because the loaded application cannot be pickled."""
    return asgi_app({"model": Path(os.environ["SBPFLOW_BUNDLE"])})


app = serve.deployment(
    num_replicas=2,
    ray_actor_options={
        "num_cpus": 1,
        "runtime_env": {"env_vars": {"SBPFLOW_BUNDLE": os.environ.get("SBPFLOW_BUNDLE", "")}},
    },
)(serve.ingress(build)()).bind()

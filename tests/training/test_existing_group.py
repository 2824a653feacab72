"""Tests runs in a program that has created torch's process group already, as Ray's workers do."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.deadlines import output_of

ROOT = Path(__file__).parents[2]

TWO_RUNS_IN_A_GROUP = """
import sys
import torch.distributed as dist
from sbpflow.commands.train import run_rank
rank, folder, data = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
words = [f"data.path={data}", "data.batch_size=64", "model.hidden=[8]", "train.max_steps=3"]
for run in ("a", "b"):
    run_rank("configs/scheme3.yaml", [*words, f"run.dir={folder}/{run}"])
assert dist.is_initialized() and dist.get_world_size() == 2
if rank == 1:
    words.append("run.seed=8")
try:
    run_rank("configs/scheme3.yaml", [*words, f"run.dir={folder}/c"])
except ValueError as error:
    print(error)
dist.destroy_process_group()
"""


def test_runs_use_the_process_group_that_a_program_has_created(synth_set, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(TWO_RUNS_IN_A_GROUP)
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path), str(synth_set)],
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    outputs = [output_of(process, 120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert all("rank 1 differs from rank 0 (run.seed: " in output for output in outputs), outputs
    results = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in "ab"]
    losses = [[json.loads(line).get("loss") for line in lines] for lines in results]
    assert losses[0] == losses[1]

"""Tests what the first step of a run on CPU imports."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from sbpflow.runtime.ranks.world import World
from tests.training.wdl_case import make_config, train

with World.start("cpu") as world:
    for dense in ("sgd", "adam", "adamw"):
        config = make_config("2", "rowwise_adagrad", dense=dense, dtype="float32", kernel="auto")
        train(world, config, 2)
late = ("sympy", "torch._dynamo", "torch._inductor", "fbgemm_gpu")
print([name for name in late if name in sys.modules])
"""


def test_a_run_on_cpu_imports_neither_the_compiler_of_torch_nor_fbgemm():
    """Importing them would take two seconds of each rank's CPU time."""
    words = [sys.executable, "-c", CODE]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"

"""``make gpu``: its parts run in rehearsal, survive one another, and need what a bare box has."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_ranks

ROOT = Path(__file__).resolve().parents[2]
# A CUDA box has torch, numpy, yaml, tqdm, pytest, triton, and hypothesis perhaps.
ABSENT = (
    "nvidia",
    "fbgemm_gpu",
    "polars",
    "pyarrow",
    "numba",
    "torchrec",
    "matplotlib",
    "hypothesis",
)
BARE = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def on_a_bare_box(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE + code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_everything_imports_on_a_bare_box():
    modules = [path.stem for path in (ROOT / "benchmarks").glob("gpu*.py")]
    assert len(modules) >= 6
    names = [f"benchmarks.{name}" for name in modules] + [
        path.removesuffix(".py").replace("/", ".") for path in gpu.GPU_TESTS
    ]
    done = on_a_bare_box(f"import importlib\nfor name in {names!r}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_what_lacks_is_said_in_a_line_each():
    done = on_a_bare_box(
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name.split('.')[0] in {ABSENT!r} "
        "else real(name)\n"
        "from benchmarks import gpu\n"
        "fatal, absent = gpu.shortcomings()\n"
        "print(*absent, sep='\\n')"
    )
    assert done.returncode == 0, done.stderr
    for name in ("hypothesis", "fbgemm_gpu", "nvidia.dali", "polars", "torchrec"):
        assert sum(line.startswith(f"{name} is absent: ") for line in done.stdout.splitlines()) == 1


def test_without_a_device_it_ends_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "make gpu needs a CUDA device" in capsys.readouterr().err


def test_parts_survive_the_failure_of_others():
    fails = {"collective": "exit code 1", "mlp": "not done after 1 s"}
    ran, lines = [], []

    def run(part, limit_s):
        ran.append(part.name)
        return part.name not in fails, fails.get(part.name, "")

    parts = [part for part in gpu.PARTS if not part.needs]
    ok = gpu.run_parts(parts, lambda **line: lines.append(line), limit_s=1000, run=run)
    assert not ok
    assert ran == [p.name for p in parts if p.after != "collective"]
    by_name = {line["part"]: line for line in lines}
    assert list(by_name) == [part.name for part in parts]
    assert by_name["mlp"]["why"] == "not done after 1 s"
    assert by_name["nccl tests"]["why"] == "left out: collective failed"
    assert by_name["nccl tests"]["passed"] is None
    assert by_name["overlap"]["passed"] is None
    assert by_name["trace"]["passed"] is True


def test_a_part_that_hangs_is_ended_and_one_that_fails_is_told():
    hangs = gpu.Part("hangs", ("-c", "import time; time.sleep(60)"), 0.5)
    assert gpu.run_part(hangs, 0.5) == (False, "not done after 0 s")
    assert gpu.run_part(gpu.Part("fails", ("-c", "exit(3)"), 9), 9) == (False, "exit code 3")
    assert gpu.run_part(gpu.Part("works", ("-c", ""), 9), 9) == (True, "")


def test_parts_do_not_outlast_the_whole():
    lines = []
    gpu.run_parts(gpu.PARTS[:1], lambda **line: lines.append(line), limit_s=5, run=pytest.fail)
    assert lines[0]["why"] == "left out: 5 s are over"


@pytest.mark.parametrize("part", gpu.PARTS, ids=lambda part: part.name)
def test_the_arguments_of_a_part_are_taken(part, monkeypatch):
    if part.command[1] == "pytest":
        files = [word for word in part.command if word.startswith("tests/")]
        assert files
        assert all((ROOT / file).is_file() for file in files)
    else:
        flag, module, *words = part.command
        assert flag == "-m"
        monkeypatch.setattr(sys, "argv", [module, *words, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
        assert ended.value.code == 0
        if part.command[1] == "benchmarks.gpu_ranks":
            assert gpu_ranks.parse(list(part.command[2:])).what == part.command[2]


SMALL = ["data.batch_size=64", "model.hidden=[8, 8]", "model.embedding_dim=4"]


def benchmarks_of_one_rank(world, folder):
    from benchmarks import gpu_dlperf, gpu_kernels, gpu_mlp, gpu_trace
    from models.registry import MODELS
    from sbpflow.config.load import load_config

    gpu_kernels.import_fbgemm = lambda: None  # its kernels cannot be rehearsed
    # Nor can events of a device: torch would tell each of thousands with a stack of C++.
    profile = gpu_trace.profile
    gpu_trace.profile = lambda activities: profile(activities=activities[:1])
    config = load_config("configs/dlperf.yaml", ["parallel.device=cuda", *SMALL], models=MODELS)
    gpu_dlperf.WARM_UP, gpu_dlperf.STEPS, gpu_dlperf.REPEATS = 1, 2, 1
    made = {"dlperf": gpu_dlperf.measure(2600, config, world)}
    made["kernels"] = [
        line
        for rule in ("rowwise_adagrad", "ftrl")
        for line in gpu_kernels.measure(rule, ids=64, rows=90, device=world.device, steps=1)
    ]
    made["trace"] = gpu_trace.trace(2600, config, world, Path(folder) / "trace.json")
    for precision in gpu_mlp.PRECISIONS:
        made[precision] = gpu_mlp.measure(
            precision,
            batch_size=8,
            device=world.device,
            widths=(5, 4, 1),
            compile=False,
            graph=False,
            steps=1,
        )
    return made


def test_benchmarks_of_one_rank_run(rehearsed_ranks, tmp_path):
    (made,) = rehearsed_ranks(1, benchmarks_of_one_rank, str(tmp_path))
    assert made["dlperf"]["step_ms"] > 0
    assert {line["kernel"] for line in made["kernels"]} >= {"torch"}
    assert (tmp_path / "trace.json").stat().st_size > 0
    assert all(made[precision]["ms"] > 0 for precision in ("float32", "tf32", "bfloat16"))


def benchmarks_of_ranks(world):
    from models.registry import MODELS
    from sbpflow.config.load import load_config

    config = load_config("configs/dlperf.yaml", ["parallel.device=cuda", *SMALL], models=MODELS)
    world.checked = False
    return gpu_ranks.collective(world), gpu_ranks.overlap(world, 2600, config)


def test_benchmarks_of_several_ranks_run(rehearsed_ranks):
    for small, overlap in rehearsed_ranks(2, benchmarks_of_ranks):
        assert small["first_all_reduce_s"] > 0
        assert overlap["overlap"].startswith("hides ")

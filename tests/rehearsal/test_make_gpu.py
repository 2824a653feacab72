"""Tests that the parts of ``make gpu`` run in the rehearsal, are independent, and need no optional
packages.
"""

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_ranks

ROOT = Path(__file__).resolve().parents[2]
# What a CUDA machine has: torch, numpy, yaml, tqdm, pytest, triton, and perhaps hypothesis.
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


def test_everything_imports_without_optional_packages():
    modules = [path.stem for path in (ROOT / "benchmarks").glob("gpu*.py")]
    assert len(modules) >= 7
    names = [f"benchmarks.{name}" for name in modules] + [
        path.removesuffix(".py").replace("/", ".") for path in gpu.GPU_TESTS
    ]
    done = on_a_bare_box(f"import importlib\nfor name in {names!r}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_missing_packages_are_reported_one_per_line():
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


def test_missing_device_ends_with_a_message(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "make gpu needs a CUDA device" in capsys.readouterr().err


def test_parts_continue_after_the_failure_of_others():
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
    assert by_name["nccl tests"]["why"] == "skipped: collective failed"
    assert by_name["nccl tests"]["passed"] is None
    assert by_name["overlap"]["passed"] is None
    assert by_name["trace"]["passed"] is True


def test_a_hanging_part_is_killed_and_a_failing_part_is_reported():
    hangs = gpu.Part("hangs", ("-c", "import time; time.sleep(60)"), 0.5)
    assert gpu.run_part(hangs, 0.5) == (False, "not finished after 0 s")
    assert gpu.run_part(gpu.Part("fails", ("-c", "exit(3)"), 9), 9) == (False, "exit code 3")
    assert gpu.run_part(gpu.Part("works", ("-c", ""), 9), 9) == (True, "")


def test_no_part_starts_after_the_total_time_limit():
    lines = []
    gpu.run_parts(gpu.PARTS[:1], lambda **line: lines.append(line), limit_s=5, run=pytest.fail)
    assert lines[0]["why"] == (
        f"skipped: less than {gpu.LEAST_S:.0f} s remain of the total time limit of 5 s"
    )


@pytest.mark.parametrize("part", gpu.PARTS, ids=lambda part: part.name)
def test_arguments_of_a_part_are_accepted(part, monkeypatch):
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


TINY = ["data.batch_size=8", "model.hidden=[8]", "model.embedding_dim=4"]
SMALL = ["data.batch_size=64", "model.hidden=[8, 8]", "model.embedding_dim=4"]


def whole_programs(world, folder):
    """Run the modules of ``make gpu`` as commands, with less work; return their records."""
    from benchmarks import gpu_dlperf, gpu_kernels, gpu_mlp, gpu_tables, gpu_trace, record

    def timed(work, **_):
        work()
        return {"ms": 1.0, "min_ms": 1.0, "max_ms": 1.0}

    record.RESULTS = gpu_trace.RESULTS = Path(folder)
    gpu_kernels.import_fbgemm = lambda: None  # FBGEMM's kernels cannot be rehearsed
    # Device events cannot be rehearsed either; torch would print thousands of C++ stack traces.
    profile = gpu_trace.profile
    gpu_trace.profile = lambda activities: profile(activities=activities[:1])
    for module in (gpu_dlperf, gpu_kernels, gpu_mlp, gpu_tables):
        module.timed_ms = timed
    gpu_mlp.WIDTHS, gpu_dlperf.FIRST_ROWS, gpu_dlperf.WARM_UP = (5, 4, 1), 2600, 4
    commands = {
        gpu_dlperf: ["--max-rows", "5200", "parallel.cuda_graph=false", *SMALL],
        gpu_mlp: ["--batch-size", "8", "--no-compile"],
        gpu_kernels: ["--ids", "64", "--rows", "90"],
        gpu_trace: ["--rows", "2600", *SMALL],
        gpu_tables: ["--rows", "83200", "--only", *gpu_tables.SETTINGS, "--", *TINY],
    }
    gpu_tables.Results = lambda name, recorded: record.Results(name)
    gpu_tables.WARM_UP, gpu_tables.STEPS, gpu_tables.REPEATS = 6, 1, 2
    graph = ["--max-rows", "2600", *SMALL]
    for module, words in [*commands.items(), (gpu_dlperf, graph)]:
        sys.argv = [module.__name__, *words]
        module.main()
    return {path.name: path.read_text() for path in Path(folder).glob("*.jsonl")}


def test_programs_of_make_gpu_run(rehearsed_ranks, tmp_path):
    pytest.importorskip("numba", reason="growing tables need numba")
    (files,) = rehearsed_ranks(1, whole_programs, str(tmp_path))
    lines = [json.loads(line) for line in files["gpu_dlperf.jsonl"].splitlines()]
    assert [(line["benchmark"], line["rows"]) for line in lines] == [
        ("dlperf_vocabulary", 2600),
        ("dlperf_vocabulary", 5200),
        ("dlperf_vocabulary_cuda_graph", 2600),
    ]
    assert all(line["device"] and line["versions"] for line in lines)
    assert (tmp_path / "gpu_trace.json").exists()
    tables = [json.loads(line) for line in files["gpu_tables.jsonl"].splitlines()]
    assert [line["tables"] for line in tables] == ["device", "cached", "small", "growing"]
    assert tables[1]["fetched"] > 0


@pytest.mark.slow
def test_torchrec_benchmark_uses_equal_shapes():
    """On CPU, the benchmark uses the host's clock and a different optimizer, because FBGEMM does
    not support Adam there.
    """
    pytest.importorskip("torchrec")
    from benchmarks import gpu_torchrec
    from sbpflow.config.load import load_config
    from sbpflow.models.registry import MODELS
    from sbpflow.runtime.ranks.world import World

    def timed(step, **_):
        return {"ms": float(step())}

    rule = "optimizer.sparse={name: sgd}"
    config = load_config(
        "configs/dlperf.yaml", ["parallel.device=cpu", rule, *SMALL], models=MODELS
    )
    with World.start("cpu") as world:
        assert gpu_torchrec.check(2600, config, world) < 1e-4
        half = replace(config, model=replace(config.model, autocast="bf16"))
        for each in (config, half):
            found = gpu_torchrec.measure(2600, each, world, timed=timed)
            for name in ("sbpflow", *gpu_torchrec.PEERS):
                assert 0 < found[f"{name}_ms"] < 2


def benchmarks_of_ranks(world):
    from sbpflow.config.load import load_config
    from sbpflow.models.registry import MODELS

    config = load_config("configs/dlperf.yaml", ["parallel.device=cuda", *SMALL], models=MODELS)
    world.checked = False
    return gpu_ranks.collective(world), gpu_ranks.overlap(world, 2600, config)


@pytest.mark.slow
def test_benchmarks_of_several_ranks_run(rehearsed_ranks):
    for small, overlap in rehearsed_ranks(2, benchmarks_of_ranks):
        assert small["first_all_reduce_s"] > 0
        assert overlap["overlap"].startswith("saves ")

"""Tests examples/launchers/slurm.sh on a real Slurm with two nodes on this machine."""

import json
import re
import sys
from pathlib import Path

import pytest

from sbpflow.commands import train
from tests.launch.slurm_cluster import Slurm, needs_slurm, slurm_cluster

pytestmark = [pytest.mark.slow, needs_slurm]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "launchers" / "slurm.sh"
CONFIG = ROOT / "configs" / "scheme3.yaml"
STEPS, END_S = 600, 240.0


def words(data: Path, run: Path) -> list[str]:
    return [
        *("--config", str(CONFIG), f"data.path={data}", f"run.dir={run}"),
        *("data.batch_size=100", "model.hidden=[16]", "parallel.dtype=float64"),
        *("train.epochs=1000", f"train.max_steps={STEPS}", "train.eval_every=0"),
        *("train.log_every=1", "checkpoint.every=200", "data.loader=memmap"),
        *("parallel.timeout_s=60", "parallel.kernel=torch"),
    ]


def losses(run: Path) -> list[float]:
    """Return the loss of each step; every step must be reported once."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    return [event["loss"] for event in steps]


@pytest.fixture
def slurm(tmp_path):
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm_cluster(folder) as cluster:
        yield cluster


def submit(
    slurm: Slurm, arguments: list[str], short_s: int, nodes: str = "1-2", **settings: str
) -> tuple[str, Path]:
    out = slurm.folder / "job.out"
    settings |= {"PYTHON": sys.executable, "SHORT_S": str(short_s), "PYTHONPATH": str(ROOT)}
    slurm.env |= settings
    options = ["--parsable", f"--nodes={nodes}", f"--output={out}"]
    return slurm("sbatch", *options, str(SCRIPT), *arguments), out


def test_a_stopped_job_is_queued_again_and_resumes_on_other_numbers_of_nodes(
    slurm, synth_set, tmp_path
):
    run, expected = tmp_path / "run", tmp_path / "expected"
    job, out = submit(slurm, words(synth_set, run), short_s=1)
    nodes = [2]
    for start, new_state in enumerate(("drain", "resume")):

        def trained(steps: int = 100 * (start + 1)) -> bool:
            return len(losses(run)) > steps

        slurm.wait(trained, END_S, "the job did not train")
        slurm("scontrol", "update", "nodename=n2", f"state={new_state}", "reason=test")
        before = out.read_text().count("queued again")
        slurm("scancel", "--signal=TERM", job)  # what Slurm's --signal does before the time limit

        def queued(before: int = before) -> bool:
            return out.read_text().count("queued again") > before and slurm.state(job) == "PENDING"

        slurm.wait(queued, END_S, "the job was not queued again")
        assert out.read_text().count("stopped by SIGTERM") >= start + 1
        slurm("scontrol", "update", f"jobid={job}", "starttime=now+5")  # instead of after 2 minutes
        nodes.append(2 if new_state == "resume" else 1)
    slurm.wait(
        lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), END_S, "no end"
    )
    text = out.read_text()
    assert slurm.state(job) == "COMPLETED", text
    starts = [line for line in text.splitlines() if line.startswith("job ") and "ranks on" in line]
    assert [int(line.split()[2]) for line in starts] == nodes
    assert text.count("resuming after step") == 2
    train.main(words(synth_set, expected))
    assert losses(run) == pytest.approx(losses(expected), rel=0, abs=1e-9)


def test_a_mistake_and_a_cancelled_job_are_not_queued_again(slurm, synth_set, tmp_path):
    run = tmp_path / "run"
    job, out = submit(slurm, [*words(synth_set, run), "train.log_evry=1"], short_s=1000)
    slurm.wait(lambda: slurm.state(job) == "FAILED", END_S, "the mistake did not end the job")
    assert out.read_text().count("train.log_evry") == 2  # both nodes report the error
    assert "not queued again" in out.read_text()
    out.unlink()
    job, out = submit(slurm, words(synth_set, run), short_s=1)
    slurm.wait(lambda: len(losses(run)) > 50, END_S, "the job did not train")
    slurm("scancel", job)
    slurm.wait(lambda: slurm.state(job) == "CANCELLED", END_S, "the job was not cancelled")
    slurm.wait(lambda: "stopped by SIGTERM" in out.read_text(), END_S, "the ranks did not save")
    assert "queued again" not in out.read_text()


def test_the_script_also_checks_the_nodes_and_starts_several_ranks_on_each(slurm, tmp_path):
    settings = {"PROGRAM": "-m sbpflow doctor", "RANKS_PER_NODE": "2"}
    job, out = submit(slurm, ["--dir", str(tmp_path)], 1000, "2", **settings)
    slurm.wait(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), END_S, "doctor did not end")
    text = out.read_text()
    assert slurm.state(job) == "COMPLETED", text
    assert "2 nodes (n[1-2]), 2 ranks on each" in text
    assert re.search("ok +link +4 ranks", text)

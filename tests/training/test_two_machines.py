"""Tests training on two machines under examples/supervise.sh, with a cut link, a killed machine,
and a slow link.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deadlines import Deadline
from tests.launch.machines import ROOT, Machine, needs_namespaces, two_machines

pytestmark = [needs_namespaces, pytest.mark.slow]

STEPS = 400
LINK_TIMEOUT_S = 8
END_S = 120  # time limit in seconds; a job's own waits are shorter than 60 s
CONFIG = ROOT / "configs" / "scheme3.yaml"


class Job:
    """Runs the same command in the restart loops of two machines that share a disk."""

    def __init__(self, machines: tuple[Machine, Machine], data: Path, folder: Path) -> None:
        self.machines, self.data, self.folder = machines, data, folder
        for machine in machines:
            self.start(machine)

    def start(self, machine: Machine) -> None:
        words = [
            *("train_wdl.py", "--config", str(CONFIG), f"data.path={self.data}"),
            *(f"run.dir={self.folder / 'run'}", "data.batch_size=100", "model.hidden=[16]"),
            *("train.epochs=1000", f"train.max_steps={STEPS}", "train.eval_every=0"),
            *("train.log_every=1", "checkpoint.every=20", "data.loader=memmap"),
            *(f"parallel.timeout_s={LINK_TIMEOUT_S}", "parallel.kernel=torch"),
        ]
        machine.supervise(words, self.folder / f"log{machine.number}", STUCK_S="10")

    def step(self) -> int:
        """Return the newest reported step."""
        lines = self._events()
        return max((line["step"] for line in lines if line["event"] == "step"), default=0)

    def _events(self) -> list[dict]:
        path = self.folder / "run" / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = Deadline(END_S)
        while not done():
            assert not deadline.over(), f"{what}; {self.output()[-4000:]}"
            time.sleep(0.2)

    def finish(self) -> list[float]:
        """Check that both loops succeeded and every step was reported once; return the loss of
        every step."""
        self.wait(
            lambda: all(machine.process is not None and machine.process.poll() is not None
                        for machine in self.machines),
            "the loops did not end",
        )  # fmt: skip
        assert [machine.process.returncode for machine in self.machines] == [0, 0], self.output()
        steps = [line for line in self._events() if line["event"] == "step"]
        assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
        return [line["loss"] for line in steps]

    def output(self) -> str:
        return "\n".join(
            f"--- machine {machine.number}\n{(self.folder / f'log{machine.number}').read_text()}"
            for machine in self.machines
        )


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


@pytest.fixture(scope="module")
def undisturbed(synth_set: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of an undisturbed run."""
    with two_machines() as both:
        return Job(both, synth_set, tmp_path_factory.mktemp("undisturbed")).finish()


@pytest.mark.parametrize("fault", ["cut", "killed", "slow"])
def test_supervised_jobs_on_two_machines_resume(machines, synth_set, tmp_path, undisturbed, fault):
    job = Job(machines, synth_set, tmp_path)
    job.wait(lambda: job.step() >= 60, "it did not start")
    if fault == "cut":
        machines[1].pull_cable()
        job.wait(lambda: job.output().count("supervise: ended with code") >= 2, "they did not end")
        assert job.output().count("died or stopped responding") >= 2
        machines[1].plug_in()
    elif fault == "killed":  # another machine will run the same command
        machines[1].kill()
        job.wait(lambda: "supervise: ended with code" in job.output(), "the other did not end")
        assert "died or stopped responding" in job.output()
        job.start(machines[1])
    else:
        machines[0].slow_down("2mbit")
        time.sleep(3)
        machines[0].slow_down("1gbit")
    assert job.finish() == undisturbed
    restarts = job.output().count("restarting in")
    assert restarts == 0 if fault == "slow" else restarts >= 1

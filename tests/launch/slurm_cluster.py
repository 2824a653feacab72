"""Starts a real Slurm on this machine: one controller and several node daemons; needs root."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deadlines import Deadline

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
NODES = ("n1", "n2")

needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(name) is None for name in ("slurmctld", "slurmd")),
    reason="a Slurm cluster needs root and the programs slurmctld and slurmd",
)

CONF = """
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,requeue_delay=1
SelectType=select/linear
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=60
MinJobAge=600
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Runs Slurm's commands against the cluster in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __call__(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            list(words), env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        words = self("scontrol", "show", "job", job).split()
        return next(word for word in words if word.startswith("JobState=")).removeprefix(
            "JobState="
        )

    def wait(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline = Deadline(limit_s)
        while not done():
            assert not deadline.over(), f"{what}\n{self.logs()}"
            time.sleep(0.5)

    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-4000:]}" for f in files)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _munge_key(folder: Path) -> list[str]:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    names = {"--socket": "munge.socket", "--pid-file": "munge.pid", "--log-file": "munge.log"}
    options = [f"{option}={folder / name}" for option, name in names.items()]
    return [f"--key-file={key}", f"--seed-file={folder / 'munge.seed'}", *options]


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Run munged, slurmctld, and two slurmd, and stop them at the end."""
    host = socket.gethostname()
    (folder / "state").mkdir()
    folder.chmod(0o755)
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, ports=_free_ports(3)))
    slurm, processes = Slurm(folder), list[subprocess.Popen[bytes]]()

    def start(*words: str) -> None:
        with (folder / f"{Path(words[0]).name}-{len(processes)}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(list(words), env=slurm.env, stdout=log, stderr=log, cwd="/")
            )

    try:
        start("munged", "--foreground", "--force", *_munge_key(folder))
        slurm.wait((folder / "munge.socket").exists, START_S, "munged did not start")
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)

        def idle() -> bool:
            return slurm("sinfo", "-h", "-t", "idle", "-o", "%D", check=False) == "2"

        slurm.wait(idle, START_S, "the nodes did not start")
        yield slurm
    finally:
        slurm("scancel", "--user", "root", check=False)
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

"""Checks the structure of the launcher files; test_slurm.py and test_ray.py run two of them."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "launchers"
PAGE = ROOT / "docs" / "launchers.md"


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_empty(each) for key, each in value.items() if each is not None}
    return [without_empty(each) for each in value] if isinstance(value, list) else value


def check(model: str, content: dict[str, Any]) -> None:
    """Parse with Kubeflow's generated model, which drops unknown fields and rejects wrong types."""
    api = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the extra dev")
    parsed = getattr(api, model).from_dict(content)
    assert without_empty(parsed.to_dict()) == content


def arguments(words: list[str]) -> None:
    """Check that a command trains, with its configuration and all folders on the shared disk."""
    assert words[0] == "torchrun"
    assert words[1].endswith("/train_wdl.py")
    assert words[2] == "--config"
    keys = {word.partition("=")[0] for word in words[4:]}
    assert keys == {"data.path", "run.dir", "checkpoint.dir"}
    assert all("/shared/" in word for word in words[3:])


def test_the_trainjob_has_the_fields_of_its_crd():
    job = read("trainjob.yaml")
    check("TrainerV1alpha1TrainJob", job)
    trainer = job["spec"]["trainer"]
    arguments([*trainer["command"], *trainer["args"]])
    replicated = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    (node,) = replicated["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert (node["name"], pod["containers"][0]["name"]) == ("node", "node")
    assert pod["terminationGracePeriodSeconds"] >= 60


def test_a_field_that_is_not_in_the_crd_is_detected():
    job = read("trainjob.yaml")
    job["spec"]["trainer"]["numNode"] = 2
    with pytest.raises(AssertionError):
        check("TrainerV1alpha1TrainJob", job)


# Fields in the API reference of Kubeflow's Training Operator, v1 (PyTorchJobSpec, ReplicaSpec,
# ...).
PYTORCH_JOB = {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
RUN_POLICY = {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy"}
RUN_POLICY |= {"schedulingPolicy", "suspend", "ttlSecondsAfterFinished"}
REPLICA = {"replicas", "restartPolicy", "template"}


def test_the_pytorchjob_has_the_fields_of_its_crd():
    job = read("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert set(spec) <= PYTORCH_JOB
    assert type(spec["nprocPerNode"]) is str
    assert set(spec["runPolicy"]) <= RUN_POLICY
    assert set(spec["pytorchReplicaSpecs"]) == {"Master", "Worker"}
    for replica in spec["pytorchReplicaSpecs"].values():
        assert set(replica) == REPLICA
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        arguments(container["command"])
        check("IoK8sApiCoreV1PodTemplateSpec", replica["template"])


# Keys in SkyPilot's YAML reference.
TASK = {"name", "num_nodes", "workdir", "resources", "envs", "volumes", "setup", "run"}


def test_the_skypilot_task_is_complete():
    task = read("skypilot.yaml")
    assert set(task) == TASK
    assert type(task["num_nodes"]) is int
    assert all(type(value) is str for value in task["envs"].values())
    subprocess.run(["bash", "-n", "-c", task["run"]], check=True)
    assert "--local-addr" in task["run"], "a node's own name may resolve to localhost"


def test_the_shell_script_parses():
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], check=True)


def test_the_page_names_every_launcher():
    text = PAGE.read_text()
    assert all(f"examples/launchers/{path.name}" in text for path in FOLDER.iterdir())

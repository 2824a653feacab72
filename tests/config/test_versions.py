"""Tests pairs of torch and fbgemm builds: which pairs are compatible, and the messages and doctor
reports for other pairs.
"""

import importlib
import sys

import pytest

from sbpflow.errors import ConfigError
from sbpflow.run.execution.kernel_checks import kernel_checks
from sbpflow.runtime.compute import doctor, versions
from sbpflow.runtime.compute.versions import Installed, check_pair, import_fbgemm, install_command

KERNEL_CHECKS = kernel_checks()


@pytest.fixture
def installed(monkeypatch):
    """Return a function that makes package metadata report the given versions."""

    def pretend(**by_name: str) -> None:
        names = {name.replace("_", "-"): version for name, version in by_name.items()}
        monkeypatch.setattr(versions, "dist_version", names.get)

    return pretend


@pytest.mark.parametrize("torch", ["2.11.0", "2.12.1+cu130", "2.13.0+cpu"])
def test_pairs_that_fit(torch):
    fbgemm = {"2.11": "1.6.0", "2.12": "1.7.0", "2.13": "1.8.1"}[versions.minor(torch)]
    check_pair(Installed(torch, fbgemm, "fbgemm-gpu"))


@pytest.mark.parametrize(
    ("torch", "fbgemm", "dist", "command"),
    [
        ("2.13.0+cpu", "1.9.0", "fbgemm-gpu-cpu", "torch==2.13.0 fbgemm-gpu-cpu==1.8.0"),
        ("2.11.1", "1.8.0", "fbgemm-gpu", "torch==2.11.1 fbgemm-gpu==1.6.0"),
        ("2.14.0", "1.8.0", "fbgemm-gpu", "torch==2.13.0 fbgemm-gpu==1.8.0"),
    ],
)
def test_a_mismatch_names_both_versions_and_the_install_command(torch, fbgemm, dist, command):
    with pytest.raises(ConfigError) as caught:
        check_pair(Installed(torch, fbgemm, dist))
    for part in (f"torch {torch}", f"{dist} {fbgemm}", f"pip install {command}", "=torch"):
        assert part in str(caught.value)


def test_fbgemm_may_be_absent(installed):
    installed(torch="2.13.0")
    assert import_fbgemm() is None


def test_two_builds_of_fbgemm_are_refused(installed):
    installed(torch="2.13.0", fbgemm_gpu="1.8.0", fbgemm_gpu_cpu="1.8.0")
    with pytest.raises(ConfigError, match="pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu"):
        import_fbgemm()


@pytest.mark.parametrize(
    "error",
    [OSError("fbgemm_gpu_py.so: undefined symbol: _ZN3c10\nmore"), ImportError("no libcudart")],
)
def test_a_build_that_does_not_load_is_reported_with_versions_and_reason(
    installed, monkeypatch, error
):
    def fail(name: str) -> None:
        raise error

    installed(torch="2.13.0+cpu", fbgemm_gpu_cpu="1.8.0")
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigError) as caught:
        import_fbgemm()
    for part in ("torch 2.13.0+cpu and fbgemm-gpu-cpu 1.8.0", str(error).split("\n")[0]):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_torch_the_install_command_names_the_newest_pair():
    assert install_command(None, "fbgemm-gpu") == "pip install torch==2.13.0 fbgemm-gpu==1.8.0"


def test_the_doctor_runs_all_checks(capsys):
    assert doctor.main([], kernel_checks=KERNEL_CHECKS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-2]] == [*doctor.CHECKS, *KERNEL_CHECKS]
    assert lines[-1] == "nothing is broken"


def test_the_doctor_reports_a_mismatch_and_fails(installed, capsys):
    installed(torch="2.13.0+cpu", fbgemm_gpu_cpu="1.9.0")
    assert doctor.main([], kernel_checks=KERNEL_CHECKS) == 1
    output = capsys.readouterr().out
    assert "BROKEN fbgemm" in output
    assert "pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0" in output
    assert output.endswith("broken: fbgemm\n")


def test_a_check_that_raises_does_not_end_the_report(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nvidia", None)
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setattr(doctor, "dist_version", lambda name: "2.1.1")
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "BROKEN dali" in output
    assert "tensorboard" in output.splitlines()[-3]

"""Tests how the CPU is identified."""

from pathlib import Path

import pytest

from sbpflow.runtime.compute import cpu

EPYC = "processor\t: 0\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n"
UNCACHED = cpu.cpu_facts.__wrapped__


def identify(monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    monkeypatch.setattr(Path, "read_text", lambda *_: f"{text}\n{text}")
    monkeypatch.setattr(cpu, "cpu_facts", UNCACHED)
    return cpu.cpu_name()


def test_generations_with_equal_model_names_have_different_names(monkeypatch):
    assert identify(monkeypatch, EPYC.format(25, 17)) == "AMD EPYC, family 25, model 17"
    assert identify(monkeypatch, EPYC.format(26, 2)) == "AMD EPYC, family 26, model 2"
    assert cpu.machine_key().startswith("amd-epyc-family-26-model-2-")


def test_a_cpu_without_a_model_name_has_the_name_from_python(monkeypatch):
    monkeypatch.setattr(cpu.platform, "processor", lambda: "")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    arm = "processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd40\n"
    assert identify(monkeypatch, arm) == "aarch64, part 0xd40"

    def refuse(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert cpu.cpu_facts() == {}
    assert cpu.cpu_name() == "aarch64"

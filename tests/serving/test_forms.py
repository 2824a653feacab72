"""Tests a bundle's optional files, machine code and ONNX, which take the weights as inputs."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sbpflow.errors import ConfigError
from sbpflow.models.dcnv2 import DcnV2Config
from sbpflow.run.export.bundle import BUNDLE_FILES
from sbpflow.serving import scorer
from sbpflow.serving.scorer import BundleError, Version, load
from tests.serving.bundles import config_of, export, make_set, train

MODEL = DcnV2Config(embedding_dim=4, hidden=(7,), cross_rank=2, norm="layer")


def _run(world, folder: Path, prepared: Path) -> None:
    train(world, folder / "run", config_of(prepared, MODEL))


@pytest.fixture(scope="module")
def folder(_cpu_ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    _cpu_ranks(1, _run, folder, make_set(folder))
    return folder


@pytest.mark.slow
def test_a_compiled_part_gives_equal_scores_also_with_changed_weights(folder, monkeypatch):
    export(folder / "run", config_of(folder / "set", MODEL), folder / "compiled", compiled=True)
    text = (folder / "t.csv").read_text()
    plain, fast = (load(folder / "compiled", compiled=compiled) for compiled in (False, True))
    assert plain.dense is not fast.dense
    np.testing.assert_allclose(fast.score(text), plain.score(text), rtol=0, atol=1e-6)
    weight = {"mlp.0.weight": torch.randn(plain.weights["mlp.0.weight"].shape)}
    changed = [model.with_changes({}, weight, Version("test", 6, 1)) for model in (plain, fast)]
    scores = [model.score(text) for model in changed]
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-6)
    assert np.abs(scores[0] - plain.score(text)).max() > 1e-3
    monkeypatch.setattr(scorer, "cpu_features", set)
    with pytest.warns(UserWarning, match=r"dense\.pt2: this CPU lacks .*; the dense part runs un"):
        other = load(folder / "compiled", compiled=True)
    assert other.score(text).tolist() == plain.score(text).tolist()


def test_code_is_loaded_only_if_asked_for(folder, monkeypatch):
    bundle = folder / "asked"
    export(folder / "run", config_of(folder / "set", MODEL), bundle)
    with pytest.raises(BundleError, match=r"dense\.pt2 does not exist; export the run with --c"):
        load(bundle, compiled=True)
    loaded = []
    monkeypatch.setattr(torch._inductor, "aoti_load_package", loaded.append, raising=False)
    (bundle / "dense.pt2").write_bytes(b"code")
    made = {"cpu": [], "torch": torch.__version__.split("+")[0], "weights": [], "inputs": []}
    content = json.loads((bundle / "model.json").read_text())
    (bundle / "model.json").write_text(json.dumps({**content, "compiled": made}))
    load(bundle)
    assert loaded == []
    with pytest.raises(BundleError, match="not callable"):  # the patched loader returns None
        load(bundle, compiled=True)
    assert loaded == [str(bundle / "dense.pt2")]
    shutil.rmtree(bundle)


def test_onnx_needs_a_package(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"--onnx: onnxscript is not installed .*sbpflow\[onnx\]"):
        export(folder / "run", config_of(folder / "set", MODEL), tmp_path / "model", onnx=True)
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_an_onnx_part_computes_the_same_logits(folder, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export(folder / "run", config_of(folder / "set", MODEL), tmp_path / "model", onnx=True)
    assert all(BUNDLE_FILES.fullmatch(path.name) for path in (tmp_path / "model").iterdir())
    model = load(tmp_path / "model")
    seen = {}
    wanted = []

    def record(inputs):
        seen.update({name: value.numpy() for name, value in inputs.items()})
        wanted.append(model.dense(inputs))
        return wanted[0]

    replace(model, dense=record).score((folder / "t.csv").read_text())
    session = runtime.InferenceSession(tmp_path / "model/dense.onnx")
    names = {each.name for each in session.get_inputs()}
    inputs = seen | {f"dense/{name}": value.numpy() for name, value in model.weights.items()}
    (logits,) = session.run(None, {name: v for name, v in inputs.items() if name in names})
    np.testing.assert_allclose(logits.reshape(-1), wanted[0].reshape(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("facts", "features"),
    [
        ({"flags": "fpu sse4_2 avx2 avx512f hypervisor"}, {"sse4_2", "avx2", "avx512f"}),
        ({"Features": "fp asimd sve aes"}, {"asimd", "sve"}),
        ({"model name": "unknown"}, set()),
    ],
)
def test_the_instruction_sets_are_those_of_the_cpu(facts, features, monkeypatch):
    monkeypatch.setattr(scorer, "cpu_facts", lambda: facts)
    assert scorer.cpu_features() == features


def test_without_facts_about_the_cpu_torch_names_its_instruction_sets(monkeypatch):
    monkeypatch.setattr(scorer, "cpu_facts", dict)
    assert scorer.cpu_features() == {torch.backends.cpu.get_cpu_capability()}

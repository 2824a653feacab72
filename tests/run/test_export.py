"""Tests that exported models score as their job does, load with only torch, and support 8- and
16-bit rows.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sbpflow.boxing.executor import Boxing
from sbpflow.config.model_tables import FieldRule
from sbpflow.config.schema import DataConfig
from sbpflow.data import fields_of, load_manifest
from sbpflow.data.__main__ import main
from sbpflow.data.read.crosses import hashed_ids as hashed_by_loader
from sbpflow.data.read.loaders import open_loaders
from sbpflow.embedding.plan.out_of_range import OutOfRange
from sbpflow.errors import ConfigError, DataError, SbpError
from sbpflow.models.dcnv2 import DcnV2Config
from sbpflow.models.deepfm import DeepFmConfig
from sbpflow.models.dlrm import DlrmConfig
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.export.bundle import BundleModel
from sbpflow.run.export.export import (
    encoded_of,
    sample_ids,
    sample_of,
    score_bundle,
    write_export,
)
from sbpflow.run.export.forms import exported
from sbpflow.run.export.plain_model import PlainModel, dense_part, hashed_ids
from sbpflow.run.export.row_formats import ROW_FORMATS, make_rows
from sbpflow.run.model.spec import Fields, IdField, embedding_output
from sbpflow.run.model.torch_model import TorchModel
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.ranks.world import World
from sbpflow.serving.cells import MISSING_KEY
from sbpflow.serving.operations import BundleError
from sbpflow.serving.scorer import load
from sbpflow.training.evaluate import score_split
from sbpflow.training.metrics import evaluate
from tests.data.tables import SCHEMA, SPLIT, table, write_csv
from tests.run.test_torch_model import Model as OwnModel
from tests.run.test_torch_model import with_complex_buffer
from tests.training.wdl_case import FIELDS, make_batches, make_config

ALONE = """
import sys
import torch
model = torch.export.load(sys.argv[1]).module()
assert isinstance(model, torch.nn.Module)
inputs = torch.load(sys.argv[2], weights_only=True)
torch.save([model(*one) for one in inputs], sys.argv[3])
assert not {m.partition(".")[0] for m in sys.modules} & {"sbpflow", "models", "data", "safetensors"}
"""


def values_of(job: Job, name: str) -> Tensor:
    """Return a whole logical tensor of a one-rank job."""
    tensor = job.state()[name]
    (one,) = tensor.rectangles
    return one.values.clone().reshape(tensor.shape)


def trained(world: World, config, fields: Fields, batches) -> tuple[Job, PlainModel]:
    spec, plan = plan_run(config, fields, world_size=1, device_type="cpu")
    job = build_job(config, spec, plan, Boxing(world))
    for batch in batches:
        job.trainer.step(batch)
    return job, plain_of(job, spec, fields)


def plain_of(job: Job, spec, fields: Fields, row_format="as_trained") -> PlainModel:
    return bundle_of(job, spec, fields, row_format).plain({}, in_memory=True)


def bundle_of(job: Job, spec, fields: Fields, row_format="as_trained") -> BundleModel:
    def read(name: str, rows: slice | None = None) -> Tensor:
        return values_of(job, name)[rows or slice(None)]

    embeddings, read_all = job.plan.embeddings, partial(values_of, job)
    return BundleModel(
        plan=embeddings,
        hashed=spec.hashed_columns,
        dense=dense_part(spec, embeddings, read_all, job.state(), 7).eval(),
        num_dense=len(fields.dense),
        read=read,
        row_format=row_format,
    )


def write(folder, job: Job, model: PlainModel, spec, fields: Fields, row_format="as_trained"):
    """Write a bundle for a set without vocabularies, and load the bundle."""
    sample = sample_of(model, sample_ids(model), half=False, rows=None)
    origin = {"run": "test", "step": 7, "delta": 0}
    bundle = bundle_of(job, spec, fields, row_format)
    write_export(folder, bundle, origin, sample, lambda work: None)
    return load(folder)


def _criteo_like(world: World, folder):
    """Return four results, all but the third by batch: how far the plain model's logits are from
    the job's, whether the exported model gives equal logits in a process with only torch, the job's
    values, and whether the bundle's logits are close to the job's.
    """
    config = make_config("1", "adagrad", dtype="float32")
    batches = make_batches(7, 30)
    job, model = trained(world, config, FIELDS, batches)
    inputs = [model.arguments_of(batch.ids, batch.dense) for batch in batches]
    spec, _ = plan_run(config, FIELDS, world_size=1, device_type="cpu")
    bundle = write(folder / "model", job, model, spec, FIELDS)
    served = [bundle.logits(encoded_of(bundle, batch.ids, batch.dense)) for batch in batches]
    equal = [
        torch.allclose(a, job.trainer.predict(b), rtol=0, atol=1e-6)
        for a, b in zip(served, batches, strict=True)
    ]
    torch.export.save(exported(model), folder / "model/model.pt2")
    inputs += [(*(t[:n] for t in inputs[0][:2]), {}) for n in (0, 1)]
    wanted = [model(*one) for one in inputs]
    apart = [
        float((found - job.trainer.predict(batch)).abs().max())
        for found, batch in zip(wanted, batches, strict=False)
    ]
    torch.save(inputs, folder / "inputs")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = ["-c", ALONE, folder / "model/model.pt2", folder / "inputs", folder / "logits"]
    subprocess.run([sys.executable, *map(str, words)], check=True, cwd=folder, env=env)
    got = torch.load(folder / "logits", weights_only=True)
    same = [torch.equal(one, other) for one, other in zip(got, wanted, strict=True)]
    names = {name: values_of(job, name) for name in job.state() if name.count("/") == 1}
    return apart, same, names, equal


@pytest.mark.slow
def test_an_exported_file_gives_the_logits_of_the_job_with_only_torch(ranks, tmp_path):
    ((apart, same, state, equal),) = ranks(1, _criteo_like, tmp_path)
    assert equal == [True] * 7
    assert max(apart) < 1e-6
    assert same == [True] * 9
    stored = load_file(tmp_path / "model/model.safetensors")
    assert set(stored) == set(state)
    assert all(torch.equal(stored[name], state[name]) for name in state)
    content = json.loads((tmp_path / "model/model.json").read_text())
    assert content["origin"] == {"run": "test", "step": 7, "delta": 0}
    assert content["columns"] == {
        "C1": [0, 1], "C2": [1, 2], "C3": [2, 3], "C4": [3, 4], "C1xC2": [4, 5], "C3xC4": [5, 6]
    }  # fmt: skip
    assert content["tables"]["deep.C1"] == {
        "rows": 37, "dim": 5, "features": ["C1"], "pooling": "sum", "stored": "float32",
        "store": 1, "first": 0,
    }  # fmt: skip
    with pytest.raises(BundleError, match="set without vocabularies, so raw rows have no ids"):
        load(tmp_path / "model").score([{}])


def _lists(world: World, folder):
    """Train on lists with and without weights, fixed fields, means and sums. Return how far the
    plain model's logits are from the job's, whether the exported model's logits are the same, and
    how far the bundle's scores are from the job's.
    """
    manifest = load_manifest(folder / "set")
    data = DataConfig(path=folder / "set", batch_size=64, loader="memmap")
    config = replace(make_config("2", "adagrad", dtype="float32"), data=data, model=Pooled())
    loaders = open_loaders(manifest, data, 0, 1, seed=7, device=world.device)
    batches = [batch for batch, _ in zip(loaders["train"].epoch(0), range(4), strict=False)]
    job, model = trained(world, config, fields_of(manifest), batches)
    apart = [
        float((model(*model.arguments_of(b.ids, b.dense)) - job.trainer.predict(b)).abs().max())
        for b in batches
    ]
    torch.export.save(exported(model), folder / "model.pt2")
    loaded = torch.export.load(folder / "model.pt2").module()
    inputs = [model.arguments_of(b.ids, b.dense) for b in batches]
    same = [torch.equal(loaded(*one), model(*one)) for one in inputs]
    ids, dense, bags = inputs[0]  # lengths may be int32 or int64
    longs = {
        name: (values, lengths.long(), *rest) for name, (values, lengths, *rest) in bags.items()
    }
    same.append(torch.equal(loaded(ids, dense, longs), loaded(*inputs[0])))
    spec, _ = plan_run(config, fields_of(manifest), world_size=1, device_type="cpu")
    bundle = write(folder / "model", job, model, spec, fields_of(manifest))
    scored = score_bundle(bundle, loaders["val"].epoch(0))
    wanted = score_split(job.trainer, loaders["val"], job.boxing)
    return apart, same, abs(scored.auc - wanted.auc) + abs(scored.logloss - wanted.logloss)


class Pooled:
    """A model that uses every field of a set twice: in concatenated vectors, and in a sum of mean
    vectors.
    """

    name = "pooled"

    def spec(self, fields: Fields) -> TorchModel:
        deep = embedding_output("all", fields.sparse, dim=3)
        one = embedding_output("summed", fields.sparse, dim=2, combine="sum", pooling="mean")
        width = deep.width + 2 + len(fields.dense)
        return TorchModel(outputs=(deep, one), make=lambda: Joined(width))


class Joined(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(width, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        return self.last(torch.cat([vectors["all"], vectors["summed"], dense], 1))


def test_lists_with_weights_are_pooled_as_in_training(ranks, tmp_path):
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    source = write_csv(tmp_path / "t.csv", table(900))
    words = ["--input", source, "--output", tmp_path / "set", "--schema", tmp_path / "schema.yaml"]
    words += ["--split", SPLIT, "--max-bad-fraction", "0.05"]
    assert main(["prepare", *map(str, words)]) == 0
    ((apart, same, scores),) = ranks(1, _lists, tmp_path)
    assert max(apart) < 1e-6
    assert same == [True] * 5
    assert scores < 1e-6


def _own(world: World, kind: str):
    config = replace(make_config("2", "sgd", dtype="float32"), model=OwnModel(kind=kind))
    fields = Fields.of(["I1", "I2"], {"C1": 37, "C2": 11, "C3": 53})
    batch = make_batches(2, 30)[0]
    batch.ids, batch.dense = batch.ids[:, :3].contiguous(), batch.dense[:, :2].contiguous()
    job, model = trained(world, config, fields, [batch] if kind == "plain" else [])
    logits = model(batch.ids, batch.dense, {})
    return float((logits - job.trainer.predict(batch)).abs().max()), list(model.state_dict())


@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_a_custom_module_can_be_exported(ranks, kind):
    ((apart, names),) = ranks(1, _own, kind)
    assert apart < 1e-6
    assert {"dense.first.weight", "dense.norm.bias", "tables/deep/C1.weight"} <= set(names)


SHIPPED = {
    "dlrm": DlrmConfig(embedding_dim=4, bottom=(6,), top=(7,)),
    "deepfm": DeepFmConfig(embedding_dim=4, hidden=(7,), norm="batch"),
    "dcnv2": DcnV2Config(embedding_dim=4, hidden=(7,), cross_rank=2, structure="stacked"),
    "shared": WdlConfig(
        embedding_dim=4,
        hidden=(7,),
        fields={"C[13]": FieldRule(table="both")},
        wide=WideConfig(crosses=()),
    ),
}


def _shipped(world: World, name: str):
    config = replace(make_config("2", "adagrad", dtype="float32"), model=SHIPPED[name])
    sizes = {"C1": 53, "C2": 11, "C3": 53, "C4": 3}
    alike = {"C1": "both", "C3": "both"}
    columns = (IdField(name=c, rows=n, vocabulary=alike.get(c, "")) for c, n in sizes.items())
    fields = Fields(dense=FIELDS.dense, sparse=tuple(columns))
    batches = make_batches(4, 30)
    for batch in batches:
        batch.ids = batch.ids[:, :4].contiguous()
    job, model = trained(world, config, fields, batches)
    names = {name for name in job.state() if name.count("/") == 1}
    logits = model(*model.arguments_of(batches[0].ids, batches[0].dense))
    program = exported(model).module()
    same = torch.equal(program(batches[0].ids, batches[0].dense, {}), logits)
    apart = (logits - job.trainer.predict(batches[0])).abs().max()
    stored = {f"tables/{table.name}" for table in model.tables}
    return float(apart), same, names, stored | {f"dense/{n}" for n in model.dense.state_dict()}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SHIPPED)
def test_every_model_is_exported_with_all_its_state(ranks, name):
    ((apart, same, names, stored),) = ranks(1, _shipped, name)
    assert apart < 2e-6
    assert same
    assert names <= stored


@pytest.mark.parametrize("policy", get_args(OutOfRange))
def test_ids_out_of_range_are_treated_as_in_the_run(ranks, tmp_path, policy):
    assert ranks(1, _out_of_range, policy, tmp_path)[0] < 1e-6


def _out_of_range(world: World, policy: str, folder):
    config = make_config("2", "sgd", dtype="float32")
    config = replace(config, data=replace(config.data, out_of_range=policy))
    batch = make_batches(2, 30)[0]
    job, model = trained(world, config, FIELDS, [batch])
    batch.ids[0, 0], batch.ids[1, 3] = 10**6, -5
    spec, _ = plan_run(config, FIELDS, world_size=1, device_type="cpu")
    bundle = write(folder / policy, job, model, spec, FIELDS)
    if policy == "error":
        with pytest.raises(IndexError):
            model(*model.arguments_of(batch.ids, batch.dense))
        with pytest.raises(
            IndexError, match="C1: the id 1000000 in row 0 is not a row of its table"
        ):
            bundle.logits(encoded_of(bundle, batch.ids, batch.dense))
        return 0.0
    logits = model(*model.arguments_of(batch.ids, batch.dense))
    served = bundle.logits(encoded_of(bundle, batch.ids, batch.dense))
    wanted = job.trainer.predict(batch)
    return float(torch.stack([(each - wanted).abs() for each in (logits, served)]).max())


def test_hashed_columns_equal_the_loader_s():
    rng = np.random.default_rng(3)
    for rows in (3, 1000, 2**31 - 1):
        parts = [rng.integers(0, high, 5000, dtype=np.int32) for high in (2, 50, 2**31 - 1)]
        got = hashed_ids([torch.from_numpy(part) for part in parts], rows, [0] * 3)
        assert got.tolist() == hashed_by_loader(parts, rows).tolist()
        keys = rng.integers(-(2**63), 2**63, (2, 5000))
        keys[:, :9] = [[MISSING_KEY], [0]]
        parts, missing = [*keys, parts[0]], [MISSING_KEY, MISSING_KEY, 0]
        got = hashed_ids([torch.from_numpy(part) for part in parts], rows, missing)
        assert got.tolist() == hashed_by_loader(parts, rows, missing).tolist()


def _hashed(world: World, folder):
    config = make_config("3", "sgd", dtype="float32")
    wide = WideConfig(crosses=(("C1", "C2"), ("C1", "C2", "C3")), hash_size=97)
    config = replace(config, model=WdlConfig(embedding_dim=4, hidden=(7,), wide=wide, dropout=0.0))
    fields = Fields.of(FIELDS.dense, {field.name: field.rows for field in FIELDS.sparse})
    whole = make_batches(3, 30)
    for batch in whole:
        ids = batch.ids[:, :4].numpy()
        crosses = [
            hashed_by_loader([ids[:, column] for column in columns], 97)
            for columns in ((0, 1), (0, 1, 2))
        ]
        batch.ids = torch.from_numpy(np.column_stack([ids, *crosses]))
    job, model = trained(world, config, fields, whole[:2])
    narrow = whole[2].ids[:, :4]
    spec, _ = plan_run(config, fields, world_size=1, device_type="cpu")
    bundle = write(folder / "model", job, model, spec, fields)
    wanted = job.trainer.predict(whole[2])
    served = bundle.logits(encoded_of(bundle, narrow, whole[2].dense))
    logits = model(narrow, whole[2].dense, {})
    return float(torch.stack([(each - wanted).abs() for each in (logits, served)]).max())


def test_an_exported_model_hashes_the_columns_of_the_set_itself(ranks, tmp_path):
    assert ranks(1, _hashed, tmp_path)[0] < 1e-6


def test_the_error_of_8_bit_rows_is_at_most_half_a_step():
    weight = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))
    weight[7] = 0.25  # a constant row, whose quantization step is 0
    rows = make_rows("t", weight, "int8", torch.float32)
    assert {name: (list(t.shape), t.dtype) for name, t in rows.stored().items()} == {
        "/int8": ([300, 16], torch.uint8),
        "/scale": ([300], torch.float32),
        "/low": ([300], torch.float32),
    }
    found = rows(torch.arange(300))
    step = (weight.amax(1) - weight.amin(1)) / 255
    assert bool(((found - weight).abs().amax(1) <= step / 2 + 1e-6).all())
    assert torch.equal(found[7], weight[7])
    assert (found - weight).abs().max() > 1e-3, "8 bits are not exact"
    narrow = make_rows("t", weight[:, :8], "int8", torch.float32)
    assert narrow.stored()[""].dtype == torch.float16


@pytest.mark.parametrize(("row_format", "value"), [("float16", 70000.0), ("int8", float("nan"))])
def test_a_value_that_a_row_format_cannot_represent_is_refused(row_format, value):
    weight = torch.zeros(70000, 16)
    weight[66000, 3] = value
    with pytest.raises(DataError, match=rf"table t: {value} in row 66000 .* {row_format};"):
        make_rows("t", weight, row_format, torch.float32)


def _formats(world: World, folder):
    config = make_config("dp", "adagrad", dtype="float32", dim=16)
    batches = make_batches(40, 30)
    spec, plan = plan_run(config, FIELDS, world_size=1, device_type="cpu")
    job = build_job(config, spec, plan, Boxing(world))
    for batch in batches:
        job.trainer.step(batch)
    sizes, found = {}, {}
    for row_format in ROW_FORMATS:
        model = plain_of(job, spec, FIELDS, row_format)
        bundle = write(folder / row_format, job, model, spec, FIELDS, row_format)
        file = load_file(folder / row_format / "model.safetensors")
        tables = [value for name, value in file.items() if name.startswith("tables/deep")]
        sizes[row_format] = sum(value.nbytes for value in tables)
        found[row_format] = score_bundle(bundle, iter(batches))
    logits = torch.cat([job.trainer.predict(batch) for batch in batches])
    return sizes, found, evaluate(logits, torch.cat([batch.labels for batch in batches]))


def test_row_formats_with_fewer_bits_are_smaller_and_nearly_as_accurate(ranks, tmp_path):
    ((sizes, found, wanted),) = ranks(1, _formats, tmp_path)
    assert sizes["float16"] == sizes["as_trained"] // 2
    assert sizes["int8"] == sizes["as_trained"] * (16 + 8) // 64
    assert found["as_trained"].auc == wanted.auc
    assert found["as_trained"].logloss == pytest.approx(wanted.logloss, abs=1e-6)
    assert found["float16"].logloss == pytest.approx(wanted.logloss, abs=1e-4)
    assert found["int8"].logloss == pytest.approx(wanted.logloss, abs=1e-3)
    assert found["int8"].logloss != wanted.logloss


def test_models_that_cannot_be_exported_are_refused(tmp_path):
    config = make_config("dp", "sgd", dtype="float32")
    spec, plan = plan_run(config, FIELDS, world_size=1, device_type="cpu")

    class Odd:
        parameters, outputs, hashed_columns = spec.parameters, spec.outputs, ()

    def make(spec):
        return dense_part(spec, plan.embeddings, lambda name: torch.zeros(()), (), 7)

    with pytest.raises(ConfigError, match=r"model: Odd has no method plain\(seed\)"):
        make(Odd())
    Odd.plain = lambda self, *, seed: with_complex_buffer()
    with pytest.raises(SbpError, match=r"buffer phase has dtype torch\.complex64"):
        make(Odd())
    Odd.plain = lambda self, *, seed: nn.Linear(3, 1)
    with pytest.raises(
        ConfigError,
        match=r"plain\(\) of Odd must have all parameters of the spec, but has no mlp\.0\.bias",
    ):
        make(Odd())

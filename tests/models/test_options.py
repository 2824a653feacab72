"""Tests options of the dense part: bfloat16, torch.compile, plain modules, CUDA."""

import dataclasses
import logging
import os

import numpy as np
import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.errors import ConfigError
from sbpflow.models import layered
from sbpflow.run.execution.job import build_job
from sbpflow.run.export.bundle import BundleModel
from sbpflow.run.export.plain_model import dense_part
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.compute import compiler
from sbpflow.runtime.files.cache_dir import code_cache
from sbpflow.tensor import ops
from tests.models.twins import FEW, MODELS, config_of, twin_run
from tests.quick import quick
from tests.training.wdl_case import FIELDS, make_batches, make_config, make_job, to_device, train

SHORT = 7


def config_with(name, scheme, *, dtype="float32", **options):
    """Return the model's config with these options."""
    config = config_of(name, scheme, dtype=dtype, kernel="torch")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(MODELS, lambda n: n == 2))
def test_bfloat16_is_near_float32_on_any_ranks(ranks, name):
    """The losses are close to float32 losses but not equal; 1 and 3 ranks round the same
    products.
    """
    narrow = config_with(name, "3", autocast="bf16")
    ((exact), (alone), *_) = (
        ranks(1, train, config_with(name, "1"), SHORT)[0],
        ranks(1, train, narrow, SHORT)[0],
    )
    for result in ranks(3, train, narrow, SHORT):
        # A weight's gradient is a sum of terms from all ranks, each rounded to 8 bits, and a batch
        # norm of 30 rows amplifies small differences.
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0.02)
    # The seventh batch repeats one row, so a batch norm divides rounding errors by nearly zero.
    np.testing.assert_allclose(alone["losses"][:6], exact["losses"][:6], rtol=0.1)
    assert not np.allclose(alone["losses"], exact["losses"], rtol=1e-6)


def dtypes_of_one_step(world, name):
    """Return the dtypes of each linear layer and interaction, and the dtypes of the weights and
    logits.
    """
    seen = {}
    named = ("linear_of_parts", "fm_interaction", "dot_interaction", "cross_network")
    real = {op: getattr(ops, op) for op in named}

    def spy(op):
        def call(first, *args, **kwargs):
            y = real[op](first, *args, **kwargs)
            one = first[0] if isinstance(first, list) else first
            half = kwargs.get("half")  # the dtype of products; sums have full precision
            seen[kwargs["id"]] = (str(half or one.dtype), str(half or y.dtype))
            return y

        return call

    job = make_job(world, config_with(name, "1", autocast="bf16"))
    batch = make_batches(2, 30)[0].part(world.rank, world.size)
    try:
        for op in real:
            setattr(ops, op, spy(op))
        job.trainer.step(batch)
    finally:
        for op, function in real.items():
            setattr(ops, op, function)
    weights = {str(parameter.dtype) for parameter in job.model.parameters.values()}
    return seen, weights | {str(job.trainer.predict(batch).dtype)}


HALF, WHOLE = ("torch.bfloat16",) * 2, ("torch.float32",) * 2


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "whole", "half"),
    [
        ("wdl", {"mlp.2", "wide_numeric"}, {"mlp.0", "mlp.1"}),
        ("deepfm", {"mlp.2", "wide_numeric", "fm"}, {"mlp.0", "mlp.1"}),
        ("dlrm", {"top.2"}, {"bottom.0", "bottom.1", "dots", "top.0", "top.1"}),
        ("dcnv2", {"output"}, {"cross", "mlp.0", "mlp.1"}),
        ("dcnv2 low rank", {"mlp.2"}, {"bottom.0", "cross", "mlp.0", "mlp.1"}),
    ],
)
def test_which_tensors_are_half_precision(ranks, name, whole, half):
    ((seen, others),) = ranks(1, dtypes_of_one_step, name)
    assert {key for key, dtypes in seen.items() if dtypes == WHOLE} == whole
    assert half <= {key for key, dtypes in seen.items() if dtypes == HALF}
    assert len(seen) == sum(dtypes in (HALF, WHOLE) for dtypes in seen.values())
    assert others == {"torch.float32"}


def test_bfloat16_of_float64_is_refused():
    with pytest.raises(ConfigError, match=r"autocast: bf16 requires .* got float64"):
        plan_run(config_with("dlrm", "1", dtype="float64", autocast="bf16"), FIELDS,
                 world_size=1, device_type="cpu")  # fmt: skip


def cost_of_half(world, share):
    lines = []

    class Handler(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("sbpflow.models.layered")
    real, layered.half_time = layered.half_time, lambda half: share
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        make_job(world, config_with("wdl", "1", autocast="bf16"))
    finally:
        logger.removeHandler(handler)
        layered.half_time = real
    return lines


def test_slow_bfloat16_is_logged(ranks):
    slow, other = ranks(2, cost_of_half, 1.7)
    (line,) = slow
    assert line.startswith("model.autocast: linear layers in bfloat16 take 1.70 times as long")
    assert "remove autocast for speed" in line
    assert other == []
    assert ranks(2, cost_of_half, 0.5)[0][0].endswith(
        "0.50 times as long as in float32 on this CPU"
    )
    assert 0.01 < compiler.half_time(torch.bfloat16, rows=64, width=64) < 100


def compiled(world, name, scheme):
    """Compile with a backend that traces like the default backend but needs no compiler."""
    config = config_with(name, scheme, dtype="float64", compile=True, norm="none")
    real = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: real(module, backend="aot_eager")
    try:
        result = train(world, config, SHORT)
    finally:
        torch.nn.Module.compile = real
    # The compiler must not use torch's default folder, which any local user may have created.
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(code_cache("inductor"))
    assert not torch._inductor.config.cpp_cache_precompile_headers
    return result


# Each compilation takes seconds, so only the largest and the smallest models are compiled.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "dcnv2 low rank")) for name in MODELS],
)
def test_a_compiled_part_trains_like_an_uncompiled_one(ranks, name):
    plain = config_with(name, "1", dtype="float64", norm="none")
    (expected,) = ranks(1, train, plain, SHORT)
    for result in ranks(2, compiled, name, "3"):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-10)
        assert result["dense"].keys() == expected["dense"].keys()
        for key, value in expected["dense"].items():
            np.testing.assert_allclose(result["dense"][key], value, rtol=0, atol=1e-10)


def refused_without_compiler(world):
    real, compiler.shutil.which = compiler.shutil.which, lambda name: None
    try:
        with pytest.raises(ConfigError) as caught:
            make_job(world, config_with("dcnv2", "1", compile=True))
    finally:
        compiler.shutil.which = real
    return str(caught.value)


def test_compile_without_a_compiler_is_refused_by_name(ranks, monkeypatch):
    (message,) = ranks(1, refused_without_compiler)
    wanted = r"model.compile: true is not possible, because no C++ compiler was found (tried "
    assert message.startswith(wanted), message
    assert message.endswith("; or use model.compile: false")
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    assert compiler.compiler_problem("cuda").startswith(
        "triton, which compiles for CUDA, is not installed"
    )


def test_a_compiled_part_is_not_split():
    config = config_with("dcnv2", "1", compile=True)
    config = dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, dense={"mlp.*": "S(0)"})
    )
    with pytest.raises(ConfigError, match=r"parallel.dense.mlp.\*: .* whole on every rank"):
        plan_run(config, FIELDS, world_size=2, device_type="cpu")


def plain_form(name):
    """Return the module with the trained twin's values, its inputs, and the twin's logits."""
    from tests.models.twins import named

    config = config_of(name, "1")
    spec = config.model.spec(FIELDS)
    module = spec.plain(seed=config.run.seed).double()
    _, twin, logits = twin_run(name, FEW)
    values = {key: value for key, (value, _) in named(twin).items()}
    own = dict(module.named_parameters())
    assert own.keys() == spec.parameters.keys() == values.keys() - {t for t in values if "C" in t}
    norms = [one for one in twin.modules() if isinstance(one, torch.nn.BatchNorm1d)]
    running = [value for norm in norms for value in (norm.running_mean, norm.running_var)]
    with torch.no_grad():
        for key, value in own.items():
            value.copy_(values[key])
        for buffer, value in zip(module.buffers(), running, strict=True):
            buffer.copy_(value)
    batch = make_batches(FEW, 30)[0]
    vectors = {
        output.name: [values[table.name][batch.ids[:, n].long()]
                      for n, table in enumerate(output.tables)]
        for output in spec.outputs
    }  # fmt: skip
    inputs = {
        output.name: sum(vectors[output.name])
        if output.combine == "sum"
        else torch.cat(vectors[output.name], 1)
        for output in spec.outputs
    }
    return module.eval(), inputs, batch.dense.double(), logits


@pytest.mark.parametrize("name", MODELS)
def test_the_plain_form_gives_the_logits_of_the_run(name):
    module, vectors, dense, logits = plain_form(name)
    with torch.no_grad():
        found = module(vectors, dense)
    assert found.shape == (len(logits), 1)
    torch.testing.assert_close(found.squeeze(1), logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["deepfm", "dlrm"])
def test_the_plain_form_can_be_exported(name):
    module, vectors, dense, logits = plain_form(name)
    rows = torch.export.Dim("rows", min=2)
    shapes = {"vectors": {key: {0: rows} for key in vectors}, "dense": {0: rows}}
    program = torch.export.export(module, (vectors, dense), dynamic_shapes=shapes)
    found = program.module()({key: tensor[:7] for key, tensor in vectors.items()}, dense[:7])
    torch.testing.assert_close(found.squeeze(1).detach(), logits[:7], rtol=1e-10, atol=1e-12)


def plain_of_a_run(world, name):
    """Return the logits of a trained job, and of the module made from its state."""
    job = make_job(world, config_of(name, "1"))
    batches = make_batches(5, 30)
    for batch in batches:
        job.trainer.step(batch)
    state = job.state()

    def read(key):
        (one,) = state[key].rectangles
        return one.values.reshape(state[key].shape)

    spec = MODELS[name].spec(FIELDS)
    plan = job.plan.embeddings
    dense = dense_part(spec, plan, read, state, 7)
    model = BundleModel(plan=plan, hashed=spec.hashed_columns, dense=dense, num_dense=3, read=read)
    module = model.plain({}, in_memory=True)
    with torch.no_grad():
        logits = module(*module.arguments_of(batches[0].ids, batches[0].dense.double()))
    return logits.numpy(), job.trainer.predict(batches[0]).numpy()


@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_is_exported_with_its_running_statistics(ranks, name):
    ((found, logits),) = ranks(1, plain_of_a_run, name)
    np.testing.assert_allclose(found, logits, rtol=1e-10, atol=1e-12)


def on_a_device(world, name):
    """Return the losses, the source lines of all host waits within the steps, and whether TF32 was
    allowed."""
    from tests.rehearsal.journal import journal

    config = config_with(name, "1", autocast="bf16")
    config = dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, device="cuda", tf32=True)
    )
    spec, plan = plan_run(config, FIELDS, world_size=world.size, device_type="cuda")
    job = build_job(config, spec, plan, Boxing(world))
    losses, waits = [], []
    for batch in make_batches(4, 30):
        rows = to_device(batch.part(world.rank, world.size), world.device)
        with journal() as made:
            losses.append(job.trainer.step(rows))
        waits += [entry.where for entry in made.syncs]
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    return [float(loss) for loss in losses], waits, allowed


@pytest.mark.parametrize("name", quick(MODELS, lambda n: n == 0))
def test_on_a_rehearsed_device_no_step_waits(rehearsed_ranks, ranks, name):
    ((losses, waits, allowed),) = rehearsed_ranks(1, on_a_device, name)
    assert waits == []
    assert allowed
    (same,) = ranks(1, train, config_with(name, "1", autocast="bf16"), 4)
    # On CUDA, a layer computes one product of its concatenated inputs; on CPU, it computes a sum of
    # products, each rounded to 8 bits.
    np.testing.assert_allclose(losses[:3], same["losses"][:3], rtol=5e-3)


def test_tf32_is_for_cuda():
    config = make_config("1", "sgd")
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tf32=True))
    with pytest.raises(
        ConfigError, match=r"parallel.tf32: true is .* cpu, which has no TF32; remove"
    ):
        plan_run(config, FIELDS, world_size=1, device_type="cpu")

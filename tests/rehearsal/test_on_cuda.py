"""Rehearses code with a separate CUDA path."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sbpflow.boxing.executor import Boxing
from sbpflow.errors import DataError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.ops.matmul import ALIGNED_COLUMNS, linear_of_parts
from sbpflow.training.overlap import OverlapWatch
from sbpflow.training.step_schedule import OVERLAPPED
from tests.training.wdl_case import FIELDS, make_batches, make_config, make_job, to_device

WIDTHS, OUTPUTS, ROWS = (16, 13), 5, 4


def operands(device):
    generator = torch.Generator().manual_seed(1)
    shapes = [(ROWS, width) for width in WIDTHS] + [(OUTPUTS, sum(WIDTHS)), (OUTPUTS,)]
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def product_of_parts(world):
    from tests.rehearsal.journal import journal

    boxing, line = Boxing(world), Placement.line("cuda", 1)
    split, copies = Layout(line, (Split(0),)), Layout(line, (Broadcast(),))
    tensors = [
        GlobalTensor(part, split if n < 2 else copies, tuple(part.shape), boxing).requires_grad_()
        for n, part in enumerate(operands(world.device))
    ]
    with journal() as made:
        out = linear_of_parts(tensors[:2], *tensors[2:])
    products = [op for op in made.ops if "mm" in op or "linear" in op]
    out.part.sum().backward()
    gradients = [tensor.part.grad.cpu().numpy() for tensor in tensors]
    return out.part.detach().cpu().numpy(), gradients, products, made.syncs


def test_adjacent_inputs_use_one_aligned_product(rehearsed_ranks):
    assert sum(WIDTHS) % ALIGNED_COLUMNS
    ((found, gradients, products, syncs),) = rehearsed_ranks(1, product_of_parts)
    plain = [tensor.requires_grad_() for tensor in operands("cpu")]
    wanted = F.linear(torch.cat(plain[:2], 1), *plain[2:])
    wanted.sum().backward()
    # float32 sums are computed in another order
    np.testing.assert_allclose(found, wanted.detach().numpy(), atol=1e-5)
    for mine, tensor in zip(gradients, plain, strict=True):
        np.testing.assert_allclose(mine, tensor.grad.numpy(), atol=1e-5)
    assert products == ["aten.addmm.default"]
    assert not syncs


class Switch:
    """The trainer attributes that the overlap watch uses."""

    schedule = OVERLAPPED


def watched_steps(world):
    from tests.rehearsal.journal import journal

    watch = OverlapWatch(Switch(), 2, 500, world.device)
    with journal() as steps:
        for _ in range(60):
            with watch.step():
                torch.ones(2, device=world.device)
    with journal() as end:
        summary = watch.summary()
    return len(steps.entries), {entry.kind for entry in end.entries}, summary


def test_overlap_is_timed_on_the_device_and_read_at_the_end(rehearsed_ranks):
    ((during, at_end, summary),) = rehearsed_ranks(1, watched_steps)
    assert during == 0
    assert at_end == {"event wait"}
    assert summary.startswith("saves ")


def ids_in_host_memory(world):
    collection = make_job(world, make_config("1", "sgd")).embeddings
    ids = make_batches(1, 30)[0].ids
    messages = []
    for given in (ids, {field.name: ids[:, n] for n, field in enumerate(FIELDS.ids)}):
        with pytest.raises(DataError) as refused:
            collection.forward(given, ids.shape[0], training=False)
        messages.append(str(refused.value))
    assert collection.forward(ids.to(world.device), ids.shape[0], training=False)
    return messages


def test_ids_in_host_memory_are_rejected_with_the_feature_name(rehearsed_ranks):
    ((whole, by_name),) = rehearsed_ranks(1, ids_in_host_memory)
    where = "but must be on cuda:0, where the tables are"
    assert whole == f'ids: the ids are on cpu, {where}; pass ids.to("cuda:0")'
    assert by_name.startswith("feature C1: ids: the ids are on cpu")


def bad_ids(world):
    job = make_job(world, make_config("1", "sgd", dtype="float32"))
    rows = to_device(make_batches(2, 30)[0], world.device)
    job.trainer.step(rows)
    before = [stored.weights.clone() for stored in job.embeddings.stored()]
    rows.ids[7, 2] = 53
    with pytest.raises(DataError) as refused:
        job.trainer.step(rows)
    for stored, weights in zip(job.embeddings.stored(), before, strict=True):
        assert torch.equal(stored.weights, weights)
    with pytest.raises(DataError, match="field C3 has id 53"):
        job.embeddings.forward(rows.ids, rows.batch_size, training=False)
    return str(refused.value)


def test_out_of_range_id_is_reported_before_the_update(rehearsed_ranks):
    (message,) = rehearsed_ranks(1, bad_ids)
    assert message.startswith(
        "field C3 has id 53 in row 7 of rank 0's part of the batch, but only ids 0..52"
    )

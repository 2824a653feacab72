"""Tests counter-based dropout masks (used on CUDA): they depend only on the position, in torch and
in Triton.
"""

from importlib import import_module

import pytest
import torch

# The attribute ``sbpflow.tensor.ops.dropout`` is the function, so import the module by name.
dropout = import_module("sbpflow.tensor.ops.dropout")
# On CPU, the kernel runs in the interpreter (see tests/conftest.py); on a GPU, it is compiled.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEY = torch.tensor(5_123_456_789_012_345, device=DEVICE)
SHAPE = (40, 24)


def mask(shape=SHAPE, held=None, key=KEY, p=0.25):
    held = held or tuple(slice(0, length) for length in shape)
    return dropout.counted(key, shape, held) < dropout.threshold_of(p)


@pytest.mark.parametrize(
    "held",
    [
        (slice(0, 13), slice(0, 24)),
        (slice(13, 40), slice(0, 24)),
        (slice(0, 40), slice(5, 6)),
        (slice(7, 9), slice(20, 24)),
    ],
    ids=str,
)
def test_each_part_gets_its_part_of_the_mask(held):
    assert torch.equal(mask(held=held), mask()[held])


def test_masks_have_the_right_share_and_depend_on_key_and_position():
    whole = mask((300, 100))
    assert float(whole.float().mean()) == pytest.approx(0.75, abs=0.01)
    assert 0.3 < float((whole != mask((300, 100), key=KEY + 1)).float().mean()) < 0.45
    cube = mask((6, 5, 4))
    assert torch.equal(cube.view(6, 20), mask((6, 20)))
    assert torch.equal(mask((6, 5, 4), (slice(2, 4), slice(1, 3), slice(0, 4))), cube[2:4, 1:3])
    assert mask((50,)).shape == (50,)
    number = torch.tensor(3.0, device=DEVICE)
    assert dropout._drop(number, KEY, (1,), (slice(0, 1),), 0.25).tolist() in (0.0, 4.0)


def test_remaining_elements_are_scaled_and_the_gradient_has_the_same_mask():
    x = torch.randn(SHAPE, device=DEVICE, requires_grad=True)
    held = tuple(slice(0, length) for length in SHAPE)
    y = dropout._Counted.apply(x, KEY, SHAPE, held, 0.25, False)
    expected = torch.where(mask(), x / 0.75, 0.0)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    torch.testing.assert_close(x.grad, mask().float() / 0.75)


@pytest.mark.parametrize("kernel", ["triton", "torch"])
def test_relu_within_dropout_equals_relu_before_dropout(kernel, monkeypatch):
    dropout.find_kernels.cache_clear()
    if kernel == "triton":
        pytest.importorskip("triton")
    else:
        monkeypatch.setattr(dropout, "find_kernels", lambda: None)
    held = tuple(slice(0, length) for length in SHAPE)
    values = torch.randn(SHAPE, device=DEVICE)
    values[0, :3] = torch.tensor([0.0, -0.0, torch.inf])
    gradient = torch.randn(SHAPE, device=DEVICE)
    results = []
    for within in (True, False):
        x = values.clone().requires_grad_()
        part = x if within else torch.relu(x)
        y = dropout._Counted.apply(part, KEY, SHAPE, held, 0.25, within)
        y.backward(gradient)
        results.append((y.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    values[:] = torch.nan  # must reach the loss
    y = dropout._Counted.apply(values, KEY, SHAPE, held, 0.25, True)
    assert torch.equal(y.isnan(), mask())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "held"),
    [
        ((7, 30), (slice(2, 6), slice(0, 30))),
        ((60, 9), (slice(11, 50), slice(3, 8))),
        ((9, 5, 4), (slice(4, 9), slice(0, 5), slice(0, 4))),
        ((1300,), (slice(100, 1290),)),
    ],
    ids=str,
)
def test_the_triton_kernel_equals_the_torch_kernel(shape, held, dtype, monkeypatch):
    pytest.importorskip("triton")
    x = torch.randn([extent.stop - extent.start for extent in held], device=DEVICE).to(dtype)
    dropout.find_kernels.cache_clear()
    made = dropout._drop(x, KEY, shape, held, 0.3)
    monkeypatch.setattr(dropout, "find_kernels", lambda: None)
    expected = dropout._drop(x, KEY, shape, held, 0.3)
    assert torch.equal(made == 0, expected == 0)
    if dtype == torch.float32:
        assert torch.equal(made, expected)
    else:  # the interpreter truncates float32 values, but a GPU rounds them
        torch.testing.assert_close(made, expected, rtol=2**-7, atol=0)

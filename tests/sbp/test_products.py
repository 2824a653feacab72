"""Tests linear layers on plain tensors with both libraries and padding, against float64."""

import pytest
import torch
import torch.nn.functional as F

from sbpflow.tensor.ops import products


def inputs(rows: int, widths: list[int], outputs: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [*((rows, width) for width in widths), (outputs, sum(widths)), (outputs,)]
    return [torch.randn(*shape, generator=generator) for shape in shapes]


WAYS = ("oneDNN", "oneDNN without copies", "MKL", "MKL with slow shapes")


def use(monkeypatch: pytest.MonkeyPatch, way: str = "oneDNN") -> None:
    assert way in WAYS
    monkeypatch.setattr(products, "onednn_is_faster", lambda: way.startswith("oneDNN"))
    monkeypatch.setattr(products, "onednn_gradients_are_faster", lambda: way == "oneDNN")
    monkeypatch.setattr(products, "mkl_has_slow_shapes", lambda: way == "MKL with slow shapes")


@pytest.mark.few(16)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("rows", "widths", "outputs"),
    [
        (512, [416], 64),
        (512, [13, 416], 64),
        (700, [429, 30, 16], 37),
        (300, [300], 300),
        (9, [13, 20], 8),
        (4096, [13, 416], 37),
        (4300, [13, 416, 260], 64),
        (4096, [5], 1),
        (0, [416], 64),
    ],
    ids=str,
)
def test_linear_and_its_gradients_equal_float64(rows, widths, outputs, bias, way, monkeypatch):
    use(monkeypatch, way)
    *xs, weight, offset = tensors = [v.requires_grad_() for v in inputs(rows, widths, outputs)]
    upstream = torch.randn(outputs, rows, generator=torch.Generator().manual_seed(4)).t()
    out = products.linear_of_tensors(xs, weight, offset if bias else None)
    out.backward(upstream)  # a gradient that is not contiguous
    exact = [v.detach().double().requires_grad_() for v in tensors]
    expected = F.linear(torch.cat(exact[:-2], 1), exact[-2], exact[-1] if bias else None)
    expected.backward(upstream.double())
    assert out.dtype == torch.float32
    wanted = [expected, *(v.grad for v in (exact if bias else exact[:-1]))]
    got = [out, *(v.grad for v in (tensors if bias else tensors[:-1]))]
    for value, want in zip(got, wanted, strict=True):
        scale = float(want.detach().abs().max()) if want.numel() else 1.0
        torch.testing.assert_close(value.double(), want, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize(
    ("inputs_and_outputs", "ways"),
    [
        ((64, 13), ()),
        ((64, 64), ()),
        ((13, 64), ("oneDNN", "oneDNN without copies")),  # has a faster gradient of the weight
    ],
    ids=str,
)
def test_small_products_use_torchs_own_layer(inputs_and_outputs, ways, monkeypatch):
    width, outputs = inputs_and_outputs
    for way in WAYS:
        use(monkeypatch, way)
        x, weight, offset = inputs(30, [width], outputs)
        out = products.linear(x, weight.requires_grad_(), offset)
        assert (out.grad_fn.name() == "_LinearBackward") == (way in ways)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("widths", [[413], [13, 400]], ids=str)
def test_gradients_are_computed_only_where_they_are_wanted(widths, way, monkeypatch):
    use(monkeypatch, way)
    *xs, weight, offset = inputs(512, widths, 61)
    products.linear_of_tensors(xs, weight.requires_grad_(), offset).sum().backward()
    assert all(x.grad is None for x in (*xs, offset))
    wanted = torch.cat(xs, 1).sum(0).expand(61, 413)
    torch.testing.assert_close(weight.grad, wanted, rtol=1e-4, atol=1e-4)
    *others, x = xs
    products.linear_of_tensors(
        [*others, x.requires_grad_()], weight.detach(), offset
    ).sum().backward()
    assert all(other.grad is None for other in others)
    wanted = weight.detach().sum(0)[-x.shape[1] :].expand_as(x)
    torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [torch.randn(128)[::2], torch.randn(1).expand(64)])
def test_a_bias_need_not_be_contiguous(bias, monkeypatch):
    use(monkeypatch)
    x, weight, _ = inputs(512, [416], 64)
    wanted = F.linear(x.double(), weight.double(), bias.double())
    got = products.linear(x, weight, bias).double()
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype, monkeypatch):
    use(monkeypatch)
    grads = []
    for function in (products.linear, F.linear):
        x, weight, offset = (
            torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
            for shape in [(512, 416), (64, 416), (64,)]
        )
        function(x.requires_grad_(), weight.requires_grad_(), offset).abs().sum().backward()
        grads += [x.grad, weight.grad]
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[3])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("widths", [[413], [13, 400]], ids=str)
def test_second_derivatives_equal_those_of_torch(widths, way, monkeypatch):
    use(monkeypatch, way)

    def concatenated(xs, weight, offset):
        return F.linear(torch.cat(xs, 1), weight, offset)

    second = []
    for function in (products.linear_of_tensors, concatenated):
        *xs, weight, offset = tensors = [v.requires_grad_() for v in inputs(512, widths, 61)]
        out = function(xs, weight, offset).tanh()
        first = torch.autograd.grad(out.sum(), [*xs, weight], create_graph=True)
        (out.sum() + sum(gradient.square().sum() for gradient in first)).backward()
        second.append([v.grad for v in tensors])
    for got, want in zip(*second, strict=True):
        scale = float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("way", WAYS)
def test_only_tensors_that_gradients_need_are_kept(way, monkeypatch):
    use(monkeypatch, way)
    x, weight, offset = inputs(512, [413], 61)
    hidden = x.requires_grad_() * 2
    out = products.linear(hidden, weight, offset)
    hidden.add_(1)  # a frozen weight needs no input
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * weight.sum(0).expand(512, 413), rtol=1e-4, atol=1e-4)
    x, weight, offset = inputs(512, [413], 61)
    out = products.linear(x, weight.requires_grad_(), offset)
    with torch.no_grad():
        weight.add_(1)  # without a gradient of the input, the weight's value is not needed
    out.sum().backward()


@pytest.mark.parametrize(
    ("vendor", "family", "capability", "outputs", "gradients", "padding"),
    [
        ("AuthenticAMD", "26", "AVX512", True, True, False),
        ("AuthenticAMD", "25", "AVX512", True, False, False),
        ("AuthenticAMD", "26", "AVX2", False, False, True),
        ("GenuineIntel", "6", "AVX512", False, False, False),
        ("GenuineIntel", "6", "AVX2", False, False, False),
        (None, None, "DEFAULT", False, False, False),
    ],
)
def test_the_cpu_decides_how_products_are_computed(
    vendor, family, capability, outputs, gradients, padding, monkeypatch
):
    facts = {} if vendor is None else {"vendor_id": vendor, "cpu family": family}
    monkeypatch.setattr(products, "cpu_facts", lambda: facts)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    has_library = torch.backends.mkldnn.is_available()
    decided = products.onednn_is_faster.__wrapped__()
    assert decided is (outputs and has_library)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: decided)
    assert products.onednn_gradients_are_faster.__wrapped__() is (gradients and has_library)
    has_mkl = torch.backends.mkl.is_available()
    assert products.mkl_has_slow_shapes.__wrapped__() is (padding and has_mkl)


@pytest.mark.parametrize(
    ("rows", "inputs_", "outputs", "strides"),
    [
        (512, 416, 37, (40, 416)),
        (512, 413, 64, (64, 416)),
        (512, 413, 37, (40, 416)),
        (512, 416, 64, (64, 416)),  # needs no padding
        (4096, 413, 37, (37, 416)),  # oneDNN computes the output
        (16, 413, 37, (37, 413)),  # too small
        (4096, 413, 9, (9, 413)),  # too narrow
    ],
)
def test_results_have_padding(rows, inputs_, outputs, strides, monkeypatch):
    use(monkeypatch, "MKL with slow shapes")
    x, weight, bias = inputs(rows, [inputs_], outputs)
    given = []
    x.requires_grad_().register_hook(lambda gradient: given.append(gradient.stride(0)))
    out = products.linear_of_tensors([x], weight, bias)
    out.sum().backward()
    assert (out.stride(0), *given) == strides


@pytest.mark.parametrize(
    ("width", "used", "gradients"), [(416, True, True), (416, True, False), (13, False, False)]
)
def test_only_large_products_use_onednn(width, used, gradients, monkeypatch):
    use(monkeypatch)
    monkeypatch.setattr(products, "onednn_gradients_are_faster", lambda: gradients)
    x, weight, offset = inputs(1024, [width], 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        products.linear_of_tensors([x], weight.requires_grad_(), offset).sum().backward()
    names = {event.name for event in profile.events()}
    assert ("mkldnn::_linear_pointwise" in names) is used
    assert ("aten::mkldnn_linear_backward_weights" in names) is gradients


@pytest.mark.parametrize(
    ("rows", "outputs", "used"), [(4096, 64, True), (1024, 64, False), (4096, 256, False)]
)
def test_large_inputs_with_narrow_results_use_onednn(rows, outputs, used, monkeypatch):
    use(monkeypatch, "MKL with slow shapes")
    x, weight, bias = inputs(rows, [416], outputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        products.linear(x, weight.requires_grad_(), bias).sum().backward()
    names = {event.name for event in profile.events()}
    assert ("mkldnn::_linear_pointwise" in names) is used
    assert "aten::mkldnn_linear_backward_weights" not in names


@pytest.mark.parametrize(
    ("rows", "inputs_", "outputs", "used"),
    [
        (4096, 416, 64, True),
        (4300, 416, 16, True),  # the last rows are not a whole image
        (4095, 416, 64, False),  # too few images
        (4096, 200, 64, False),  # too few values
        (4096, 416, 144, False),  # too wide
        (4096, 416, 60, False),  # not a multiple of a block
    ],
)
def test_gradients_of_narrow_layers_are_those_of_a_convolution(
    rows, inputs_, outputs, used, monkeypatch
):
    use(monkeypatch, "oneDNN without copies")
    x, weight, bias = inputs(rows, [inputs_], outputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        products.linear(x, weight.requires_grad_(), bias).sum().backward()
    assert ("aten::convolution_backward" in {event.name for event in profile.events()}) is used
    wanted = x.double().sum(0).expand(outputs, inputs_)
    scale = float(wanted.abs().max())
    torch.testing.assert_close(weight.grad.double(), wanted, rtol=0, atol=2e-6 * scale)
    total = torch.full((outputs, inputs_), 3.0)
    products.add_weight_gradient(total, torch.ones(rows, outputs), x)
    torch.testing.assert_close(total.double(), wanted + 3.0, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(700, 64, 416), (700, 416, 64), (600, 300, 300), (5, 3, 2)]
)
def test_weight_gradients_are_added_in_blocks_of_rows(rows, outputs, inputs, way, monkeypatch):
    use(monkeypatch, way)
    monkeypatch.setattr(products, "_COPIED_BYTES", 1)  # blocks of the least size, 256 rows
    generator = torch.Generator().manual_seed(5)
    gradient, x = (torch.randn(rows, n, generator=generator) for n in (outputs, inputs))
    total = torch.full((outputs, inputs), 3.0)
    products.add_weight_gradient(total, gradient, x)
    wanted = 3.0 + gradient.double().t() @ x.double()
    torch.testing.assert_close(total.double(), wanted, rtol=0, atol=1e-4)
    wide = torch.full((outputs, inputs), 3.0, dtype=torch.float64)
    products.add_weight_gradient(wide, gradient, x)
    torch.testing.assert_close(wide, wanted, rtol=0, atol=1e-4)
    added = torch.full((rows, inputs), 3.0)
    products.add_product(added, gradient, total.t())
    wanted = 3.0 + gradient.double() @ total.double()
    scale = float(wanted.abs().max())
    torch.testing.assert_close(added.double(), wanted, rtol=0, atol=2e-6 * scale)

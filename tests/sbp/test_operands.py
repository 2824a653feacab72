"""Tests that invalid operands and dims are refused, and that the errors name them."""

import re

import pytest
import torch

from sbpflow.errors import SbpError
from sbpflow.tensor import ops
from tests.sbp.test_mistakes import dry, wrong

PLAIN = torch.ones(5, 7)
LAY_OUT = "make a global tensor first: GlobalTensor.from_full(x, layout, boxing)"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        wrong(
            "add: operand 1 is the number 1.0, not a GlobalTensor; to multiply, use "
            "ops.scale(x, 1.0); otherwise pass "
            "GlobalTensor.from_full(torch.tensor(1.0), layout, boxing)",
            lambda: ops.add(dry(5, 7), 1.0),
        ),
        wrong("mul: operand 0 is the number 2, not", lambda: ops.mul(2, dry(5))),
        wrong(
            f"relu: operand 0 is a plain tensor of shape [5, 7], not a GlobalTensor; {LAY_OUT}",
            lambda: ops.relu(PLAIN),
        ),
        wrong("relu: operand 0 is None, not a GlobalTensor; pass", lambda: ops.relu(None)),
        wrong("cast: operand 0 is a plain", lambda: ops.cast(PLAIN, torch.float64)),
        wrong(
            "cast: dtype must be a torch.dtype, such as torch.float64, got 'float32'",
            lambda: ops.cast(dry(5, 7), "float32"),
        ),
        wrong(
            "reduce_max: GlobalTensor(complex64[5, 7] B@[0, 1]) is complex, and complex numbers",
            lambda: ops.reduce_max(dry(5, 7, dtype=torch.complex64)),
        ),
        wrong("scale: operand 0 is a plain", lambda: ops.scale(PLAIN, 2)),
        wrong("use ops.mul for tensors", lambda: ops.scale(dry(5, 7), dry(5, 7))),
        wrong("dropout: operand 0 is a plain", lambda: ops.dropout(PLAIN, 0.5, 0)),
        wrong("matmul: the second operand is a plain", lambda: ops.matmul(dry(5, 7), PLAIN)),
        wrong("linear: weight is a plain", lambda: ops.linear(dry(5, 7), PLAIN)),
        wrong("linear: operand 2 is a plain", lambda: ops.linear(dry(5, 7), dry(5, 7), PLAIN)),
        wrong("bias_add: operand 1 is a plain", lambda: ops.bias_add(dry(5, 7), PLAIN)),
        wrong("gather: operand 1 is a list", lambda: ops.gather(dry(5, 7), [0, 1])),
        wrong("bce_with_logits: operand 1", lambda: ops.bce_with_logits(dry(5, 7), PLAIN)),
        wrong("reshape: operand 0 is a plain", lambda: ops.reshape(PLAIN, (7, 5))),
        wrong("flatten: operand 0 is a plain", lambda: ops.flatten(PLAIN)),
        wrong("reduce_sum: operand 0 is a plain", lambda: ops.reduce_sum(PLAIN)),
        wrong("reduce_max: operand 0 is a plain", lambda: ops.reduce_max(PLAIN, 0)),
        wrong("reduce_mean: operand 0 is a plain", lambda: ops.reduce_mean(PLAIN)),
        wrong(
            "concat needs a list of tensors, got GlobalTensor(float32[5, 7] B@[0, 1]); write "
            "concat([a, b], dim)",
            lambda: ops.concat(dry(5, 7), 0),
        ),
        wrong("concat: operand 1 is a plain", lambda: ops.concat([dry(5, 7), PLAIN], 0)),
        wrong(
            "concat: dim must be an integer, such as 0 or -1, got None",
            lambda: ops.concat([dry(5, 7)], None),
        ),
        wrong("reduce_sum: dims must be an integer or a", lambda: ops.reduce_sum(dry(5, 7), 0.5)),
        wrong(
            "reduce_max: dims must be an integer or a",
            lambda: ops.reduce_max(dry(5, 7), ["a"]),
        ),
        wrong("reshape: shape must be an integer or a", lambda: ops.reshape(dry(5, 7), (5, 7.0))),
        wrong("flatten: dim must be an integer", lambda: ops.flatten(dry(5, 7), (0, 1))),
    ],
)
def test_non_tensors_and_invalid_dims_are_refused(call, text):
    with pytest.raises(SbpError, match=re.escape(text)):
        call()


def test_a_dtype_that_cannot_be_sent_works_where_nothing_is_sent():
    rows, columns = (dry(4, 6, sbp=sbp, dtype=torch.complex128) for sbp in ("S(0)", "S(1)"))
    assert ops.mul(rows, rows).layout == rows.layout
    with pytest.raises(SbpError, match=r"cannot send torch\.complex128"):
        ops.mul(rows, columns)


def test_an_int_is_a_single_dim():
    x = dry(4, 6, sbp="S(0)")
    assert ops.reduce_sum(x, 1).shape == (4,)
    assert ops.reduce_max(x, -1, keepdim=True).shape == (4, 1)
    assert ops.reduce_mean(x, 0).shape == (6,)
    assert ops.reshape(x, -1).shape == (24,)


YES, COMPLEX = dry(5, 5, dtype=torch.bool), dry(5, 5, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        wrong("matmul: GlobalTensor(bool", lambda: ops.matmul(YES, YES)),
        wrong("linear: GlobalTensor(bool", lambda: ops.linear(YES, YES)),
        wrong("linear_of_parts: GlobalTensor(bool", lambda: ops.linear_of_parts([YES], YES)),
        wrong(
            "cross_network: GlobalTensor(bool",
            lambda: ops.cross_network(YES, [(YES, dry(5, dtype=torch.bool))]),
        ),
        wrong("relu: GlobalTensor(bool", lambda: ops.relu(YES)),
        wrong("relu: GlobalTensor(complex64", lambda: ops.relu(COMPLEX)),
    ],
)
def test_ops_that_torch_lacks_for_a_dtype_are_refused(call, text):
    with pytest.raises(SbpError, match=re.escape(text)):
        call()

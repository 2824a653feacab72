"""Defines operators on global tensors.

An operator chooses its cheapest legal signature, converts its operands, and runs a kernel on the
parts. Kernels are plain torch code, so autograd computes the gradients, which have the dual
layouts.
"""

from sbpflow.tensor.ops.cross import cross_network
from sbpflow.tensor.ops.dropout import dropout
from sbpflow.tensor.ops.elementwise import add, cast, mul, nonlinear, relu, scale
from sbpflow.tensor.ops.indexing import gather
from sbpflow.tensor.ops.interactions import dot_interaction, fm_interaction
from sbpflow.tensor.ops.loss import bce_with_logits, class_weights, focal_weights, smooth_labels
from sbpflow.tensor.ops.matmul import bias_add, linear, linear_of_parts, matmul
from sbpflow.tensor.ops.norms import batch_norm, layer_norm
from sbpflow.tensor.ops.reductions import reduce_max, reduce_mean, reduce_sum
from sbpflow.tensor.ops.shapes import concat, flatten, reshape

__all__ = [
    "add",
    "batch_norm",
    "bce_with_logits",
    "bias_add",
    "cast",
    "class_weights",
    "concat",
    "cross_network",
    "dot_interaction",
    "dropout",
    "flatten",
    "fm_interaction",
    "focal_weights",
    "gather",
    "layer_norm",
    "linear",
    "linear_of_parts",
    "matmul",
    "mul",
    "nonlinear",
    "reduce_max",
    "reduce_mean",
    "reduce_sum",
    "relu",
    "reshape",
    "scale",
    "smooth_labels",
]

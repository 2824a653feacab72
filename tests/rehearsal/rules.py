"""Defines the arguments that CUDA rejects for an op, and the ops that make the host wait for the
device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.rehearsal import graphs
from tests.rehearsal.journal import note
from tests.rehearsal.memory import RefusedError

# For these ops, the host must read a number from the device: the result's size, or the result
# itself.
_SYNCS = frozenset(
    "_local_scalar_dense equal is_nonzero nonzero nonzero_numpy masked_select unique_consecutive "
    "_unique _unique2 unique_dim unique_dim_consecutive bincount histc linalg_solve".split()
)
_MATMUL = frozenset(
    "mm addmm mv addmv bmm baddbmm dot linear matmul addmm_ addmv_ _addmm_activation vdot".split()
)
# With these ops, CUDA rejects 0-d CPU tensors, although it accepts them in arithmetic.
_ALL_ON_DEVICE = frozenset(
    "index_select embedding gather scatter_ scatter scatter_add_ mm addmm mv cat index_copy_ "
    "searchsorted _embedding_bag".split()
)
_INDEXED = frozenset({"index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_"})
_INT64_INDEX = frozenset({"gather", "scatter_", "scatter", "scatter_add_", "index_copy_"})
_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
READS_NOTHING = frozenset(
    "empty_like new_empty new_zeros new_ones new_full zeros_like ones_like full_like "
    "new_empty_strided detach size stride numel dim is_contiguous sym_size record_stream "
    "_reshape_alias".split()
)
_COPIES = READS_NOTHING | frozenset(
    "_to_copy copy_ clone view slice cat fill_ zeros full empty as_strided unsqueeze squeeze "
    "select split split_with_sizes unbind expand permute transpose t alias _unsafe_view reshape "
    "narrow index index_select zero_ equal stack repeat".split()
)


def check(
    func: Any, name: str, args: Any, tensors: Sequence[Tensor], on_device: type[Tensor]
) -> None:
    """Raise RefusedError for devices and dtypes that CUDA rejects; note uploads and odd dtypes.
    ``tensors`` are all tensors among the arguments.
    """
    if name not in ("copy_", "_to_copy", "_copy_from"):
        for tensor in tensors:
            _check_device(func, name, tensor, on_device)
    dtypes = [tensor.dtype for tensor in tensors]
    if name in _MATMUL and any(not d.is_floating_point and not d.is_complex for d in dtypes):
        raise RefusedError(f"{func}: not implemented on CUDA for {dtypes[0]}")
    if name in _INT64_INDEX and args[2].dtype != torch.int64:
        raise RefusedError(f"{func}: an index of {args[2].dtype}; CUDA requires int64")
    if name.startswith("_embedding_bag") and len(args) > 2 and args[1].dtype != args[2].dtype:
        raise RefusedError(f"{func}: indices of {args[1].dtype}, offsets of {args[2].dtype}")
    if name == "sort" and args[0].dtype == torch.bool:
        raise RefusedError(f"{func}: CUDA cannot sort bool")
    if name not in _COPIES and _UNSIGNED & set(dtypes):
        note("odd dtype", f"{func} {dtypes}")


def _check_device(func: Any, name: str, tensor: Tensor, on_device: type[Tensor]) -> None:
    if isinstance(tensor, on_device):
        return
    if tensor.dim() == 0 and name not in _ALL_ON_DEVICE:
        return
    if name in _INDEXED:  # torch copies the index to the device, and waits
        graphs.refuse(f"{name} with an index in host memory")
        note("upload", f"{name} with an index in host memory")
        return
    raise RefusedError(
        f"{func}: a CPU tensor {tensor.dtype}{list(tensor.shape)} among CUDA tensors"
    )


def wait_of(name: str, args: Any, kwargs: Any) -> str:
    """Return why this op makes the host wait, or "" if it does not."""
    if name in _SYNCS:
        return name
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "repeat_interleave without output_size"
    if name in _INDEXED and any(_is_mask(index) for index in args[1]):
        # Setting one value with a mask runs masked_fill_, whose result has a known size.
        fills = name != "index" and args[2].numel() == 1
        return "" if fills else f"{name} with a mask"
    return ""


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)

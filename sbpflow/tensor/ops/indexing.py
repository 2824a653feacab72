"""Gathers rows of a table by id, for any layouts of the table and the ids, and checks every id."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.tensor.dispatch import Out, apply, check_ndim, check_tensors, letters_for
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.signature import Choice, make_rule

_ID_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def gather(
    table: GlobalTensor, ids: GlobalTensor, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """Return the rows ``[.., d]`` of ``table [r, d]`` at integer ``ids [..]``.

    ``table x ids: B x S(i) -> S(i), S(0) x B -> P, S(1) x B -> S(last), P x B -> P``

    If the rows are split, a rank computes zeros for rows that it does not store, so the result is
    P. Every rank checks its ids and raises SbpError for the first id outside 0..r-1. If the ids are
    split, only the rank with the bad id raises the error; in checked mode, all ranks raise it. The
    check reads the ids a second time and, on CUDA, synchronizes with the device.
    """
    check_ndim("gather", "the table", table, 2)
    check_tensors("gather", table, ids)
    if ids.dtype not in _ID_DTYPES:
        raise SbpError(f"gather: ids must have an integer dtype, such as torch.int64, got {ids!r}")
    dims = letters_for(ids.ndim, "rd")
    signatures = "".join(f"B,{a}->{a};" for a in dims) + "r,B->P; d,B->d; P,B->P"
    op_rule = make_rule("gather", (("r", "d"), dims), (*dims, "d"), signatures)
    num_rows, rank = table.shape[0], table.boxing.world.rank

    def refuses(choice: Choice, parts: list[Tensor]) -> str:
        slices = choice.inputs[1].part_slices(ids.shape, rank) or ()
        return _bad_id(parts[1], tuple(extent.start for extent in slices), num_rows)

    def kernel(choice: Choice, parts: list[Tensor]) -> Tensor:
        slices = choice.inputs[0].part_slices(table.shape, rank)
        rows, first = parts[0], 0 if slices is None else slices[0].start
        if rows.shape[0] == num_rows:
            return F.embedding(parts[1].long(), rows)
        local = parts[1].long() - first
        is_local = (local >= 0) & (local < rows.shape[0])
        if rows.shape[0] == 0:
            return rows.new_zeros((*local.shape, rows.shape[1])) + rows.sum()
        gathered = F.embedding(local.where(is_local, 0), rows)
        # Multiplying by 0 would turn infinite values into NaN.
        return torch.where(is_local.unsqueeze(-1), gathered, 0)

    shape = (*ids.shape, table.shape[1])
    return apply(op_rule, [table, ids], shape, kernel, out=out, id=id, refuses=refuses)


def _bad_id(ids: Tensor, start: tuple[int, ...], num_rows: int) -> str:
    """Return a message about the first out-of-range id, or "" if there is none.

    ``start`` is where these ids begin in the full tensor of ids.
    """
    if ids.is_meta or not ids.numel():
        return ""
    low, high = torch.stack(ids.aminmax()).tolist()
    if low >= 0 and high < num_rows:
        return ""
    first = ((ids < 0) | (ids >= num_rows)).nonzero()[0].tolist()
    at = [a + b for a, b in zip(start, first, strict=True)]
    return f"gather: ids{at} is {int(ids[tuple(first)])}, but the table has {num_rows} rows; " + (
        f"ids must be 0..{num_rows - 1}" if num_rows else "an empty table has no valid ids"
    )

"""Converts to and from torch's DTensor and DeviceMesh.

Placement <-> DeviceMesh, S(i) <-> Shard(i), B <-> Replicate, P <-> Partial. DTensor splits a dim
like ``torch.chunk``, whereas S(i) is balanced. If the two splits differ, ``to_dtensor`` moves data
between parts, and ``from_dtensor`` returns a layout with explicit sizes. Gradients do not flow
through these conversions.
"""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor.placement_types import Placement as DPlacement

from sbpflow.boxing.executor import Boxing
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Sbp, Split, balanced_sizes
from sbpflow.tensor.global_tensor import GlobalTensor


def to_mesh(placement: Placement) -> DeviceMesh:
    """Return a DeviceMesh with the same grid. All ranks must call this function, because a
    DeviceMesh creates process groups.
    """
    ranks = torch.tensor(placement.ranks).view(placement.shape)
    return DeviceMesh(placement.device_type, ranks)


def from_mesh(mesh: DeviceMesh) -> Placement:
    """Return the placement with the same grid of ranks as ``mesh``."""
    grid = mesh.mesh
    return Placement(mesh.device_type, tuple(grid.flatten().tolist()), tuple(grid.shape))


def to_dtensor(x: GlobalTensor, mesh: DeviceMesh | None = None) -> DTensor:
    """Return ``x``, detached, as a DTensor on ``mesh`` (by default, on a new mesh).

    Data is sent only if torch's chunks differ from the parts of ``x``. Raise SbpError if ``mesh``
    is not on the placement of ``x``, or if two axes split the same dim and DTensor would split it
    unequally.
    """
    mesh = mesh or to_mesh(x.layout.placement)
    if from_mesh(mesh) != x.layout.placement:
        raise SbpError(
            f"the mesh {mesh.mesh.tolist()} on {mesh.device_type} is not the placement of {x!r} on "
            f"{x.layout.placement.device_type}; convert the tensor with x.to(layout)"
        )
    chunked = x.detach().to(chunk_layout(x.layout, x.shape), id="to_dtensor")
    return DTensor.from_local(
        chunked.part,
        mesh,
        [to_theirs(sbp) for sbp in x.layout.nd_sbp],
        run_check=False,
        shape=torch.Size(x.shape),
        stride=torch.empty(x.shape, device="meta").stride(),
    )


def from_dtensor(tensor: DTensor, boxing: Boxing) -> GlobalTensor:
    """Return a GlobalTensor with the same parts, detached. Nothing is sent."""
    placement = from_mesh(tensor.device_mesh)
    shape = tuple(tensor.shape)
    layout = chunk_layout(Layout(placement, _to_ours(tensor.placements)), shape)
    local = tensor.to_local().detach()
    inside = boxing.world.rank in placement
    return GlobalTensor.from_local(
        local if inside else None, layout, shape, boxing, dtype=tensor.dtype
    )


def chunk_layout(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Return ``layout`` with splits as in torch.chunk; unbalanced splits have explicit sizes."""
    lengths = list(shape)
    nd_sbp: list[Sbp] = []
    for axis, sbp in enumerate(layout.nd_sbp):
        if isinstance(sbp, Split):
            parts = layout.placement.shape[axis]
            sizes = chunk_sizes(lengths[sbp.dim], parts)
            # A split with some empty parts needs explicit sizes, because balanced splits must not
            # have empty parts.
            even = sizes == balanced_sizes(lengths[sbp.dim], parts)
            even = even and (all(sizes) or not any(sizes))
            nested = any(
                isinstance(s, Split) and s.dim == sbp.dim for s in layout.nd_sbp[axis + 1 :]
            )
            if nested and len(set(sizes)) > 1:
                raise SbpError(
                    f"{layout} splits dim {sbp.dim} of {list(shape)} twice, and torch.chunk would "
                    f"split the dim into {sizes}; first convert to a layout that splits the dim "
                    "at most once, such as B"
                )
            lengths[sbp.dim] = sizes[0] if nested else lengths[sbp.dim]
            nd_sbp.append(Split(sbp.dim, None if even else sizes))
        else:
            nd_sbp.append(sbp)
    return Layout(layout.placement, tuple(nd_sbp))


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return the lengths of the pieces into which torch.chunk splits a dim. If there are fewer than
    ``parts`` pieces, the remaining lengths are 0.
    """
    step = -(-size // parts)
    return tuple(max(0, min(step, size - step * part)) for part in range(parts))


def to_theirs(sbp: Sbp) -> DPlacement:
    """Convert an sbp to a DTensor placement, without explicit sizes."""
    if isinstance(sbp, Split):
        return Shard(sbp.dim)
    return Replicate() if isinstance(sbp, Broadcast) else DPartial(sbp.op)


def _to_ours(placements: Sequence[DPlacement]) -> tuple[Sbp, ...]:
    ours: list[Sbp] = []
    for placement in placements:
        if isinstance(placement, Shard):
            ours.append(Split(placement.dim))
        elif isinstance(placement, Replicate):
            ours.append(Broadcast())
        # The parts of subclasses, such as _MaskPartial, are not plain terms.
        elif type(placement) is DPartial and placement.reduce_op in ("sum", "max", "min"):
            ours.append(Partial(placement.reduce_op))
        else:
            raise SbpError(f"{placement} has no sbp; first redistribute to Shard or Replicate")
    return tuple(ours)

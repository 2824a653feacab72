"""Conversion to and from torch's DTensor and DeviceMesh.

Placement <-> DeviceMesh, S(i) <-> Shard(i), B <-> Replicate, P <-> Partial. DTensor splits a dim as
``torch.chunk`` does, whereas S(i) is balanced. If the two differ, ``to_dtensor`` boxes the parts,
and ``from_dtensor`` uses explicit sizes. Data only: gradients do not pass.
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
    """A DeviceMesh with the same grid; every rank of the world calls it, to make process groups."""
    ranks = torch.tensor(placement.ranks).view(placement.shape)
    return DeviceMesh(placement.device_type, ranks)


def from_mesh(mesh: DeviceMesh) -> Placement:
    """The placement with the same grid of ranks."""
    grid = mesh.mesh
    return Placement(mesh.device_type, tuple(grid.flatten().tolist()), tuple(grid.shape))


def to_dtensor(x: GlobalTensor, mesh: DeviceMesh | None = None) -> DTensor:
    """The same value as a DTensor on ``mesh``, by default a new one, without history.

    Communicates only if the chunks differ from the parts. Raises SbpError for two splits of one dim
    that DTensor would make unequal.
    """
    mesh = mesh or to_mesh(x.layout.placement)
    if from_mesh(mesh) != x.layout.placement:
        raise SbpError(
            f"the mesh has grid {mesh.mesh.tolist()}, but {x!r} has another; convert it first with "
            "x.to(layout)"
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
    """The same parts as a GlobalTensor, without history or communication."""
    placement = from_mesh(tensor.device_mesh)
    shape = tuple(tensor.shape)
    layout = chunk_layout(Layout(placement, _to_ours(tensor.placements)), shape)
    local = tensor.to_local().detach()
    inside = boxing.world.rank in placement
    return GlobalTensor.from_local(
        local if inside else None, layout, shape, boxing, dtype=tensor.dtype
    )


def chunk_layout(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """``layout`` with the splits of torch.chunk, with explicit sizes unless they are balanced."""
    lengths = list(shape)
    nd_sbp: list[Sbp] = []
    for axis, sbp in enumerate(layout.nd_sbp):
        if isinstance(sbp, Split):
            parts = layout.placement.shape[axis]
            sizes = chunk_sizes(lengths[sbp.dim], parts)
            # Sizes with empty parts stay explicit: a user's balanced split must not have any.
            even = sizes == balanced_sizes(lengths[sbp.dim], parts)
            even = even and (all(sizes) or not any(sizes))
            nested = any(
                isinstance(s, Split) and s.dim == sbp.dim for s in layout.nd_sbp[axis + 1 :]
            )
            if nested and len(set(sizes)) > 1:
                raise SbpError(
                    f"{layout} splits dim {sbp.dim} of {list(shape)} twice, and torch.chunk would "
                    f"split it into {sizes}; convert to one split of that dim, or to B, first"
                )
            lengths[sbp.dim] = sizes[0] if nested else lengths[sbp.dim]
            nd_sbp.append(Split(sbp.dim, None if even else sizes))
        else:
            nd_sbp.append(sbp)
    return Layout(layout.placement, tuple(nd_sbp))


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """The lengths of torch.chunk's pieces, with zeros for missing ones."""
    step = -(-size // parts)
    return tuple(max(0, min(step, size - step * part)) for part in range(parts))


def to_theirs(sbp: Sbp) -> DPlacement:
    """The DTensor placement of an sbp; explicit sizes are lost."""
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
        elif isinstance(placement, DPartial) and placement.reduce_op in ("sum", "max", "min"):
            ours.append(Partial(placement.reduce_op))
        else:
            raise SbpError(f"{placement} has no sbp; redistribute to Shard or Replicate first")
    return tuple(ours)

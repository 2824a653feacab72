"""Rehearses collectives of CUDA tensors: checks NCCL's rules and runs them with gloo.

The tensors of a collective must not be accessed until its ``wait`` (see ``memory``). A collective
runs on its group's stream, ordered after the stream that starts it; ``wait`` orders the waiting
stream after the collective.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.rehearsal import graphs, streams
from tests.rehearsal.journal import count_collective, where
from tests.rehearsal.memory import IN_FLIGHT, InFlight, RefusedError
from tests.rehearsal.tensor import Rehearsed

# ncclDataType_t, as mapped by torch; bool is sent as uint8.
NCCL_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)


class Work:
    """A collective in flight; as in NCCL, ``wait`` makes the stream wait, not the host."""

    def __init__(self, works: Sequence[dist.Work], flight: InFlight, ends: streams.Seen) -> None:
        self._works, self._flight, self._ends = works, flight, ends
        IN_FLIGHT.append(flight)

    def wait(self, *_: object) -> bool:
        streams.current().join(self._ends)
        if self._flight in IN_FLIGHT:
            IN_FLIGHT.remove(self._flight)
            self._flight.kept = ()
            for work in self._works:
                work.wait()
        return True

    def is_completed(self) -> bool:
        return self._flight not in IN_FLIGHT


def rehearsed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``real``, a collective of torch.distributed, so that it also accepts rehearsed
    tensors.
    """

    def collective(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        args, group = _take_group(args, group)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if not any(isinstance(tensor, Rehearsed) for tensor in tensors):
            return real(*args, group=group, async_op=async_op, **kwargs)
        graphs.refuse(f"{name}, a collective")
        count_collective(name)
        _check(name, tensors, args[len(tensors) :], dist.get_world_size(group))
        hosts = [tensor.host for tensor in tensors]  # pyright: ignore
        in_place = len(hosts) == 1
        sent, received = () if in_place else (tensors[1],), (tensors[0],)
        flight, ends = _fly(name, sent, received, group)
        if name == "reduce_scatter":  # gloo compares shapes, but NCCL compares only element counts
            hosts = [host.view(-1) for host in hosts]
        work = real(*hosts, *args[len(tensors) :], group=group, async_op=True, **kwargs)
        handle = Work([work] if work else [], flight, ends)
        if async_op:
            return handle
        handle.wait()
        return None

    return collective


def rehearsed_pairs(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``real``, torch's batch of sends and receives, so that it also accepts rehearsed
    tensors.
    """

    def batch(moves: Sequence[dist.P2POp]) -> list[Any]:
        if not any(isinstance(move.tensor, Rehearsed) for move in moves):
            return real(moves)
        graphs.refuse("batch_isend_irecv, a collective")
        count_collective("batch_isend_irecv")
        sent, received, hosts = [], [], []
        for move in moves:
            _check("irecv" if move.op is dist.irecv else "isend", [move.tensor], [], 0)
            (received if move.op is dist.irecv else sent).append(move.tensor)
            host = move.tensor.host  # pyright: ignore
            hosts.append(dist.P2POp(move.op, host, move.peer, move.group, move.tag))
        flight, ends = _fly("batch_isend_irecv", sent, received, moves[0].group)
        return [Work(real(hosts), flight, ends)]

    return batch


def _fly(
    name: str, sent: Sequence[Any], received: Sequence[Any], group: Any
) -> tuple[InFlight, streams.Seen]:
    """Start a transfer on the group's NCCL stream; return it and the work done once it ends."""
    stream = streams.nccl_stream("of all ranks" if group is None else group.group_name)
    stream.join(streams.current().sees)
    stream.tick()
    with streams.on(stream):
        for tensor in sent:
            tensor.use(name, writes=False)
        for tensor in received:
            tensor.use(name, writes=True)
    flight = InFlight(
        f"{name} ({where()})",
        tuple(tensor.host for tensor in sent),
        tuple(tensor.host for tensor in received),
        tuple(tensor.block for tensor in (*sent, *received)),
    )
    return flight, dict(stream.sees)


def _take_group(args: Sequence[Any], group: Any) -> tuple[list[Any], Any]:
    groups = [arg for arg in args if isinstance(arg, dist.ProcessGroup)]
    rest = [arg for arg in args if not isinstance(arg, dist.ProcessGroup)]
    return rest, groups[0] if groups else group


def _check(name: str, tensors: list[Tensor], rest: Sequence[Any], size: int) -> None:
    for tensor in tensors:
        if not isinstance(tensor, Rehearsed):
            raise RefusedError(f"{name}: a CPU tensor {tensor.dtype}{list(tensor.shape)} on NCCL")
        if tensor.dtype not in NCCL_DTYPES:
            raise RefusedError(f"{name}: NCCL does not support {tensor.dtype}")
        if not tensor.is_contiguous():
            raise RefusedError(f"{name}: a tensor of strides {tensor.stride()} is not contiguous")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise RefusedError(f"{name}: dtypes {[tensor.dtype for tensor in tensors]} differ")
    if name in ("all_reduce", "isend", "irecv"):
        return
    out, sent = tensors
    if name == "all_gather" and out.numel() != size * sent.numel():
        raise RefusedError(f"{name}: {out.numel()} elements from {size} x {sent.numel()}")
    if name == "reduce_scatter" and out.numel() * size != sent.numel():
        raise RefusedError(f"{name}: {sent.numel()} elements to {size} x {out.numel()}")
    if name == "all_to_all":
        _check_splits(out, sent, rest, size)


def _check_splits(out: Tensor, sent: Tensor, rest: Sequence[Any], size: int) -> None:
    given = [list(sizes) if sizes is not None else [] for sizes in (*rest, None, None)][:2]
    for tensor, sizes in zip((out, sent), given, strict=True):
        rows = tensor.shape[0] if tensor.dim() else 0
        if (sizes and sum(sizes) != rows) or (not sizes and rows % size):
            raise RefusedError(f"all_to_all: splits {sizes} of {rows} rows among {size} ranks")

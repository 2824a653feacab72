"""Implements tensors that claim to be on a CUDA device, but store their data in host memory.

Python sees ``cuda``; C++ sees ``meta``, because the backward of ``meta`` tensors needs no driver
and runs in the calling thread. Every op goes through ``run``, which rejects what CUDA rejects,
records where the host would wait, and lets ``streams`` check the order of accesses. The CUDA
kernels themselves are not tested.
"""

from functools import cache
from typing import Any

import torch
import torch.utils._device
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from tests.rehearsal import graphs, rules, streams
from tests.rehearsal.journal import count_op, note
from tests.rehearsal.memory import PINNED, RefusedError, check_access
from tests.rehearsal.trees import tensors_of, with_tensors


class Rehearsed(Tensor):
    """A tensor with its data in ``host``; ``index`` is the number of the process's device."""

    index = 0

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device="meta",
            requires_grad=False,
        )

    def __init__(self, host: Tensor):
        self.host = host
        self.block = streams.block_of(host)

    def use(self, func: object, *, writes: bool) -> None:
        """Record that an op on the current stream will read or change this tensor."""
        if graph := graphs.capturing():  # ops do not run during a capture
            graph.uses(self.block, self.host, writes=writes)
            return
        check_access(func, self.host, writes=writes)
        if self.block is not None:
            self.block.use(func, self.host, writes=writes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        return run(func, args, kwargs or {})

    device = property(lambda self: torch.device("cuda", Rehearsed.index))
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    def __repr__(self, **_: object) -> str:
        return f"Rehearsed({self.host!r})"

    def get_device(self) -> int:
        return Rehearsed.index

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self):
        streams.current().tick()
        self.use("tolist", writes=False)
        wait("tolist")
        return self.host.tolist()

    def numpy(self, *_: object, **__: object):
        raise TypeError("can't convert cuda device type tensor to numpy; use .cpu() first")

    __array__ = numpy

    def __iter__(self):
        return iter(self.unbind(0))

    def cpu(self):
        return torch.ops.aten._to_copy(self, device="cpu")

    def cuda(self, *_: object, **__: object):
        return self

    def pin_memory(self, *_: object):
        raise RefusedError("a CUDA tensor cannot be pinned")

    def is_pinned(self, *_: object) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        """Prevent reuse of the freed memory before ``stream`` reaches this point."""
        if self.block is not None:
            self.block.recorded.append(stream.clock)

    def to(self, *args: Any, **kwargs: Any):
        device, dtype, non_blocking, copy = _parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return torch.ops.aten._to_copy(
                self, dtype=dtype or self.dtype, device=device, non_blocking=non_blocking
            )
        if (dtype is None or dtype == self.dtype) and not copy:
            return self
        return torch.ops.aten._to_copy(self, dtype=dtype or self.dtype)

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, device: Any = None):
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)


def _parse_to(
    *args: Any,
    device: Any = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    **_: object,
) -> tuple[torch.device | None, torch.dtype | None, bool, bool]:
    """Return the device, the dtype, ``non_blocking``, and ``copy`` from any form of a call to
    ``Tensor.to``.
    """
    for given in args:
        if isinstance(given, Tensor):
            device, dtype = given.device, given.dtype
        elif isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, bool):
            non_blocking = given
        elif given is not None:
            device = given
    return (None if device is None else torch.device(device)), dtype, non_blocking, copy


class Mode(TorchDispatchMode):
    """Passes every op to ``run``, including factories, which have no ``Rehearsed`` argument."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Check, record, and compute one op on host memory, with results on the device."""
    name, described = _names(func)
    tensors = tensors_of((args, kwargs))
    has = any(isinstance(tensor, Rehearsed) for tensor in tensors)
    wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    # C++ requests the device "meta" when it creates a tensor like a Rehearsed one, but a caller can
    # request it, too.
    target = has if wanted is None else wanted.type in ("cuda", "meta") and not _is_meta_meant()
    if name == "_foreach_copy_" and _crosses(*args[:2]):
        for mine, theirs in zip(*args[:2], strict=True):  # torch also copies these one by one
            mine.copy_(theirs, *args[2:], **kwargs)
        return None
    if has or target:
        streams.current().tick()
    if has:
        rules.check(func, name, args, tensors, Rehearsed)
        _check_memory(func, name, args, kwargs)
        if what := rules.wait_of(name, args, kwargs):
            wait(what)
    if name == "copy_" and len(args) > 1 and _crosses(args[:1], args[1:2]):
        return _copy_across(args[0], args[1], _non_blocking(args, kwargs))
    if name == "_to_copy" and wanted is not None and has != target:
        return _move(func, args[0], kwargs, to_device=target)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    hosts, host_kwargs = with_tensors((args, kwargs), Rehearsed, lambda t: t.host)
    out = func(*hosts, **host_kwargs)
    if not target:
        return out
    count_op(described, elsewhere=streams.current() is not streams.MAIN)
    wrapped = with_tensors(out, Tensor, Rehearsed)
    if graph := graphs.capturing():
        graph.add(func, hosts, host_kwargs, out)
        for leaf in _fresh(wrapped, args, kwargs):
            graph.made(leaf.block, leaf.host)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if has else wrapped


@cache
def _names(func: Any) -> tuple[str, str]:
    """Return an op's name without its namespace, and the op as text."""
    return func._schema.name.split("::")[1], str(func)


def _fresh(out: Any, args: Any, kwargs: Any) -> list[Rehearsed]:
    """Return the results that do not share an argument's memory."""
    given = tensors_of((args, kwargs))
    known = {id(tensor.block) for tensor in given if isinstance(tensor, Rehearsed)}
    results = [tensor for tensor in tensors_of(out) if isinstance(tensor, Rehearsed)]
    return [tensor for tensor in results if id(tensor.block) not in known]


def wait(what: str) -> None:
    """Make the host wait for the current stream."""
    graphs.refuse(f"the host waits ({what})")
    note("sync", what)
    streams.host_waits(streams.current().sees)
    PINNED.arrive(streams.current().sees)


def _is_meta_meant() -> bool:
    """Return whether the code is inside ``with torch.device("meta")``."""
    current = torch.utils._device.CURRENT_DEVICE
    return current is not None and current.type == "meta"


def _non_blocking(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


def _crosses(targets: Any, sources: Any) -> bool:
    pairs = list(zip(targets, sources, strict=True))
    tensors = all(isinstance(b, Tensor) for _, b in pairs)
    return tensors and any(isinstance(a, Rehearsed) != isinstance(b, Rehearsed) for a, b in pairs)


def _copy_across(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """Implement ``copy_`` between host and device."""
    graphs.refuse("a copy between host and device")
    if isinstance(target, Rehearsed):
        count_op("h2d")
        _note_upload(source, non_blocking)
        target.host.copy_(source)
    elif isinstance(source, Rehearsed):
        count_op("d2h")
        if non_blocking and PINNED.has(target):
            note("late read", f"{source.numel()} {source.dtype}")
            clock = streams.current()
            PINNED.copy_later(target, source.host, clock.number, clock.now)
        else:
            wait("copy to the host")
            target.copy_(source.host)
    return target


def _move(func: Any, source: Tensor, kwargs: dict[str, Any], *, to_device: bool) -> Tensor:
    """Implement ``_to_copy`` between host and device."""
    graphs.refuse("a copy between host and device")
    count_op("h2d" if to_device else "d2h")
    non_blocking = kwargs.get("non_blocking", False)
    host = source.host if isinstance(source, Rehearsed) else source
    out = host.detach().clone()
    if (dtype := kwargs.get("dtype")) is not None:
        out = out.to(dtype)
    if to_device:
        _note_upload(source, non_blocking)
        return Rehearsed(out)
    # The target is not pinned, so the host could not know when a non-blocking copy has finished.
    if non_blocking:
        raise RefusedError("an asynchronous copy to the host; use pinned memory")
    wait("copy to the host")
    return out


def _note_upload(source: Tensor, non_blocking: bool) -> None:
    if not (non_blocking and PINNED.has(source)):
        why = "not pinned" if non_blocking else "blocking"
        note("upload", f"{source.numel()} {source.dtype}, {why}")


def _check_memory(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Reject reads and writes of data in flight; views and shapes are allowed."""
    if name in rules.READS_NOTHING:
        return
    for (_, use), value in zip(_uses(func), args, strict=False):
        _check_value(func, use, value)
    if kwargs:
        for argument, use in _uses(func):
            if argument in kwargs:
                _check_value(func, use, kwargs[argument])


@cache
def _uses(func: Any) -> tuple[tuple[str, str], ...]:
    """Return the name of each argument of an op, and whether the op reads, writes, or views it."""
    aliases = [(argument.name, argument.alias_info) for argument in func._schema.arguments]
    return tuple(
        (name, "reads" if alias is None else "writes" if alias.is_write else "views")
        for name, alias in aliases
    )


def _check_value(func: Any, use: str, value: Any) -> None:
    if use == "views":
        return
    for tensor in tensors_of(value):
        if isinstance(tensor, Rehearsed):
            tensor.use(func, writes=use == "writes")

"""Makes a process believe it has a CUDA device; for good, so only in processes made for it."""

import contextlib
import importlib
import importlib.util
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.rehearsal.journal import count_op, note
from tests.rehearsal.memory import IN_FLIGHT, PINNED, check_access
from tests.rehearsal.tensor import Mode, Rehearsed
from tests.rehearsal.transfers import rehearsed, rehearsed_pairs


def install() -> None:
    """Call once, before a World is made."""
    torch._C._set_only_lift_cpu_tensors(True)
    _claim_device()
    _claim_factories()
    _claim_collectives()
    _plan_without()
    _claim_kernels()
    foreach_types: Any = vars(importlib.import_module("torch.optim.optimizer"))
    foreach_types["_foreach_supported_types"].append(Rehearsed)
    torch.autograd.set_multithreading_enabled(False)
    Mode().__enter__()


def check_end() -> None:
    """AssertionError if a transfer was never waited for; clears it for the next test."""
    left = [flight.what for flight in IN_FLIGHT]
    IN_FLIGHT.clear()
    PINNED.arrive()
    assert not left, f"never waited for: {left}"


class _Stream:
    """Streams are not rehearsed: all work is one queue."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", Rehearsed.index)

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event

    def synchronize(self) -> None:
        note("sync", "Stream.synchronize")
        PINNED.arrive()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


class _Event:
    def __init__(self, *_: object, **__: object) -> None:
        self._copies = 0
        self._time = 0.0

    def record(self, *_: object) -> None:
        self._copies = PINNED.record()
        self._time = time.perf_counter()

    def wait(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note("event wait", "Event.synchronize")
        PINNED.arrive(self._copies)

    def elapsed_time(self, other: "_Event") -> float:
        return 1e3 * (other._time - self._time)


def _synchronize(*_: object) -> None:
    note("sync", "torch.cuda.synchronize")
    PINNED.arrive()


def _set_device(device: Any) -> None:
    Rehearsed.index = device if isinstance(device, int) else torch.device(device).index or 0


def _claim_device() -> None:
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 8
    cuda.set_device = _set_device
    cuda.current_device = lambda: Rehearsed.index
    cuda.get_device_name = lambda *_: "rehearsed CUDA device"
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.synchronize = _synchronize
    cuda.reset_peak_memory_stats = lambda *_: None
    cuda.max_memory_allocated = cuda.memory_allocated = lambda *_: 0
    cuda.empty_cache = lambda: None
    optimizer: Any = torch.optim.Optimizer  # asks the driver, where torch is built for CUDA
    optimizer._accelerator_graph_capture_health_check = lambda self: None


def _claim_factories() -> None:
    """What C++ makes before any dispatch: pinned memory, generators, tensors from lists."""
    real_generator, real_tensor, real_empty = torch.Generator, torch.tensor, torch.empty

    class Generator(real_generator):
        def __new__(cls, device: Any = "cpu") -> "Generator":
            return real_generator.__new__(cls, "cpu")

    def tensor(data: Any, *, device: Any = None, requires_grad: bool = False, **rest: Any):
        if device is None or torch.device(device).type != "cuda":
            return real_tensor(data, device=device, requires_grad=requires_grad, **rest)
        note("upload", "torch.tensor on the device")
        return Rehearsed(real_tensor(data, **rest)).requires_grad_(requires_grad)

    def empty(*size: Any, pin_memory: bool = False, **rest: Any):
        made = real_empty(*size, **rest)
        return PINNED.add(made) if pin_memory else made

    claims: Any = torch
    claims.Generator, claims.tensor, claims.empty = Generator, tensor, empty
    patched: Any = Tensor
    real_to = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any):
        # C++ asks the driver for the number of a device without one.
        if args and args[0] == "cuda":
            args = (torch.device("cuda", Rehearsed.index), *args[1:])
        return real_to(self, *args, **kwargs)

    patched.to = to
    patched.pin_memory = lambda self, *_: PINNED.add(self.clone())
    patched.is_pinned = lambda self, *_: PINNED.has(self)


def _claim_collectives() -> None:
    from sbpflow.boxing import executor
    from sbpflow.runtime import world

    patched: Any = dist
    real_init = dist.init_process_group
    patched.init_process_group = lambda backend=None, **kwargs: real_init("gloo", **kwargs)
    patched.all_reduce = rehearsed("all_reduce", dist.all_reduce)
    patched.all_to_all_single = rehearsed("all_to_all", dist.all_to_all_single)
    patched.batch_isend_irecv = rehearsed_pairs(dist.batch_isend_irecv)
    gather = rehearsed("all_gather", world.all_gather_single)
    scatter = rehearsed("reduce_scatter", world.reduce_scatter_single)
    for module in (world, executor):  # they take the names that this torch has
        module.all_gather_single, module.reduce_scatter_single = gather, scatter


def _plan_without() -> None:
    """Planning runs a model on meta tensors, which must stay that; FBGEMM is not rehearsed."""
    from sbpflow.embedding.storage import choose
    from sbpflow.run import build_plan

    planning: Any = build_plan
    real = planning.dense_steps

    def dense_steps(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return real(*args, **kwargs)

    planning.dense_steps = dense_steps
    kernels: Any = choose
    kernels.import_fbgemm = lambda: None
    kernels.find_spec = lambda name: None  # nor Triton, but by tests that ask for it


class _Launcher:
    """Launches Triton's interpreter on the host's numbers; a kernel counts as one op."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        class Grid:
            def __getitem__(self, grid: Any) -> Any:
                def launch(*args: Any, **kwargs: Any) -> None:
                    count_op(f"triton.{name}")
                    for leaf in tree_leaves((args, kwargs)):
                        if isinstance(leaf, Tensor):
                            assert isinstance(leaf, Rehearsed), f"{name}: a CPU tensor"
                            check_access(name, leaf.host, writes=True)
                    hosts, named = tree_map_only(Rehearsed, lambda t: t.host, (args, kwargs))
                    with _disable_current_modes():
                        kernel[grid](*hosts, **named)

                return launch

        return Grid()


def _claim_kernels() -> None:
    if importlib.util.find_spec("triton") is None:
        return
    from sbpflow.embedding.storage import triton_storage

    patched: Any = triton_storage
    patched._launch = _Launcher(patched._launch)

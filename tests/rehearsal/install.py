"""Simulates a CUDA device in this process, which is irreversible: use a separate process."""

import contextlib
import importlib
import importlib.util
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.rehearsal import graphs, streams
from tests.rehearsal.journal import count_op, note
from tests.rehearsal.memory import IN_FLIGHT, PINNED
from tests.rehearsal.tensor import Mode, Rehearsed, wait
from tests.rehearsal.transfers import rehearsed, rehearsed_pairs
from tests.rehearsal.trees import tensors_of, with_tensors


def install() -> None:
    """Replace torch's CUDA interface; call once, before a World is made."""
    torch._C._set_only_lift_cpu_tensors(True)
    _claim_device()
    _claim_factories()
    _claim_collectives()
    _plan_without()
    _claim_kernels()
    foreach_types: Any = vars(importlib.import_module("torch.optim.optimizer"))
    foreach_types["_foreach_supported_types"].append(Rehearsed)
    torch.autograd.set_multithreading_enabled(False)
    _rehearse_threads()
    Mode().__enter__()


def check_end() -> None:
    """Raise AssertionError if a transfer was never waited for; reset all state."""
    left = [flight.what for flight in IN_FLIGHT]
    forget()
    assert not left, f"never waited for: {left}"


def forget() -> None:
    """Discard all work in flight after a test that may have failed."""
    IN_FLIGHT.clear()
    PINNED.arrive()
    streams.settle()


class _Stream:
    """Replaces ``torch.cuda.Stream``."""

    def __init__(self, *_: object, clock: streams.Clock | None = None, **__: object) -> None:
        self.device = torch.device("cuda", Rehearsed.index)
        self.clock = clock or streams.Clock("stream")

    def wait_stream(self, other: "_Stream") -> None:
        graphs.refuse("a wait for another stream")
        self.clock.join(other.clock.sees)

    def wait_event(self, event: "_Event") -> None:
        graphs.refuse("a wait for an event")
        self.clock.join(event.sees)

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        with streams.on(self.clock):
            wait("Stream.synchronize")

    def __enter__(self) -> "_Stream":
        self._entered = streams.on(self.clock)
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class _Event:
    """Replaces ``torch.cuda.Event``."""

    def __init__(self, *_: object, **__: object) -> None:
        self.sees: streams.Seen = {}
        self._time = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self.sees = dict((stream.clock if stream is not None else streams.current()).sees)
        self._time = time.perf_counter()

    def wait(self, stream: _Stream | None = None) -> None:
        (stream.clock if stream is not None else streams.current()).join(self.sees)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        graphs.refuse("the host waits for an event")
        note("event wait", "Event.synchronize")
        streams.host_waits(self.sees)
        PINNED.arrive(self.sees)

    def elapsed_time(self, other: "_Event") -> float:
        return 1e3 * (other._time - self._time)


def _current_stream(*_: object) -> _Stream:
    return _Stream(clock=streams.current())


def _on_stream(stream: _Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else streams.on(stream.clock)


def _synchronize(*_: object) -> None:
    graphs.refuse("the host waits (torch.cuda.synchronize)")
    note("sync", "torch.cuda.synchronize")
    streams.host_waits_for_all()
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
    cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=80 * 10**9)
    cuda.get_device_name = lambda *_: "rehearsed CUDA device"
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream, cuda.current_stream = _on_stream, _current_stream
    cuda.default_stream = lambda *_: _Stream(clock=streams.MAIN)
    cuda.CUDAGraph, cuda.graph = graphs.Graph, graphs.capture
    cuda.is_current_stream_capturing = lambda: graphs.capturing() is not None
    # With these replacements, `torch.manual_seed` and `fork_rng` use the host's generator instead
    # of the device's.
    cuda.get_rng_state = lambda *_: torch.empty(0, dtype=torch.uint8)
    cuda.set_rng_state = lambda *_: None
    cuda.manual_seed_all = lambda seed: graphs.refuse("torch.manual_seed")
    cuda.synchronize = _synchronize
    cuda.reset_peak_memory_stats = lambda *_: None
    cuda.max_memory_allocated = cuda.memory_allocated = lambda *_: 0
    cuda.empty_cache = lambda: None
    optimizer: Any = torch.optim.Optimizer  # these checks would call the CUDA driver
    for name in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
        setattr(optimizer, name, _check_capturable)


def _check_capturable(optimizer: torch.optim.Optimizer) -> None:
    if not all(group.get("capturable") for group in optimizer.param_groups):
        graphs.refuse(f"{type(optimizer).__name__} without capturable=True")


def _rehearse_threads() -> None:
    """Activate the dispatch modes in each thread of the project, because modes are per thread."""
    patched: Any = threading.Thread
    real = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with Mode():
            real(self)

    patched.run = run


def _claim_factories() -> None:
    """Replace objects that C++ creates before dispatch: pinned memory, generators, tensors from
    lists.
    """
    real_generator, real_tensor, real_empty = torch.Generator, torch.tensor, torch.empty

    class Generator(real_generator):
        def __new__(cls, device: Any = "cpu") -> "Generator":
            return real_generator.__new__(cls, "cpu")

        def manual_seed(self, seed: int) -> torch.Generator:
            if seed != self.initial_seed():
                graphs.refuse("a generator seeded anew")
            return super().manual_seed(seed)

    def tensor(data: Any, *, device: Any = None, requires_grad: bool = False, **rest: Any):
        if device is None or torch.device(device).type != "cuda":
            return real_tensor(data, device=device, requires_grad=requires_grad, **rest)
        graphs.refuse("torch.tensor on the device")
        streams.current().tick()
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
        # For a device without an index, C++ would ask the driver for the index.
        if args and args[0] == "cuda":
            args = (torch.device("cuda", Rehearsed.index), *args[1:])
        return real_to(self, *args, **kwargs)

    patched.to = to
    patched.pin_memory = lambda self, *_: PINNED.add(self.clone())
    patched.is_pinned = lambda self, *_: PINNED.has(self)


def _claim_collectives() -> None:
    from sbpflow.boxing import collectives
    from sbpflow.embedding.cache import records
    from sbpflow.runtime.ranks import world

    memories: Any = records
    memories.as_device_memory = lambda pinned, device: Rehearsed(pinned)

    patched: Any = dist
    real_init = dist.init_process_group
    patched.init_process_group = lambda backend=None, **kwargs: real_init("gloo", **kwargs)
    patched.all_reduce = rehearsed("all_reduce", dist.all_reduce)
    patched.all_to_all_single = rehearsed("all_to_all", dist.all_to_all_single)
    patched.batch_isend_irecv = rehearsed_pairs(dist.batch_isend_irecv)
    gather = rehearsed("all_gather", world.all_gather_single)
    scatter = rehearsed("reduce_scatter", world.reduce_scatter_single)
    for module in (world, collectives):  # these modules have already imported the functions
        module.all_gather_single, module.reduce_scatter_single = gather, scatter


def _plan_without() -> None:
    """Disable the rehearsal during planning: planning needs meta tensors, and FBGEMM is not
    rehearsed.
    """
    from sbpflow.embedding.rules import kernels
    from sbpflow.run.planning import build_plan

    planning: Any = build_plan
    real = planning.dense_steps

    def dense_steps(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return real(*args, **kwargs)

    planning.dense_steps = dense_steps
    known: Any = kernels
    known.has_fbgemm = lambda: False
    # Triton kernels are rehearsed only in tests that enable them.
    known.find_spec = lambda name: None
    dropping: Any = importlib.import_module("sbpflow.tensor.ops.dropout")
    dropping.find_kernels = lambda: None


class _Launcher:
    """Runs Triton's interpreter on host memory; a kernel counts as one op."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        class Grid:
            def __getitem__(self, grid: Any) -> Any:
                def launch(*args: Any, **kwargs: Any) -> None:
                    count_op(f"triton.{name}")
                    streams.current().tick()
                    for tensor in tensors_of((args, kwargs)):
                        assert isinstance(tensor, Rehearsed), f"{name}: a CPU tensor"
                        tensor.use(name, writes=True)
                    hosts, named = with_tensors((args, kwargs), Rehearsed, lambda t: t.host)

                    def run() -> None:
                        with _disable_current_modes():
                            kernel[grid](*hosts, **named)

                    run()
                    if graph := graphs.capturing():
                        graph.calls.append(run)

                return launch

        return Grid()


def _claim_kernels() -> None:
    if importlib.util.find_spec("triton") is None:
        return
    from sbpflow.embedding.storage import triton_storage

    patched: Any = triton_storage
    patched._launch = _Launcher(patched._launch)


def dropout_kernels() -> Any:
    """Return the rehearsed dropout kernel for tests that enable it, in place of
    ``find_kernels``.
    """
    from sbpflow.tensor.ops import triton_dropout

    launcher = _Launcher(triton_dropout)
    named = {"drop": launcher.drop, "drop_gradient": launcher.drop_gradient}
    return SimpleNamespace(**named, BLOCK=triton_dropout.BLOCK)

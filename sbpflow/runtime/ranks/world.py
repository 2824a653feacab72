"""Defines ``World``: the rank, device, and process groups of this process, and its checked mode. A
World is created once and passed as an argument. Transfers of tensors are in ``boxing``.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from sbpflow.errors import PeerLostError, SbpError
from sbpflow.runtime.compute.devices import backend_of_device, choose_device, why_no_cuda
from sbpflow.runtime.compute.versions import build_facts
from sbpflow.runtime.processes.exit_messages import Meeting
from sbpflow.runtime.processes.shutdown import close_process_groups
from sbpflow.runtime.processes.startup import await_ranks
from sbpflow.runtime.processes.store import TimedStore, store_of_group, within
from sbpflow.runtime.random.draws import Draws
from sbpflow.runtime.ranks.comm_log import CommLog, WaitTime
from sbpflow.runtime.ranks.hosts import find_topology
from sbpflow.runtime.ranks.interfaces import choose_interface
from sbpflow.runtime.ranks.rendezvous import Rendezvous, meeting_from_environment
from sbpflow.runtime.ranks.shared_memory import SharedChannel, SharedMemory, share_memory
from sbpflow.runtime.ranks.topology import Topology

logger = logging.getLogger(__name__)

HEADER_BYTES = 512
LENGTH_BYTES = 8  # at the end of a header: the length of this rank's refusal message, or 0
DEFAULT_TIMEOUT_S = 600.0
_SLACK_S = 5.0  # lets torch's own timeout, whose message is more specific, expire first

Made = TypeVar("Made")

# torch 2.13 renamed these functions and warns about the old names, but 2.11 has only the old names.
_names = vars(dist)
all_gather_single: Callable[..., dist.Work | None] = (
    _names.get("all_gather_single") or _names["all_gather_into_tensor"]
)
reduce_scatter_single: Callable[..., dist.Work | None] = (
    _names.get("reduce_scatter_single") or _names["reduce_scatter_tensor"]
)


@dataclass(frozen=True, slots=True)
class Link:
    """A process group with the memory that its ranks on this host share. ``ranks`` are in ascending
    order, and ``rank`` is that of this process.

    ``calls`` counts exchanges of messages. The ranks of a group make the same calls in the same
    order, so the count is a tag on which they agree.

    ``under_way`` contains, by tag, the messages of this rank that nobody has waited for, and their
    tensors. If the buffer of a message were freed before the message arrives, gloo could not
    deliver any later message between the two ranks.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup
    shared: SharedChannel | None = None
    calls: Iterator[int] = field(default_factory=count, compare=False)
    under_way: dict[int, object] = field(default_factory=dict[int, object], compare=False)


class World:
    """The ranks of one run, as seen by this process. Create a World with ``World.start``, and call
    ``close`` before the process ends.

    Each combination of ranks and ``channel`` uses its own process group, which separates its
    traffic from that of others.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checked: bool = False,
        owns_default_group: bool = True,
        topology: Topology | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.backend = backend_of_device(device.type)
        self.checked = checked
        self.topology = topology or Topology.one_host(size)
        # True: wait for each transfer right after starting it, without overlap
        self.wait_at_once = False
        self.log = CommLog()
        self.waits = WaitTime()
        self.draws = Draws()  # the source of the random numbers of ops
        self._timeout = timedelta(seconds=timeout_s)
        self._links: dict[tuple[tuple[int, ...], str], Link] = {}
        self._shared: SharedMemory | None = None
        self._owns_default_group = owns_default_group
        self._closed = False
        self._served: Meeting | None = None
        self._keys = ""  # key prefix of this world's stores
        # Backend of new groups; None selects the backend of the default group.
        self._new_backend: str | None = None

    @staticmethod
    def start(
        device: str = "auto",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checked: bool = False,
        rendezvous: Rendezvous | None = None,
        facts: Mapping[str, str] | None = None,
        topology: Topology | None = None,
        shared_memory: bool = True,
    ) -> "World":
        """Join the other ranks; without a launcher, return a world of one rank.

        ``device`` is "auto", "cpu" or "cuda". ``rendezvous`` replaces the environment variables
        RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT that torchrun sets. An existing
        default process group of any backend is used, and ``close`` does not destroy it. ``facts``
        maps keys to values that must be equal on all ranks; they are compared, with device, backend
        and versions, before torch connects the ranks. Without a ``topology`` the ranks discover
        which of them share a host. On CPU, ranks of a host pass messages through shared memory,
        unless ``shared_memory`` is False or numba is not installed. Raises ConfigError if facts
        differ, the device is unavailable, the environment is incomplete, or ranks that ``topology``
        puts on one host do not share one, and AbsentError if some ranks do not join in time.
        """
        meeting = rendezvous or meeting_from_environment()
        chosen = choose_device(device, meeting.local_rank)
        if device == "auto" and chosen.type == "cpu" and meeting.local_rank == 0:
            if reason := why_no_cuda():
                logger.warning("device auto: using the CPU, because %s", reason)
        owns = not dist.is_initialized()
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        met: Meeting | None = None
        if meeting.init_method == "env://" or (not owns and meeting.size > 1):
            agreed = {"device": chosen.type, "backend": backend, **build_facts(), **(facts or {})}
            met = await_ranks(timeout_s, agreed)
            ranks = (meeting.rank, meeting.size, chosen.type)
            topology = find_topology(met.store, *ranks, timeout_s, topology)
            choose_interface(met.store, meeting.rank, topology, timeout_s)
        if owns:
            if chosen.type == "cuda":
                # Since NCCL 2.26, this variable makes transfers of different groups run in issue
                # order, which is the same on all ranks. If the order differed between ranks, they
                # could deadlock.
                os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
            alone = meeting.init_method is None
            store = _names["HashStore"]() if alone else _store_of_start(met, timeout_s)
            start = partial(
                dist.init_process_group,
                backend,
                init_method=meeting.init_method if store is None else None,
                store=store,
                rank=meeting.rank,
                world_size=meeting.size,
                timeout=timedelta(seconds=timeout_s),
            )
            _connect(start, chosen, timeout_s, "startup", "connecting all ranks")
        world = World(
            dist.get_rank(),
            dist.get_world_size(),
            chosen,
            timeout_s=timeout_s,
            checked=checked,
            owns_default_group=owns,
            topology=topology,
        )
        if not owns and world.size > 1:  # the group's store contains keys of its earlier worlds
            number = store_of_group("sbpflow/worlds").add(str(world.rank), 1)
            world._keys = f"world {number}/"
            # The backend of the existing default group may not support this device.
            world._new_backend = backend
        world._served = met  # creating groups needs rank 0's store, so keep it alive
        if topology is None:
            common = world.store("hosts") if world.size > 1 else None
            ranks = (world.rank, world.size, chosen.type)
            world.topology = find_topology(common, *ranks, timeout_s)
        if shared_memory and chosen.type == "cpu" and world.size > 1:
            here = world.topology.hosts[world.topology.host_of(world.rank)]
            store = world.store("shared memory")
            world._shared = share_memory(store, world.rank, world.size, here, timeout_s)
        return world

    def passes_messages(self, device_type: str) -> bool:
        """Return whether an all-to-all on this device type consists of messages between pairs of
        ranks. Such messages are used on CPU if there are several hosts or the ranks of this host
        share memory. Otherwise, an all-to-all is a collective of the backend.
        """
        return device_type == "cpu" and (len(self.topology.hosts) > 1 or self._shared is not None)

    def link(self, ranks: Sequence[int], channel: str, step_id: str = "") -> Link:
        """Return the process group of ``ranks`` (in any order) on ``channel``, with a shared-memory
        channel if this host shares memory.

        The group is created on first use, so all ranks must use groups for the first time in the
        same order; ``Boxing`` and the engine execute the same steps everywhere to ensure this. On
        ranks outside the group, the group is c10d's non-member value. ``step_id`` is for error
        messages.
        """
        key = (tuple(sorted(ranks)), channel)
        link = self._links.get(key)
        if link is None:
            if outside := [rank for rank in key[0] if not 0 <= rank < self.size]:
                raise SbpError(
                    f"ranks {outside} are not in this world of {self.size}; use 0..{self.size - 1}"
                )
            what = f"creating the group of ranks {list(key[0])} for {channel}"
            create = partial(
                dist.new_group, list(key[0]), timeout=self._timeout, backend=self._new_backend
            )
            timeout_s = self._timeout.total_seconds()
            created = _connect(create, self.device, timeout_s, step_id, what)
            # All ranks create all groups in the same order, so the numbers of channels agree.
            shared = self._shared.channel(len(self._links)) if self._shared is not None else None
            group = cast("dist.ProcessGroup", created)
            link = self._links[key] = Link(key[0], self.rank, group, shared)
        return link

    def check(self, step_id: str, operation: str, refused: str = "") -> None:
        """In checked mode, compare the next step of all ranks; otherwise do nothing. All ranks of
        the world must call this method. ``refused`` is the reason why this rank cannot continue, or
        "". Raises SbpError on every rank if the steps differ or any rank refused.
        """
        if not self.checked or self.size == 1:
            return
        reason = refused.encode()
        step = _cut(f"{step_id} ({operation})".encode(), HEADER_BYTES - LENGTH_BYTES)
        headers = self._exchange(step + len(reason).to_bytes(LENGTH_BYTES, "little"))
        steps = [_decode(header[:-LENGTH_BYTES]) for header in headers]
        if len(set(steps)) > 1:
            lines = "; ".join(f"rank {rank} is at {text}" for rank, text in enumerate(steps))
            raise SbpError(
                f"ranks take different steps: {lines}. Every rank must call the same "
                "conversions in the same order, and requires_grad_() on the same tensors, even "
                "on tensors whose placement does not contain the rank"
            )
        longest = max(int.from_bytes(header[-LENGTH_BYTES:], "little") for header in headers)
        if not longest:
            return
        reasons = [_decode(row) for row in self._exchange(reason.ljust(longest, b"\0"))]
        raise SbpError(
            reasons[0]
            if len(set(reasons)) == 1
            else "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why)
        )

    def _exchange(self, mine: bytes) -> list[bytes]:
        """Gather the bytes of all ranks, which must have equal lengths."""
        gathered = torch.empty(self.size * len(mine), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        group = self.link(range(self.size), "check").group
        try:
            all_gather_single(gathered, sent, group=group)
        except RuntimeError as error:
            raise broken(error, "check", "all_gather") from error
        return [bytes(row.tolist()) for row in gathered.view(self.size, len(mine))]

    def store(self, name: str) -> TimedStore:
        """Return a store with its own connection and keys, for use by a second thread."""
        return store_of_group(f"{self._keys}{name}")

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        if self.size > 1:
            group = self.link(range(self.size), "control").group
            try:
                dist.all_reduce(torch.zeros(1), group=group)
            except RuntimeError as error:
                raise broken(error, "barrier", "all_reduce") from error

    def close(self) -> None:
        """Destroy the process groups, except a default group that existed before.

        Without this call, gloo aborts some processes at exit. Raises RuntimeError if closing takes
        longer than 10 s, for example because a peer has just died.
        """
        if self._closed:
            return
        self._closed = True
        if self._shared is not None:
            self._shared.close()
        groups = [link.group for link in self._links.values()]
        close_process_groups(None if self._owns_default_group else groups)
        self._links.clear()

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RuntimeError as failed:
            if error is None:
                raise
            # The failed close is probably a consequence of the first error.
            error.add_note(f"then {failed}")


def broken(error: RuntimeError, step_id: str, collective: str) -> RuntimeError:
    """Convert an error from a collective in flight; the message begins with the step. The result is
    a PeerLostError, because the arguments were valid when the collective was issued. Only for
    device failures, and for sizes that differ between ranks (which only gloo detects, as "enforce
    fail"), the result is a plain RuntimeError.
    """
    words = re.sub(r"^\[/\S+\]\s*", "", str(error))
    device_failed = isinstance(error, vars(torch).get("AcceleratorError", ()))
    kind = RuntimeError if device_failed or "enforce fail" in words else PeerLostError
    return kind(f"{step_id}, {collective}: {words}")


def refused(error: RuntimeError, step_id: str, collective: str) -> RuntimeError:
    """Convert an error raised when a collective was issued; the message begins with the step.

    Returns PeerLostError only for torch's error types for a lost peer. Such errors can occur when a
    collective is issued, because NCCL connects at the first collective.
    """
    if isinstance(error, _names["DistError"]):
        return broken(error, step_id, collective)
    return RuntimeError(f"{step_id}, {collective}: {error}")


def _connect(
    make: Callable[[], Made], device: torch.device, timeout_s: float, step_id: str, what: str
) -> Made:
    """Call ``make`` with a time limit, because torch accesses the store without one."""

    def on_device() -> Made:
        if device.type == "cuda":  # new threads start on device 0
            torch.cuda.set_device(device)
        return make()

    try:
        return within(timeout_s + _SLACK_S, on_device, f"{step_id}, {what}")
    except PeerLostError:
        raise
    except RuntimeError as error:
        raise broken(error, step_id, what) from error


def _store_of_start(met: Meeting | None, timeout_s: float) -> dist.Store | None:
    """Return the store through which torch connects the ranks, or None for torch's default store.
    torchrun's store still contains the rank addresses of earlier launches, which torch 2.13 would
    use (pytorch/pytorch#135712).

    The returned store therefore uses a separate prefix for this launch and for each world that its
    processes start in turn. A store that rank 0 serves listens only at MASTER_ADDR where possible,
    unlike one that torch creates.
    """
    if met is None or met.store is None:
        return None
    store = cast("Any", met.store.torch_store).clone()  # torch's stub lacks ``clone``
    store.set_timeout(timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"torch/{met.start}", store)


def _cut(raw: bytes, length: int) -> bytes:
    """Pad or cut a string to ``length`` bytes; cut strings end with a digest, so that they stay
    distinct."""
    if len(raw) > length:
        digest = f"... {hashlib.sha256(raw).hexdigest()[:16]}".encode()
        raw = raw[: length - len(digest)] + digest
    return raw.ljust(length, b"\0")


def _decode(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")

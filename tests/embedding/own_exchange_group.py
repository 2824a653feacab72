"""Runs the exchange that ``own_exchange`` defines."""

from dataclasses import dataclass, field

import torch

from sbpflow.embedding.exchange.all_to_all import RowTransfer, received
from sbpflow.embedding.exchange.base import GRADIENTS, VECTORS, Group, GroupInFlight
from sbpflow.embedding.exchange.id_transfer import IDS
from sbpflow.embedding.ids.addresses import OwnerAddresses
from sbpflow.embedding.storage.lookup import Lookup
from tests.embedding.own_exchange import HOST


@dataclass(slots=True)
class Hop:
    """The distinct requested rows (``keys``), sorted by destination rank; their numbers of lookups
    (``counts``), each request's position in ``keys`` (``at``), the number of keys per destination
    (``named``), and the numbers of rows sent and received per rank (``out``, ``into``).
    """

    keys: torch.Tensor
    counts: torch.Tensor
    at: torch.Tensor
    named: torch.Tensor
    out: list[int] = field(default_factory=list)
    into: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class TwoHopInFlight(GroupInFlight):
    """A batch in flight: its ``hops`` so far, and the number of lookups that this owner
    received.
    """

    wanted: Lookup
    hops: list[Hop] = field(default_factory=list)
    num_lookups: int = 0


def make_hop(keys, counts, at, to, size) -> Hop:
    """Sort distinct ``keys`` by destination rank ``to``; return them as a hop."""
    order = torch.argsort(to, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    named = torch.bincount(to, minlength=size)
    return Hop(keys[order], counts[order], place[at], named)


class TwoHopGroup(Group[TwoHopInFlight]):
    """Runs the exchange for one stack, split by rows over all ranks."""

    num_received = 0  # number of lookups that owners received, over all batches

    def __init__(self, plan, boxing, context):
        super().__init__(plan, boxing, context)
        (self._stack,) = plan.stacks
        self._store = context.make_store(plan, 0, None)
        self._addresses = OwnerAddresses(
            self._stack, range(self.world.size), self.world.device, dtype=plan.dtype
        )
        self._bases = torch.tensor(self._addresses.bases)
        self._ids, self._vectors, self._gradients = (
            RowTransfer(self.world, channel) for channel in (IDS, VECTORS, GRADIENTS)
        )

    def step(self, batch, purpose, number):
        stages = self.plan.stages(batch.batch_size)
        return next(s.rows for s in stages if (s.purpose, s.round) == (purpose, number))

    def _owner(self, keys):
        return torch.searchsorted(self._bases[1:].contiguous(), keys, right=True)

    def stores(self):
        return [(self._stack, self._store)]

    def start_id_exchange(self, local, batch_size, *, number):
        wanted = self._addresses.make_lookup(local)
        batch = TwoHopInFlight(local=local, batch_size=batch_size, number=number, wanted=wanted)
        keys, at = wanted.rows(), wanted.inverse()
        counts = torch.bincount(at, minlength=keys.numel())
        self._count(batch, make_hop(keys, counts, at, self._owner(keys) % HOST, HOST))
        return batch

    def next_round(self, batch):
        found = received(self.step(batch, "ids", 0), batch.take_pending(), sum(batch.hops[0].into))
        keys, at = found[:, 0].unique(return_inverse=True)
        counts = torch.zeros_like(keys).index_add_(0, at, found[:, 1])
        owner = self._owner(keys)
        self._count(batch, make_hop(keys, counts, at, owner // HOST, self.world.size // HOST))

    def _count(self, batch, hop):
        batch.hops.append(hop)
        batch.pending = self._ids.start_counts(self.step(batch, "counts", batch.round), hop.named)

    def counts(self, batch):
        hop, step = batch.hops[-1], self.step(batch, "counts", batch.round)
        return torch.cat([hop.named, received(step, batch.take_pending(), hop.named.numel())])

    def exchange_ids(self, batch):
        hop = batch.hops[-1]
        size = hop.named.numel()
        hop.out, hop.into = batch.counts[:size], batch.counts[size:]
        pairs = torch.stack([hop.keys.long(), hop.counts], 1)
        step = self.step(batch, "ids", batch.round)
        batch.pending = self._ids.start(step, pairs, hop.out, hop.into)

    def receive_ids(self, batch):
        found = received(self.step(batch, "ids", 1), batch.take_pending(), sum(batch.hops[1].into))
        batch.num_lookups = int(found[:, 1].sum())
        batch.lookups = [Lookup(found[:, 0] - self._bases[self.world.rank])]

    def lookup(self, batch):
        TwoHopGroup.num_received += batch.num_lookups
        hop = batch.hops[1]
        rows = batch.lookup(self._store, batch.lookups[0], self._stack.optimizer.lr)
        step = self.step(batch, "vectors", 1)
        rows = rows.to(self.plan.comm_dtype)
        batch.pending = self._vectors.start(step, rows, hop.into, hop.out)

    def gather_outputs(self, batch):
        near, far = batch.hops
        rows = received(self.step(batch, "vectors", 1), batch.take_pending(), sum(far.out))
        step = self.step(batch, "vectors", 0)
        rows = self._vectors.start(step, rows[far.at], near.into, near.out)
        rows = received(step, rows, sum(near.out)).to(self.plan.dtype)
        vectors = batch.wanted.pool(rows, near.at)
        return vectors.view(batch.local.num_samples, self.plan.width)

    def send_grads(self, batch, grad):
        near, _ = batch.hops
        _, sums = batch.wanted.row_gradients(grad.reshape(-1, self._stack.dim))
        # Reorder the sums of gradients from row order to request order.
        order = torch.argsort(self._owner(batch.wanted.rows()) % HOST, stable=True)
        sums = sums[order].to(self.plan.grad_comm_dtype)
        step = self.step(batch, "gradients", 0)
        batch.pending = self._gradients.start(step, sums, near.out, near.into)

    def receive_grads(self, batch):
        near, far = batch.hops
        found = received(self.step(batch, "gradients", 0), batch.take_pending(), sum(near.into))
        sums = found.new_zeros(far.keys.numel(), self._stack.dim).index_add_(0, far.at, found)
        step = self.step(batch, "gradients", 1)
        sent = self._gradients.start(step, sums, far.out, far.into)
        self.keep(batch, batch.lookups, [received(step, sent, sum(far.into)).to(self.plan.dtype)])

    def update(self, step):
        batches, _, ((lookup, grad),) = self.take_collected()
        batches[-1].update(self._store, lookup, grad, self._stack.optimizer.lr, step)
        self._release(batches)

"""Predicts the cost of a plan's training step with the built-in prices of ``sbpflow/costs``.

The prediction needs no calibration, and is used to rank plans before a run. The frequencies of ids
come from the statistics of the data; without statistics, they are assumed to be those of typical
click data (``costs.ids``).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sbpflow.costs.counts import INDEX, NUM_FEATURES, Facts, join_counts, vector_of
from sbpflow.costs.ids import Floats
from sbpflow.costs.prices import NETWORK, REDUCED, SENT, SPREAD, WORK_MS, by_phase, transfer_ms
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import Exchange
from sbpflow.embedding.plan.id_statistics import IdFrequencies, curve_of_table, ids_per_sample
from sbpflow.runtime.ranks.topology import Topology
from sbpflow.sbp.layout import Layout


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a step. Each field is the maximum over the ranks, or for ``transfer_ms``, the
    sum of the maxima of all phases; ``sent_bytes`` includes ``network_bytes``, which go to other
    hosts.
    """

    work_ms: float
    transfer_ms: float
    sent_bytes: int
    network_bytes: int

    @property
    def ms(self) -> float:
        return self.work_ms + self.transfer_ms


def price_plan(
    plan: EmbeddingPlan,
    batch_size: int,
    topology: Topology | None = None,
    frequencies: Mapping[str, IdFrequencies] | None = None,
    accumulate: int = 1,
) -> Price:
    """Return the price of the embeddings for a global batch of ``batch_size``. An optimizer step,
    which every ``accumulate`` batches share, counts in equal parts for each of them.

    ``frequencies`` maps features to their id statistics. If there are several hosts, ranks are
    assumed to send within their host and to other hosts at the same time, and a call is assumed to
    have the latency of the slower link. A rank's work takes longer if the ``topology`` gives it a
    low speed. Without a ``topology``, all ranks are assumed to be on one host.
    """
    topology = topology or Topology.one_host(plan.world.size)
    link = topology.link(plan.world.ranks)
    far, reduced_far = topology.far_share, topology.far_ring_share
    hops = 1e-6 / topology.host_link.gb_per_s, 1e-6 / link.gb_per_s
    prices = transfer_ms(
        byte_ms=max((1 - far) * hops[0], far * hops[1]),
        call_ms=link.latency_ms,
        hop_byte_ms=hops,
        reduced_byte_ms=max(hops[0], reduced_far * hops[1]),
    )
    totals = plan_totals(plan, batch_size, frequencies or {}, accumulate)
    network = far * SPREAD + reduced_far * REDUCED + NETWORK
    return Price(
        work_ms=float((totals @ WORK_MS / np.array(topology.speeds or 1.0)).max()),
        transfer_ms=float((totals @ by_phase(prices).T).max(axis=0).sum()),
        sent_bytes=int((totals @ SENT).max()),
        network_bytes=int((totals @ network).max()),
    )


def plan_totals(
    plan: EmbeddingPlan,
    batch_size: int,
    frequencies: Mapping[str, IdFrequencies],
    accumulate: int = 1,
) -> Floats:
    """Return the work counts of each rank ([ranks, F]); see ``price_plan``."""
    totals = np.zeros((plan.world.size, NUM_FEATURES))
    ids = {f.name: batch_size * ids_per_sample(f, frequencies) for f in plan.features}
    most = {feature.name: batch_size * feature.hotness for feature in plan.features}
    # Weights are sent for all lists if any list has weights.
    with_weight = 1 + plan.dtype.itemsize / 4 if plan.weighted else 1.0
    # Owners receive the ids of a feature only once, so the tables that share an id transfer also
    # share its cost.
    sharing = Counter(
        name
        for group in plan.groups
        if group.kind.looks_up_all
        for table in group.tables
        for name in table.features
    )
    for group in plan.groups:
        for stack in group.stacks:
            for table, layout in zip(stack.tables, stack.layouts, strict=True):
                curve = curve_of_table(table, frequencies)
                lookups = sum(ids[name] for name in table.features)
                lengths, values_per_id = (batch_size, with_weight) if stack.ragged else (0, 1.0)
                hosts = layout.placement.shape[0] if group.kind.even else plan.world.size
                facts = Facts(
                    world_size=plan.world.size,
                    batch_size=batch_size,
                    num_rows=table.num_rows,
                    dim=table.dim,
                    vectors=len(table.features) / (len(group.uses) if group.pooled else 1),
                    lookups=lookups,
                    most_lookups=sum(most[name] for name in table.features),
                    sent_ids=sum(
                        (ids[name] * values_per_id + lengths) / max(1, sharing[name])
                        for name in table.features
                    ),
                    touched=min(curve.touched(lookups), table.num_rows),
                    wanted=min(curve.touched(lookups / plan.world.size), table.num_rows),
                    host_wanted=min(curve.touched(lookups / hosts), table.num_rows),
                    item=plan.dtype.itemsize,
                    row_item=plan.row_dtype.itemsize,
                    sent_item=group.comm_dtype.itemsize,
                    state=stack.optimizer.state_counts,
                    slot_share=1.0 if table.storage is None else table.storage.share,
                    shares_state=stack.optimizer.shares_row_state,
                    step_share=curve.step_share(lookups, accumulate),
                )
                _add_table(totals, group.kind, layout, stack.ranks_by_size[table.name], facts)
        for name in group.kind.calls:
            totals[:, INDEX[name]] += 1.0
        totals[:, INDEX["num_stacks"]] += len(group.stacks)
        totals[:, INDEX["num_squares"]] += len(group.shared_state) / accumulate
    totals[:, INDEX["num_id_calls"]] = bool(plan.sent_columns) + bool(plan.sent_lists)
    for output in plan.outputs:
        if sum(group.output.name == output.name for group in plan.groups) > 1:
            samples = batch_size / plan.world.size
            totals += vector_of(join_counts(samples, output.width, plan.dtype.itemsize))
    return totals


def _add_table(
    totals: Floats,
    exchange: Exchange,
    layout: Layout,
    ranks_by_size: Mapping[tuple[int, int], list[int]],
    facts: Facts,
) -> None:
    if exchange.even:
        hosts, width = layout.placement.shape
        totals += vector_of(exchange.home(facts, (hosts, width)))
        return
    parts = dict(zip(layout.split_dims, layout.placement.shape, strict=True))
    rows, columns = parts.get(0, 1), parts.get(1, 1)
    totals += vector_of(exchange.home(facts, (rows, columns)))
    if exchange.copies:
        return
    for (num_rows, width), ranks in ranks_by_size.items():
        # The effective number of row parts: this shard may be larger or smaller than others.
        cut = (facts.num_rows / num_rows, columns)
        totals[ranks] += vector_of(exchange.part(facts, cut, num_rows, width))

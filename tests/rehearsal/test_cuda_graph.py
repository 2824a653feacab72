"""Tests that CUDA graphs of steps or dense parts equal eager steps and refuse invalid work."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from sbpflow.config.schema import OptimizerConfig, RmsProp, TrainConfig
from sbpflow.config.train_options import ClipConfig, ScheduleConfig
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.errors import ConfigError, DataError
from sbpflow.run.model.spec import embedding_output
from sbpflow.run.model.torch_model import TorchModel
from sbpflow.run.planning.build_plan import plan_run
from tests.embedding.mixes import make_collection
from tests.embedding.test_mixes import RULES, mix_of
from tests.models.test_options import config_with
from tests.models.twins import MODELS
from tests.quick import quick
from tests.ranks import RanksFailed
from tests.training.wdl_case import DENSE, FIELDS, make_batches, make_config, make_job, to_device

STEPS, SHORT = 6, (4, 5)  # the fifth and the last batch have fewer rows


def with_graph(config, **parallel):
    return replace(
        config, parallel=replace(config.parallel, device="cuda", cuda_graph=True, **parallel)
    )


def train(world, config, warm_up_steps, steps=STEPS, before_step=None):
    """Return the losses; the weights, rows, and optimizer state; and the journal of each step."""
    from tests.rehearsal.journal import journal

    world.checked = False
    job = make_job(world, config)
    job.trainer.graphs._graphs.warm_up_steps = warm_up_steps
    losses, journals, kept = [], [], []
    for number, batch in enumerate(make_batches(STEPS, config.data.batch_size)[:steps]):
        mine = batch.part(world.rank, world.size)
        rows = to_device(mine, world.device)
        # Keep the batch of this step, in which the graph is captured, to check below that replays
        # do not overwrite it.
        if number == warm_up_steps:
            kept = [(rows.labels, mine.labels), (rows.dense, mine.dense), (rows.ids, mine.ids)]
        if before_step is not None:
            before_step(job, number)
        with journal() as made:
            losses.append(job.trainer.step(rows))
        journals.append(made)
    assert all(torch.equal(there.cpu(), here) for there, here in kept)
    weights = {
        name: parameter.part.detach().cpu() for name, parameter in job.model.parameters.items()
    }
    for stored in job.embeddings.stored():
        shard = stored.shard
        place = shard.table.name, shard.row_start, shard.col_start
        weights[place] = stored.weights.cpu()
        weights |= {(*place, name): state.cpu() for name, state in stored.state.items()}
    return [float(loss) for loss in losses], weights, journals


def both_ways(world, config, captured_at=1, steps=STEPS, before_step=None):
    """Train with a graph and with eager steps. Return the losses and op counts of both, the graph's
    host waits, whether the weights are equal, and the graph's ops on the main stream.
    """
    losses, weights, journals = train(world, config, captured_at, steps, before_step)
    plain, same, plain_journals = train(world, config, steps, steps)
    equal = [torch.equal(value, same[name]) for name, value in weights.items()]
    ops, plain_ops = ([one.num_ops for one in all_of] for all_of in (journals, plain_journals))
    waits = [[entry.where for entry in made.syncs] for made in journals]
    on_main = [(made.ops - made.elsewhere).total() for made in journals]
    return losses, plain, ops, plain_ops, waits, len(equal) > 4 and all(equal), on_main


def check(found, captured_at=1, most=None):
    """Check the run; ``most`` is the maximum number of ops that a replayed step submits to the main
    stream.
    """
    for losses, plain, ops, plain_ops, waits, equal, on_main in found:
        assert losses == plain
        assert equal
        for step in range(len(ops)):
            replayed = step > captured_at and step not in SHORT
            assert (ops[step] < plain_ops[step] - 50) == replayed, (ops, plain_ops)
            assert not replayed or most is None or on_main[step] <= most, on_main
        assert [n for n, lines in enumerate(waits) if lines] == [captured_at], waits


SCHEDULE = ScheduleConfig(warmup_steps=4)
OPTIMIZERS = {
    "adam": OptimizerConfig(dense=DENSE["adam"], schedule=SCHEDULE),
    "rmsprop": OptimizerConfig(dense=RmsProp(momentum=0.5), schedule=SCHEDULE),
    "sgd": OptimizerConfig(dense=DENSE["sgd"], schedule=SCHEDULE),
    "adam, clipped": OptimizerConfig(
        dense=DENSE["adam"], clip=ClipConfig(norm=0.5, rows=True), schedule=SCHEDULE
    ),
}


@pytest.mark.parametrize("optimizer", quick(OPTIMIZERS, lambda n: n % 2 == 0))
def test_replays_equal_eager_steps(rehearsed_ranks, optimizer):
    config = with_graph(make_config("1", "adagrad", dtype="float32"))
    config = replace(config, optimizer=OPTIMIZERS[optimizer])
    config = replace(config, model=replace(config.model, dropout=0.5))
    check(rehearsed_ranks(1, both_ways, config), most=12 if optimizer in CAPTURED else 60)


CAPTURED = ("adam", "rmsprop")
TABLES = {  # optimizer of the deep tables: row dtype
    "sgd": None,
    "adagrad": "float16",
    "rowwise_adagrad": "bfloat16",
    "lazy_adam": "bfloat16",
}


@pytest.mark.parametrize("sparse", quick(TABLES, lambda n: n % 2 == 0))
def test_tables_are_updated_in_the_graph(rehearsed_ranks, sparse):
    """The learning rate changes in every step, except for FTRL, which requires a constant rate."""
    wide = Ftrl() if sparse == "adagrad" else None
    config = make_config("1", sparse, dtype="float32", dense="adam", wide=wide)
    config = with_graph(config, table_dtype=TABLES[sparse])
    if wide is None:
        optimizer = replace(config.optimizer, schedule=SCHEDULE)
        config = replace(config, optimizer=optimizer)
    check(rehearsed_ranks(1, both_ways, config), most=12)


def both_ways_watched(world, config):
    """Install a row listener in the third step, as during a background save."""
    notified = []

    def before_step(job, number):
        for store, _ in job.embeddings.stores():
            store.kernel.listeners[:] = [notified.append] if number == 2 else []

    losses, plain, *_, equal, on_main = both_ways(world, config, before_step=before_step)
    return losses == plain, equal, len(notified), on_main


def test_rows_with_listeners_are_updated_eagerly(rehearsed_ranks):
    config = with_graph(make_config("1", "adagrad", dtype="float32", dense="adam"))
    ((losses, weights, notified, on_main),) = rehearsed_ranks(1, both_ways_watched, config)
    assert losses
    assert weights
    assert notified == 2  # one notification from the deep and one from the wide store
    assert on_main[3] < 20 < 100 < on_main[2]


def wrong_id(world, config):
    """Train on an out-of-range id; return the error, and whether the step changed anything."""
    job = make_job(world, config)
    job.trainer.graphs._graphs.warm_up_steps = 1
    batches = [to_device(batch, world.device) for batch in make_batches(4, config.data.batch_size)]
    for batch in batches[:2]:
        job.trainer.step(batch)
    batches[2].ids[3, 1] = 11
    before = [stored.weights.clone() for stored in job.embeddings.stored()]
    with pytest.raises(DataError) as refused:
        job.trainer.step(batches[2])
    after = [stored.weights for stored in job.embeddings.stored()]
    return str(refused.value), all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_bad_id_is_reported_before_a_replay(rehearsed_ranks):
    config = with_graph(make_config("1", "adagrad", dtype="float32", dense="adam"))
    ((words, unchanged),) = rehearsed_ranks(1, wrong_id, config)
    assert "field C2 has id 11 in row 3" in words
    assert unchanged


def logged_at_start(world, config):
    return make_job(world, config).trainer.graphs.describe()


def test_log_explains_what_is_not_replayed(rehearsed_ranks):
    config = with_graph(make_config("1", "adagrad", dtype="float32", dense="adam"))
    (all_of_it,) = rehearsed_ranks(1, logged_at_start, config)
    assert all_of_it == "the whole step after sorting the ids is replayed"
    plain = replace(config, optimizer=OptimizerConfig(dense=DENSE["sgd"]))
    (but_sgd,) = rehearsed_ranks(1, logged_at_start, plain)
    assert but_sgd.endswith("is replayed, without the dense optimizer")
    for of_two in rehearsed_ranks(2, logged_at_start, config):
        assert of_two.startswith(
            "the dense part is replayed, without the dense optimizer; the tables"
        )
        assert of_two.endswith("vectors and gradients are exchanged between ranks")


def why_not(world, mix):
    return make_collection(world, mix).why_not_captured()


def test_lists_of_ids_are_not_captured(rehearsed_ranks):
    mix = replace(mix_of("columns", 8, RULES[2], dtype=torch.float32), world_size=1)
    (words,) = rehearsed_ranks(1, why_not, mix)
    assert "has lists of ids, whose total length varies" in words


def both_ways_with_triton(world, config):
    from importlib import import_module

    from tests.rehearsal.install import dropout_kernels

    dropout = import_module("sbpflow.tensor.ops.dropout")
    real, kernels = dropout.find_kernels, dropout_kernels()
    dropout.find_kernels = lambda: kernels
    try:
        by_triton = both_ways(world, config)
    finally:
        dropout.find_kernels = real
    return by_triton, both_ways(world, config)


def test_captured_triton_dropout_equals_torch(rehearsed_ranks):
    pytest.importorskip("triton")
    config = with_graph(make_config("1", "adagrad", dtype="float32", dense="adam"))
    config = replace(config, model=replace(config.model, dropout=0.5))
    ((by_triton, by_torch),) = rehearsed_ranks(1, both_ways_with_triton, config)
    check([by_triton])
    assert by_triton[0] == by_torch[0]
    assert by_triton[3][1] < by_torch[3][1], "one op each way in place of many"


def both_ways_with_tritons_tables(world, config):
    from importlib.util import find_spec

    from sbpflow.embedding.rules import kernels

    absent, kernels.find_spec = kernels.find_spec, find_spec
    try:
        return both_ways(world, config, steps=4)
    finally:
        kernels.find_spec = absent


@pytest.mark.parametrize("sparse", quick(["rowwise_adagrad", "lazy_adam"], lambda n: n == 0))
def test_triton_table_kernels_are_replayed(rehearsed_ranks, sparse):
    pytest.importorskip("triton")
    config = make_config("1", sparse, dtype="float32", dense="adam", kernel="triton", batch_size=12)
    config = with_graph(config, table_dtype="bfloat16")
    optimizer = replace(config.optimizer, schedule=SCHEDULE)
    check(rehearsed_ranks(1, both_ways_with_tritons_tables, replace(config, optimizer=optimizer)))


def test_gradients_of_several_ranks_leave_the_graph(rehearsed_ranks):
    config = with_graph(make_config("3", "rowwise_adagrad", dtype="float32", dense="adam"))
    config = replace(config, model=replace(config.model, dropout=0.5))
    check(rehearsed_ranks(2, both_ways, config))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sorted({*MODELS} - {"wdl", "dcnv2"}))
def test_interactions_and_norms_can_be_captured(rehearsed_ranks, name):
    check(rehearsed_ranks(1, both_ways, with_graph(config_with(name, "1")), 1, 3))


class Net(nn.Module):
    """A model with an operation, selected by ``odd``, that a graph cannot contain."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.odd = odd
        self.layers = nn.Sequential(
            nn.Linear(4 * 4 + 3, 9), nn.LayerNorm(9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 1)
        )

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        x = torch.cat([vectors["deep"], dense], 1)
        if self.odd == "item":
            x = x * float(dense[0, 0] > -100)
        if self.odd == "mask":
            x = x.clone()
            x[dense[:, 0] > 100] = x[dense[:, 0] > 100] * 2
        if self.odd == "upload":
            x = x * torch.tensor(1.0, device=x.device)
        return self.layers(x)


@dataclass(frozen=True, kw_only=True)
class NetConfig:
    name: str = "own"
    odd: str = ""

    def spec(self, fields):
        outputs = (embedding_output("deep", fields.sparse, dim=4),)
        return TorchModel(outputs=outputs, make=lambda: Net(self.odd))


def net_config(odd=""):
    config = with_graph(make_config("1", "sgd", dtype="float32", dense="adam"))
    return replace(config, model=NetConfig(odd=odd))


def test_module_with_dropout_can_be_captured(rehearsed_ranks):
    check(rehearsed_ranks(1, both_ways, net_config(), 3), captured_at=3)


@pytest.mark.parametrize("odd", ["item", "mask", "upload"])
def test_module_that_waits_is_rejected_with_the_setting(rehearsed_ranks, odd):
    with pytest.raises(RanksFailed) as failed:
        rehearsed_ranks(1, train, net_config(odd), 3)
    assert "ConfigError: parallel.cuda_graph: true is not possible, because" in str(failed.value)
    assert "use parallel.cuda_graph=false" in str(failed.value)


def test_configurations_that_cannot_be_captured_are_rejected_at_start():
    config = make_config("1", "sgd", dtype="float32")
    with pytest.raises(
        ConfigError, match=r"parallel.cuda_graph: true is not .* on cpu, which has no CUDA graphs"
    ):
        plan_run(with_graph(config), FIELDS, world_size=1, device_type="cpu")
    with pytest.raises(ConfigError, match=r"with parallel.checked: true.*parallel.checked=false"):
        with_graph(config, checked=True)
    with pytest.raises(ConfigError, match=r"with train.accumulate: 2.*train.accumulate=1"):
        replace(with_graph(config), train=TrainConfig(accumulate=2))


def build(world, config):
    with pytest.raises(ConfigError) as refused:
        make_job(world, config)
    return str(refused.value)


def test_dense_part_with_transfers_is_rejected(rehearsed_ranks):
    split = make_config("1", "sgd", dtype="float32", dense_layouts={"mlp.0.*": "S(0)"})
    normed = make_config("1", "sgd", dtype="float32")
    normed = replace(normed, model=replace(normed.model, norm="batch"))
    for config in (split, normed):
        for words in rehearsed_ranks(2, build, with_graph(config)):
            assert "the dense part communicates" in words
            assert words.endswith("or use parallel.cuda_graph=false")


def captured(work, graph=None, *, stream=None, mode="thread_local"):
    graph = graph or torch.cuda.CUDAGraph()
    stream = stream or torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        out = work()
    return graph, out


X = [3.0, 4.0]


def waits(world):
    x = torch.tensor(X, device="cuda")
    captured(lambda: float(x[0]))


def uploads(world):
    captured(lambda: torch.ones(2).to("cuda"))


def size_of_data(world):
    x = torch.tensor(X, device="cuda")
    captured(x.nonzero)


def sends(world):
    x = torch.tensor(X, device="cuda")
    captured(lambda: torch.distributed.all_reduce(x))


def unknown_generator(world):
    x, generator = torch.tensor(X, device="cuda"), torch.Generator("cuda")
    captured(lambda: x.bernoulli_(0.5, generator=generator))


def seeded_inside(world):
    graph, generator = torch.cuda.CUDAGraph(), torch.Generator("cuda")
    graph.register_generator_state(generator)
    captured(lambda: generator.manual_seed(5), graph)


def other_stream(world):
    captured(lambda: torch.cuda.current_stream().wait_stream(torch.cuda.Stream()))


def global_mode(world):
    captured(lambda: None, mode="global")


def plain_adam(world):
    x = torch.tensor(X, device="cuda").requires_grad_()
    x.grad = torch.ones_like(x)
    captured(torch.optim.Adam([x]).step)


def input_given_back(world):
    x = torch.tensor(X, device="cuda")
    graph, _ = captured(lambda x=x: x + 1)
    del x
    graph.replay()


REFUSED = {
    waits: "in a captured region: the host waits",
    uploads: "a copy between host and device",
    size_of_data: "the host waits (nonzero)",
    sends: "all_reduce, a collective",
    unknown_generator: "uses a generator that the graph does not know",
    seeded_inside: "a generator seeded anew",
    other_stream: "a wait for another stream",
    global_mode: "capture_error_mode global",
    plain_adam: "Adam without capturable=True",
    input_given_back: "memory that was freed since its capture",
}


def refusals(world):
    from tests.rehearsal.install import forget

    found = {}
    for case in REFUSED:
        try:
            case(world)
            found[case.__name__] = "nothing was raised"
        except RuntimeError as error:
            found[case.__name__] = str(error)
        forget()
    return found


def test_operations_that_cannot_be_captured_are_rejected(rehearsed_ranks):
    (found,) = rehearsed_ranks(1, refusals)
    for case, words in REFUSED.items():
        assert words in found[case.__name__], f"{case.__name__}: {found[case.__name__]}"


def replays(world):
    x, total = torch.tensor(X, device="cuda"), torch.zeros(2, device="cuda")
    graph, y = captured(lambda: total.add_(x * 2).clone())
    seen = [(y.tolist(), total.tolist())]
    for value in (1.0, 10.0):
        x.fill_(value)
        graph.replay()
        seen.append((y.tolist(), total.tolist()))
    return str(seen)


def test_only_replays_compute(rehearsed_ranks):
    (seen,) = rehearsed_ranks(1, replays)
    assert seen == (
        "[([nan, nan], [0.0, 0.0]), ([2.0, 2.0], [2.0, 2.0]), ([22.0, 22.0], [22.0, 22.0])]"
    )

"""Tests ``parallel.storage``: refused settings, the plan, its memory, and the forecast."""

import errno
import re
import resource
import socket
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.server_processes import ServerProcesses
from sbpflow.commands import local_servers
from sbpflow.commands.embedding_server import embedding_server
from sbpflow.config.parse import build
from sbpflow.config.table_rules import ParallelConfig, TableRule
from sbpflow.embedding.cache.records import RECORDS, host_records
from sbpflow.embedding.cache.server import EmbeddingServer
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.plan.out_of_range import SUBSTITUTES
from sbpflow.embedding.plan.row_storage import StorageRule
from sbpflow.embedding.storage.store import DeviceStore
from sbpflow.errors import ConfigError, DataError
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.cache_forecast import forecast
from sbpflow.run.planning.explain import describe, format_plan
from sbpflow.run.planning.explain_caches import rate_lines
from sbpflow.run.planning.plan_file import plan_from_json, plan_to_json
from sbpflow.run.planning.storage import AUTO_LOOKAHEAD
from sbpflow.run.planning.text import format_size
from sbpflow.runtime.compute.devices import memory_bytes
from tests.objects.server import free_port
from tests.training.test_resume import CONFIG
from tests.training.test_stores import FIELDS, batch_of
from tests.training.wdl_case import FIELDS as SMALL
from tests.training.wdl_case import make_config, make_job

FILE = {"kind": "file", "cache": "20%"}


def config_with(storage, *, lookahead="auto", scheme="3", tables=None, **more):
    config = make_config(scheme, "rowwise_adagrad", dim=8, tables=tables, **more)
    rules = build(ParallelConfig, {"scheme": scheme, "storage": storage}).storage
    parallel = replace(config.parallel, storage=rules)
    return replace(config, parallel=parallel, train=replace(config.train, lookahead=lookahead))


def plan_of(storage, *, size=2, device="cpu", fields=FIELDS, **more):
    return plan_run(config_with(storage, **more), fields, world_size=size, device_type=device)[1]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"kind": "disk", "cache": "10%"}, r"kind: 'disk' is not one of device, host, file"),
        (
            {"kind": "file"},
            r"cache is not given, but kind: file needs a cache; for example, 10% or \"4 GB\"",
        ),
        ({"kind": "file", "cache": "0%"}, r"cache must be above 0 and at most 100%, got 0%"),
        ({"kind": "file", "cache": "120%"}, r"cache must be above 0 and at most 100%, got 120%"),
        (
            {"kind": "file", "cache": "4 gigabytes"},
            r"cache: '4 gigabytes' is neither a percentage nor a si",
        ),
        ({"kind": "device", "cache": "10%"}, r"cache: 10% has no effect with kind: device, which"),
        (
            {"kind": "host", "cache": "10%", "path": "x"},
            r"path has no effect with kind: host; use kind: file, or",
        ),
        (
            {"kind": "servers", "cache": "10%", "addresses": ["a..b:7070"], "secret_file": "x"},
            r"addresses: 'a\.\.b' is not a valid host name",
        ),
    ],
)
def test_impossible_rules_are_rejected(rule, message):
    with pytest.raises(ConfigError, match=rf"storage\.deep\.\*\.{message}"):
        config_with({"deep.*": rule})


def test_a_server_needs_a_finite_amount_of_memory():
    for value in ("0", "inf", "nan", "1e300"):
        with pytest.raises(ConfigError, match="--memory-gb must be above 0 and at most 1,000,000"):
            embedding_server(["--config", "x.yaml", "--index", "1/1", "--memory-gb", value])


def test_tables_that_cannot_be_cached_are_refused_with_a_reason():
    key = r"parallel\.storage\.deep\.\*"
    with pytest.raises(ConfigError, match=rf"{key}\.kind: host is not .* cpu, .* use kind: file"):
        plan_of({"deep.*": {"kind": "host", "cache": "10%"}})
    copied = {"deep.C2": TableRule(sbp="B")}
    with pytest.raises(ConfigError, match=rf"{key}: table deep.C2 is .* on 2 ranks.* use S\(0\)"):
        plan_of({"deep.*": FILE}, tables=copied)
    plan_of({"deep.*": FILE}, tables=copied, size=1)
    text = r"storage\.wide\.\*: a row of table wide\.C1xC2 .* 16 bytes, but"
    with pytest.raises(ConfigError, match=text):
        plan_of({"wide.*": FILE})
    with pytest.raises(ConfigError, match=r"parallel\.storage\.deep\.X9 matches no table"):
        plan_of({"deep.X9": FILE})
    with pytest.raises(
        ConfigError, match=rf"train\.lookahead: 1 is too small with {key}, .* use 2 or more"
    ):
        plan_of({"deep.*": FILE}, lookahead=1)


def test_lookahead_is_long_only_with_caches():
    assert plan_of({}).lookahead == 1
    assert plan_of({"deep.*": {"kind": "device"}}).lookahead == 1
    assert plan_of({"deep.*": FILE}).lookahead == AUTO_LOOKAHEAD
    assert plan_of({"deep.*": FILE}, lookahead=5).lookahead == 5


def test_the_last_pattern_wins_and_each_storage_has_its_own_stacks():
    plan = plan_of(
        {"deep.*": FILE, "deep.C2": {"kind": "device"}, "deep.C3": {**FILE, "cache": "1 MB"}}
    )
    storages = {}
    for group in plan.embeddings.groups:
        for stack in group.stacks:
            assert len({table.storage for table in stack.tables}) == 1
            storages |= {table.name: table.storage for table in stack.tables}
    assert storages["deep.C1"].share == 0.2
    assert storages["deep.C2"] is storages["wide.C1xC2"] is None
    assert storages["deep.C3"].share == 1.0
    assert plan_from_json(plan_to_json(plan)) == plan


def test_a_pattern_that_later_patterns_replace_has_no_effect():
    plan = plan_of({"deep.C1": {**FILE, "cache": "1 MB"}, "deep.*": FILE})
    for group in plan.embeddings.groups:
        for table in group.tables:
            if table.name.startswith("deep."):
                assert table.storage.share == 0.2


def rules_of_records(world, storage, scratch):
    """Build a job; return the rules from which the records of its tables are created, by key."""
    rules = {}

    def own_records(new):
        rules[new.key] = new.rule
        return host_records(new.num_rows, new.layout)

    config = config_with(storage)
    with patch.dict(RECORDS, file=own_records):
        make_job(world, replace(config, run=replace(config.run, dir=scratch)))
    return rules


def test_records_are_created_from_the_rule_of_their_table(ranks, tmp_path):
    """A storage kind can therefore have keys of its own."""
    storage = {"deep.*": {**FILE, "path": "x"}, "deep.C1": {**FILE, "cache": "40%"}}
    (rules,) = ranks(1, rules_of_records, storage, tmp_path)
    assert rules == {
        "parallel.storage.deep.*": StorageRule(kind="file", cache="20%", path=Path("x")),
        "parallel.storage.deep.C1": StorageRule(kind="file", cache="40%", path=tmp_path),
    }


def built(world, storage, scratch):
    config = config_with(storage)
    job = make_job(world, replace(config, run=replace(config.run, dir=scratch)))
    facts = describe(job.plan)
    kinds = sorted({type(store).__name__ for _, store in job.embeddings._stores()})
    slots = sum(
        store.num_slots * store._mover.layout.num_bytes
        for _, store in job.embeddings._stores()
        if isinstance(store, CachedStore)
    )
    device = sum(
        store.memory_bytes
        for _, store in job.embeddings._stores()
        if isinstance(store, DeviceStore)
    )
    rank = facts["ranks"][world.rank]
    return kinds, slots + device, rank["table_bytes"] + rank["table_state_bytes"]


def test_a_run_builds_the_planned_stores_and_memory_counts_slots(ranks, memory):
    whole = describe(plan_of({}, fields=SMALL))["ranks"][0]
    for kinds, held, planned in ranks(2, built, {"deep.*": FILE}, memory):
        assert kinds == ["CachedStore", "DeviceStore"]
        assert planned == pytest.approx(held, abs=8)
        assert planned < 0.7 * (whole["table_bytes"] + whole["table_state_bytes"])


def test_explain_shows_the_caches_and_what_they_will_fetch():
    plan = plan_of({"deep.*": FILE}, lookahead=8)
    found = forecast(plan, (batch_of(number).ids for number in range(40)))
    (cached,) = found
    assert cached == "deep.C1"
    for rank in (0, 1):
        rows = found[cached][rank]
        assert rows["unique"] >= rows["fetched"] >= rows["read"] >= 0
        assert rows["fetched"] > 0
    unique = [
        np.unique(batch_of(number).ids[:, :4].numpy() * 8 + np.arange(4)).size
        for number in range(20, 40)
    ]
    assert sum(found[cached][rank]["unique"] for rank in (0, 1)) == pytest.approx(np.mean(unique))
    facts = describe(plan, found)
    cache = facts["caches"][0]
    assert cache["kind"] == "file"
    assert cache["slots"] == -(-cache["rows"] // 5)
    assert cache["tables"] == ["deep.C1", "deep.C2", "deep.C3", "deep.C4"]
    assert cache["slot_bytes"] == cache["slots"] * (8 * 8 + 8)
    text = format_plan(plan, forecast=found)
    assert "cached on rank" in text
    read, written = cache["read_bytes_per_step"], cache["written_bytes_per_step"]
    assert read == round(found[cached][0]["read"] * 72)
    lines = rate_lines(facts["caches"], 20.0, Path("runs/a"))
    for shown, speed in ((text, 1), ("\n".join(lines), 20)):
        sizes = [format_size(speed * size) for size in (max(read, written), read + written)]
        assert f"the storage must sustain {sizes[0]}/s, or {sizes[1]}/s if" in shown
    assert lines[0] == "at 20 batches/s, the median of the run in runs/a:"
    assert len(lines) == 3
    assert "cached on rank" not in format_plan(plan_of({}))
    small = {"deep.*": {"kind": "file", "cache": "0.5%"}}
    with pytest.raises(
        ConfigError,
        match=r"the cache of tables deep\.C1 and 3 others has 7 slots .* on rank 0, .*use",
    ):
        forecast(plan_of(small), (batch_of(number).ids for number in range(40)))


def test_the_advised_cache_fits_all_batches_on_all_ranks():
    def batches():
        for number in range(12):  # later batches have more distinct ids
            yield batch_of(number).ids % (1 + 3 * number)

    with pytest.raises(ConfigError) as refused:
        forecast(plan_of({"deep.*": {"kind": "file", "cache": "0.5%"}}), batches())
    advised = re.search(r"use ([\d.]+%) or more", str(refused.value))[1]
    assert forecast(plan_of({"deep.*": {"kind": "file", "cache": advised}}), batches())


@pytest.mark.parametrize("policy", ["clamp", "hash"])
def test_explain_counts_the_rows_that_replace_bad_ids(policy):
    config = config_with({"deep.*": FILE})
    config = replace(config, data=replace(config.data, out_of_range=policy))
    _, plan = plan_run(config, FIELDS, world_size=2, device_type="cpu")
    batches = [batch_of(number).ids.long() + 300 for number in range(12)]
    limits = torch.tensor([field.rows for field in FIELDS.ids])
    replaced = [SUBSTITUTES[policy](ids, limits) for ids in batches]
    assert not all(torch.equal(*pair) for pair in zip(batches, replaced, strict=True))
    assert forecast(plan, batches) == forecast(plan, replaced)
    with pytest.raises(DataError, match=r"field C\d has id \d+ in row"):
        forecast(plan_of({"deep.*": FILE}), batches)


def test_local_servers_share_the_memory_and_have_a_private_secret(monkeypatch):
    commands = []

    def start(words, listener):
        commands.append(words)
        (secret,) = [word for word in words if "secret_file=" in word]
        assert Path(secret.partition("=")[2]).stat().st_mode & 0o777 == 0o600

    monkeypatch.setattr(local_servers, "_start", start)
    monkeypatch.setattr(local_servers, "_stop", lambda server: None)
    rule = "parallel.storage.deep.*={kind: servers, cache: 10%}"
    with local_servers.local_servers(Path(CONFIG), [rule, "data.path=x"], 3):
        sizes = [float(words[words.index("--memory-gb") + 1]) for words in commands]
    assert len(sizes) == 3
    assert sum(sizes) * 1e9 == pytest.approx(memory_bytes("cpu"), rel=1e-6)


def test_the_servers_of_a_benchmark_have_a_private_secret(tmp_path):
    (tmp_path / "secret").touch(mode=0o644)
    assert ServerProcesses(tmp_path, [], []).secret_file.stat().st_mode & 0o777 == 0o600


def serve_one(tmp_path):
    """Run an embedding server on a free port."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    place = f"addresses: ['127.0.0.1:{free_port()}'], secret_file: {secret}"
    rule = f"parallel.storage.deep.*={{kind: servers, cache: 10%, {place}}}"
    return embedding_server(["--config", CONFIG, "--index", "0/1", rule, "data.path=x"])


def test_a_server_may_open_all_the_files_that_the_system_permits(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(
        EmbeddingServer,
        "serve",
        lambda server, listener: limits.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1, 1024), hard))
    try:
        assert serve_one(tmp_path) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert limits == [hard]


def test_a_server_whose_port_is_taken_while_it_starts_says_so(tmp_path, monkeypatch):
    def listen(sock, backlog):
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(socket.socket, "listen", listen)
    with pytest.raises(ConfigError, match=r"cannot listen on 127.* \(Address already in use\)"):
        serve_one(tmp_path)

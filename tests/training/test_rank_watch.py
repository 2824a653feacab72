"""Tests the comparison of the ranks' times, and the values for Prometheus."""

import json
import logging
import socket
import time
import urllib.error
import urllib.request

import pytest

from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import TrainConfig
from sbpflow.config.train_options import PrometheusConfig
from sbpflow.errors import ConfigError
from sbpflow.run.report.events import check_event
from sbpflow.training.health import LossWatch
from sbpflow.training.loop import fit
from sbpflow.training.prometheus import PrometheusReporter
from sbpflow.training.rank_watch import RankTimes, RankWatch
from sbpflow.training.report import MetricsWriter, Report
from sbpflow.training.reporters import Reporters
from tests.training.test_health import Split
from tests.training.test_move_times import Keeping
from tests.training.wdl_case import FIELDS, NoCheckpoints, make_batches, make_config, make_job

HOSTS = ["a", "a", "b", "b"]


def times(step, waits, data=(0.0, 0.0, 0.0, 0.0), total=10.0):
    return RankTimes(step, HOSTS, [total] * 4, list(data), list(waits))


def test_the_slow_rank_is_the_one_that_waits_least():
    assert times(1, [5.0, 5.0, 0.5, 5.0]).slow_rank == 2
    assert times(1, [5.0, 5.2, 4.8, 5.0]).slow_rank is None
    # Rank 2 works 30 % longer than the others, but this is only 3 % of a step.
    assert times(1, [9.0, 9.0, 8.7, 9.0]).slow_rank is None


def _warnings(world, intervals, steps=500):
    """Return this rank's messages and transfers. Each interval lists (``step_ms``, ``data_ms``,
    ``wait_ms``) by rank.
    """
    watch, messages = RankWatch(Boxing(world)), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("sbpflow.training.rank_watch")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    world.log.records.clear()
    names = ("step_ms", "data_ms", "wait_ms")
    for number, by_rank in enumerate(intervals, 1):
        extra = dict(zip(names, by_rank[world.rank], strict=True))
        watch.step(steps * number, 0.5, 1.0, extra)
    logger.removeHandler(handler)
    return messages, [record.step_id for record in world.log.records]


def test_a_persistently_slow_rank_is_reported_once_with_its_host(ranks):
    even, slow = [(10, 0, 4), (10, 0, 4)], [(10, 0, 6), (10, 0, 1)]
    reads = [(10, 0, 6), (10, 5, 1)]
    (messages, records), (others, _) = ranks(
        2, _warnings, [even, slow, slow, even, slow, slow, slow, slow, even, reads, reads, reads]
    )
    assert others == [], "only rank 0 reports"
    assert len(messages) == 3
    assert messages[0].startswith(f"rank 1 on {socket.gethostname()} is slow: its own work takes 9")
    assert "(other ranks: 4.0 ms), and other ranks wait up to 6.0 ms for it" in messages[0]
    assert messages[1] == "step 4500: rank 1 is no longer slow"
    assert "5.0 ms of its own work is reading data" in messages[2]
    times_gathered = [record for record in records if record.startswith("ranks/")]
    assert len(times_gathered) == 12, "one transfer per interval"


class Sleepy(Split):
    """Slows down reading on one rank."""

    def epoch(self, epoch):
        for batch in super().epoch(epoch):
            time.sleep(0.15 if self.is_slow else 0)
            yield batch


def _trained(world, folder):
    config = make_config("3", "sgd")
    job, kept = make_job(world, config), Keeping()
    loader, collected = Sleepy(world, make_batches(8, 30)[:8]), []
    loader.is_slow = world.rank == 1
    fit(
        job.trainer,
        {"train": loader},
        TrainConfig(log_every=4, eval_every=0),
        boxing=job.boxing,
        watch=LossWatch(job.boxing, FIELDS.dense),
        reporter=Reporters([kept, RankWatch(job.boxing, collected.append)]),
        checkpoints=NoCheckpoints(),
    )
    return [extra["wait_ms"] for extra in kept.extra], collected


@pytest.mark.parametrize(("ms", "steps", "enough"), [(1000, 1, 60), (10, 250, 6)])
def test_a_warning_needs_three_windows_of_20_steps_and_5_seconds(ranks, ms, steps, enough):
    slow = [(ms, 0, 0.6 * ms), (ms, 0, 0.1 * ms)]
    for number in (enough - 1, enough):
        (messages, _), _ = ranks(2, _warnings, [slow] * number, steps)
        assert len(messages) == (number == enough)


def test_training_measures_waits_and_finds_the_rank_that_others_wait_for(ranks, tmp_path):
    (_, collected), (_, same) = ranks(2, _trained, tmp_path)
    assert [times.step for times in collected] == [2, 4, 8]
    assert [times.wait_ms for times in collected] == [times.wait_ms for times in same]
    last = collected[-1]
    assert last.slow_rank == 1
    assert last.data_ms[1] > 90, "3 of 4 steps read a batch ahead"
    assert last.wait_ms[0] > 20, "rank 0 waits for rank 1"
    assert last.step_ms[0] == pytest.approx(last.step_ms[1], rel=0.5)


def test_the_ranks_event_is_valid(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Report, "__init__", lambda self: None)
        report = Report()
        report._metrics = MetricsWriter(tmp_path, rank=0)
        report.ranks(times(3, [5.0, 5.0, 0.5, 5.0]))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    event = check_event(json.loads(line))
    assert event["rank_wait_ms"] == [5.0, 5.0, 0.5, 5.0]
    assert (event["slow_rank"], event["slow_host"]) == (2, "b")


def _get(reporter, path="/metrics", host="127.0.0.1"):
    with urllib.request.urlopen(f"http://{host}:{reporter.port}{path}", timeout=20) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_prometheus_reads_the_last_values():
    reporter = PrometheusReporter(PrometheusConfig(port=0))
    try:
        reporter.step(10, 0.5, float("nan"), {"wait_ms": 2.5})
        reporter.step(20, 0.25, 1000.0, {"wait_ms": 1.5})
        reporter.ranks(RankTimes(20, ["a", 'b"'], [10, 10], [1, 2], [3, 4]))
        kind, text = _get(reporter)
        assert kind.startswith("text/plain; version=0.0.4")
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        assert float(values["sbpflow_train_step"]) == 20
        assert float(values["sbpflow_train_samples_per_second"]) == 1000
        assert float(values['sbpflow_train_value{name="wait_ms"}']) == 1.5
        key = r'sbpflow_train_rank_wait_seconds{rank="1",host="b\""}'
        assert float(values[key]) == pytest.approx(0.004)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            _get(reporter, "/")
        with pytest.raises(ConfigError, match=r"train\.prometheus: cannot listen on 127\.0\.0\.1:"):
            PrometheusReporter(PrometheusConfig(port=reporter.port))
    finally:
        reporter.close()


def test_prometheus_reads_from_an_address_of_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    reporter = PrometheusReporter(PrometheusConfig(host="::1", port=0))
    try:
        reporter.step(10, 0.5, 1000.0, {})
        assert "sbpflow_train_step 10" in _get(reporter, host="[::1]")[1]
    finally:
        reporter.close()

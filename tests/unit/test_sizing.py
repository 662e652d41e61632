from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.plan import sizing
from lightning_asgd.plan.sizing import Calibration, Job, ServerCosts
from lightning_asgd.simulation.forecast import forecast, simulated_efficiency

GBIT = st.floats(0.01, 100)
JOBS = st.builds(
    Job,
    step_s=st.floats(0.001, 10),
    parameter_bytes=st.floats(1e3, 1e9),
    workers=st.integers(1, 50),
    servers=st.integers(1, 5),
    nsync=st.integers(1, 50),
    worker_gbit_s=GBIT,
    server_gbit_s=GBIT,
    latency_s=st.floats(0, 0.1),
    sent=st.floats(0.01, 1),
    exchange_s=st.floats(0, 0.1),
    server_gbyte_s=st.floats(0.1, 10),
    exchange_work_s=st.floats(0, 0.01),
)


def job(**changes: Any) -> Job:
    """One gigabyte each way over 8 Gbit/s: a second."""
    settings = {"step_s": 0.5, "parameter_bytes": 1e9, "workers": 1, "nsync": 8, "server_gbit_s": 8.0}
    return Job(**(settings | changes))


# ---------------------------------------------------------------------- figures worked out by hand


def test_the_lemma_on_the_number_of_gpus_gives_the_papers_figures() -> None:
    assert sizing.largest_overhead_ratio(0.75, 4) == pytest.approx(0.125)
    assert sizing.largest_overhead_ratio(0.8, 4) == pytest.approx(1 / 11)
    assert sizing.synchronous_efficiency(0.125, 4) == pytest.approx(0.75)
    assert sizing.largest_overhead_ratio(0.25, 4) == math.inf


def test_the_lemma_on_the_number_of_servers() -> None:
    # 2 S N / (B n T): 2 x 1 GB x 10 / (1 GB/s x 4 s)
    assert sizing.least_servers(job(workers=10)) == 5


def test_a_single_worker() -> None:
    one = job()
    assert sizing.round_trip_s(one) == pytest.approx(2.0)
    assert sizing.hidden_nsync(one) == 4
    assert sizing.efficiency(one) == 1.0
    assert sizing.efficiency(replace(one, nsync=2)) == pytest.approx(0.5)
    assert sizing.steps_between_exchanges(replace(one, nsync=2)) == 4
    assert sizing.server_link_use(one) == sizing.server_link_use(replace(one, worker_gbit_s=8.0)) == pytest.approx(0.25)
    assert sizing.worker_link_use(one) == 0.0


def test_ten_workers_fill_a_link() -> None:
    ten = job(workers=10)
    assert sizing.cycle_s(ten) == pytest.approx(10.0)
    assert sizing.efficiency(ten) == pytest.approx(0.4)
    assert sizing.server_link_use(ten) == pytest.approx(1.0)
    assert sizing.round_trip_s(ten) == pytest.approx(20.0)


def test_a_servers_work_counts_beside_its_link() -> None:
    assert sizing.round_trip_s(job(server_gbyte_s=2.0)) == pytest.approx(2.5)
    assert sizing.server_use(job(server_gbyte_s=0.25)) == pytest.approx(4 / 6)
    assert sizing.cycle_s(job(workers=3, server_gbyte_s=0.25)) == pytest.approx(12.0)


def test_work_that_does_not_depend_on_the_bytes_stays_with_more_servers() -> None:
    # 10 workers x 0.1 s are left out of 4 s: 20 GB over 1 GB/s in 3 s
    assert sizing.least_servers(job(workers=10, exchange_work_s=0.1)) == 7
    assert sizing.least_servers(job(workers=10, exchange_work_s=0.4)) is None


def test_the_coordinator_has_leases_and_heartbeats_besides() -> None:
    costs = ServerCosts(claim_s=0.01, beat_s=0.004)
    ten = job(workers=10, server_gbit_s=math.inf, server_gbyte_s=10.0)
    # per second: 0.1 s / 4 s of exchanges, 2 requests, half a heartbeat
    assert sizing.coordinator_use(ten, costs) == pytest.approx(10 * (0.1 / 4 + 2 * 0.01 + 0.5 * 0.004))
    slow = replace(ten, step_s=2.0, nsync=2)
    assert sizing.coordinator_use(slow, costs, silence_s=20.0) == pytest.approx(10 * (0.1 / 4 + 0.005 + 0.001))


def test_costs_are_those_of_the_next_larger_number_of_workers() -> None:
    few, many = ServerCosts(claim_s=1.0), ServerCosts(claim_s=2.0)
    calibration = Calibration({16: few, 64: many}, "a machine")
    assert [calibration.at(n) for n in (1, 16, 17, 64, 65)] == [few, few, many, many, None]
    assert calibration.most == 64
    with pytest.raises(ConfigurationError, match="is empty"):
        Calibration({}, "a machine")


def test_no_number_of_servers_helps_a_worker_whose_own_link_is_too_slow() -> None:
    assert sizing.least_servers(job(worker_gbit_s=2.0)) is None
    assert sizing.least_servers(job(latency_s=2.0)) is None
    assert sizing.least_servers(job(worker_gbit_s=4.0)) == 1  # exactly: 2 GB take 4 s


def test_memory() -> None:
    assert sizing.worker_memory_bytes(job()) == 3e9
    assert sizing.server_memory_bytes(job(workers=3, servers=2)) == 2e9
    assert sizing.server_memory_bytes(job(workers=3, servers=2, bytes_per_parameter=2)) == 3e9  # a copy in float32


def test_compression_sends_less_and_keeps_memory() -> None:
    half = job(sent=0.5)
    assert sizing.hidden_nsync(half) == 2
    assert sizing.worker_memory_bytes(half) == sizing.worker_memory_bytes(job())


def test_batch_size() -> None:
    assert sizing.recommended_batch_size({32: 0.1, 64: 0.12, 128: 0.21, 256: 0.42}) == 128
    assert sizing.recommended_batch_size({32: 0.1}) == 32
    with pytest.raises(ConfigurationError, match="holds no batch size"):
        sizing.recommended_batch_size({})


# ---------------------------------------------------------------------- whatever the job


@given(JOBS)
def test_shares_are_shares(any_job: Job) -> None:
    for share in (sizing.efficiency, sizing.server_link_use, sizing.worker_link_use, sizing.server_use):
        assert 0 <= share(any_job) <= 1 + 1e-9
    assert 0 < sizing.synchronous_efficiency(sizing.overhead_ratio(any_job), any_job.workers) <= 1


@given(JOBS)
def test_more_workers_never_make_it_easier(any_job: Job) -> None:
    more = replace(any_job, workers=any_job.workers + 1)
    assert sizing.efficiency(more) <= sizing.efficiency(any_job)
    assert sizing.hidden_nsync(more) >= sizing.hidden_nsync(any_job)
    assert (sizing.least_servers(more) or math.inf) >= (sizing.least_servers(any_job) or math.inf)
    assert sizing.round_trip_s(more) > sizing.round_trip_s(any_job)


@given(JOBS)
def test_more_servers_never_make_it_harder(any_job: Job) -> None:
    more = replace(any_job, servers=any_job.servers + 1)
    assert sizing.efficiency(more) >= sizing.efficiency(any_job)
    assert sizing.hidden_nsync(more) <= sizing.hidden_nsync(any_job)
    assert sizing.server_memory_bytes(more) < sizing.server_memory_bytes(any_job)


@given(JOBS)
def test_a_longer_period_never_lowers_the_efficiency(any_job: Job) -> None:
    assert sizing.efficiency(replace(any_job, nsync=any_job.nsync + 1)) >= sizing.efficiency(any_job)


@given(JOBS)
def test_the_hidden_period_is_the_smallest_that_holds_the_round_trip(any_job: Job) -> None:
    nsync = sizing.hidden_nsync(any_job)
    trip_s = sizing.round_trip_s(any_job)
    assert nsync * any_job.step_s >= trip_s * (1 - 1e-6)
    assert nsync == 1 or (nsync - 1) * any_job.step_s < trip_s
    hidden = replace(any_job, nsync=nsync, exchange_s=0.0)
    assert sizing.efficiency(hidden) == pytest.approx(1.0)
    assert sizing.steps_between_exchanges(any_job) <= max(nsync, any_job.nsync)


@given(JOBS)
def test_the_least_servers_are_the_fewest_that_hide_the_round_trip(any_job: Job) -> None:
    servers = sizing.least_servers(any_job)
    if servers is None:
        many = replace(any_job, servers=10**9)
        assert sizing.round_trip_s(many) > any_job.period_s * (1 - 1e-6)
        return
    assert sizing.round_trip_s(replace(any_job, servers=servers)) <= any_job.period_s * (1 + 1e-6)
    if servers > 1:
        assert sizing.round_trip_s(replace(any_job, servers=servers - 1)) > any_job.period_s * (1 - 1e-6)


@given(st.floats(0.001, 10), st.integers(2, 1000))
def test_the_two_forms_of_the_lemma_on_gpus_are_one(ratio: float, workers: int) -> None:
    efficiency = sizing.synchronous_efficiency(ratio, workers)
    assert sizing.largest_overhead_ratio(efficiency, workers) == pytest.approx(ratio, rel=1e-3)


def test_limits() -> None:
    free = job(server_gbit_s=math.inf, workers=10_000)
    assert sizing.round_trip_s(free) == 0.0
    assert sizing.efficiency(free) == sizing.least_servers(free) == sizing.hidden_nsync(free) == 1
    assert sizing.efficiency(job(workers=10**9)) == pytest.approx(0.0, abs=1e-6)
    assert sizing.synchronous_efficiency(0.0, 10**9) == 1.0


# ---------------------------------------------------------------------- beside the simulator


@given(JOBS)
def test_an_exchange_alone_takes_as_long_in_the_simulator(any_job: Job) -> None:
    one = replace(any_job, workers=1, servers=1, nsync=1, exchange_s=0.0)
    waited = forecast(replace(one, step_s=1e-9), 3).wait_s  # in the third step, for what was begun in the second
    assert waited == pytest.approx(sizing.round_trip_s(one), rel=1e-6, abs=1e-6)


@settings(max_examples=20)
@given(JOBS)
def test_with_one_server_the_simulator_finds_the_same_efficiency(any_job: Job) -> None:
    few = replace(any_job, workers=min(any_job.workers, 12), servers=1)
    assert simulated_efficiency(few, 40) == pytest.approx(sizing.efficiency(few), abs=0.05)


@settings(max_examples=20)
@given(JOBS)
def test_with_several_the_closed_form_is_no_better_than_the_simulator(any_job: Job) -> None:
    few = replace(any_job, workers=min(any_job.workers, 6), servers=3)
    assert sizing.efficiency(few) <= simulated_efficiency(few, 40) + 0.05


@given(JOBS)
def test_nobody_waits_in_the_simulator_with_the_hidden_period(any_job: Job) -> None:
    few = replace(any_job, workers=min(any_job.workers, 10))
    assert forecast(replace(few, nsync=sizing.hidden_nsync(few)), 5).wait_s <= 1e-6 * few.period_s


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_s": 0.0}, r"step_s=0.0. Expected a number above 0"),
        ({"parameter_bytes": -1}, r"parameter_bytes=-1. Expected a number above 0"),
        ({"parameter_bytes": math.inf}, r"parameter_bytes=inf. Expected a finite number"),
        ({"latency_s": -0.1}, r"latency_s=-0.1. Expected a number of at least 0"),
        ({"workers": 0}, r"workers=0. Expected a whole number of at least 1"),
        ({"nsync": 1.5}, r"nsync=1.5. Expected a whole number"),
        ({"server_gbit_s": math.nan}, r"server_gbit_s=nan. Expected a number above 0"),
    ],
)
def test_a_wrong_number_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        job(**changes)

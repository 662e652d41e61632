"""Where a worker of an elastic run finds the servers again."""

from __future__ import annotations

import concurrent.futures
import time
import types

import pytest

from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.job import registry, training_job
from lightning_asgd.core.job.addresses import LOOPBACK
from lightning_asgd.core.job.rendezvous import successor_of
from tests.helpers.ports import free_port


class Clock:
    """Stands in for a module's ``time``; a test sets it forward."""

    def __init__(self) -> None:
        self.ahead_s, self.reads = 0.0, 0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        self.reads += 1
        return time.monotonic() + self.ahead_s

    def await_reads(self, number: int) -> None:
        """Wait until it was read that many times more."""
        enough, until = self.reads + number, time.monotonic() + 20
        while self.reads < enough:
            assert time.monotonic() < until, f"the clock was read {self.reads} times in 20 s, not {enough} times"
            time.sleep(0.01)


@pytest.mark.parametrize("tended", [False, True])
def test_a_worker_of_a_run_waits_while_serve_is_stopped_and_started_again(
    monkeypatch: pytest.MonkeyPatch, tended: bool
) -> None:
    """`serve` stops its servers first: a worker may have connected to its rendezvous when that closes.

    The driver of a tended run may be unreachable for a moment however long a worker has waited.
    """
    monkeypatch.setenv(SECRET_ENV, "known to this test alone")
    kind, lost = registry.kind_of("zmq"), "tcp://127.0.0.1:1"
    hosted = kind.host_rendezvous(LOOPBACK, free_port())  # it is hosted there again
    hosted.announce_run("run", "zmq", ["server/a"], tended=tended)
    hosted.put("server/a", {"address": lost})
    job = training_job.TrainingJob(1, 20.0, run_id="run", address=hosted.address, transport="zmq")
    monkeypatch.setattr(training_job, "_transport", types.SimpleNamespace(addresses=(lost,)))
    clock = Clock()
    monkeypatch.setattr(training_job, "time", clock)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        found = threads.submit(job.successor, 0)
        if tended:
            clock.await_reads(3)  # two before it connects, and one whenever it looks for another address there
            clock.ahead_s = 60.0  # longer than it would wait otherwise
            clock.await_reads(2)
        else:
            time.sleep(0.5)  # it waits for another address there
        hosted.close()
        time.sleep(0.5)
        assert not found.done()
        with kind.host_rendezvous(*hosted.address) as again:
            again.put("server/b", {"address": "tcp://127.0.0.1:2"})
            again.announce_run("run", "zmq", ["server/b"])
            assert found.result(20) == "tcp://127.0.0.1:2"


@pytest.mark.parametrize("tended", [True, False])
def test_a_worker_waits_for_a_replacement_as_long_as_the_host_of_a_tended_run_does(
    monkeypatch: pytest.MonkeyPatch, tended: bool
) -> None:
    monkeypatch.setenv(SECRET_ENV, "known to this test alone")
    lost, looks = "tcp://127.0.0.1:1", 0
    with registry.kind_of("zmq").host_rendezvous() as hosted:
        hosted.announce_run("run", "zmq", ["server/a"], tended=tended)
        hosted.put("server/a", {"address": lost})

        def check() -> None:
            nonlocal looks
            looks += 1
            if looks == 3:
                hosted.put("server/b", {"address": "tcp://127.0.0.1:2"})
                hosted.put(successor_of("server/a"), "server/b")

        if tended:
            assert hosted.server(0, "server/a", 0.0, lost, check) == "tcp://127.0.0.1:2"
        else:
            with pytest.raises(LaunchError, match=r"Server 0 did not start within 0 s.*raise timeouts\.start_s"):
                hosted.server(0, "server/a", 0.0, lost, check)

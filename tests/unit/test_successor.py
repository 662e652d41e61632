"""Where a worker of an elastic run finds the servers again."""

from __future__ import annotations

import concurrent.futures
import time
import types

import pytest

from lightning_asgd.config import SECRET_ENV
from lightning_asgd.errors import LaunchError
from lightning_asgd.loop import training_job
from lightning_asgd.transports import registry
from lightning_asgd.transports.rendezvous import successor_of


@pytest.mark.parametrize(("tended", "start_s", "waits_s"), [(False, 20.0, 0.5), (True, 1.5, 2.0)])
def test_a_worker_of_a_run_waits_while_serve_is_stopped_and_started_again(
    monkeypatch: pytest.MonkeyPatch, tended: bool, start_s: float, waits_s: float
) -> None:
    """`serve` stops its servers first: a worker may have connected to its rendezvous when that closes.

    The driver of a tended run may be unreachable for a moment however long a worker has waited.
    """
    monkeypatch.setenv(SECRET_ENV, "known to this test alone")
    kind, lost = registry.kind_of("zmq"), "tcp://127.0.0.1:1"
    hosted = kind.host_rendezvous()
    hosted.announce_run("run", "zmq", ["server/a"], tended=tended)
    hosted.put("server/a", {"address": lost})
    job = training_job.TrainingJob(1, start_s, run_id="run", address=hosted.address, transport="zmq")
    monkeypatch.setattr(training_job, "_transport", types.SimpleNamespace(addresses=(lost,)))
    with concurrent.futures.ThreadPoolExecutor() as threads:
        found = threads.submit(job.successor, 0)
        time.sleep(waits_s)  # it waits for another address there
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

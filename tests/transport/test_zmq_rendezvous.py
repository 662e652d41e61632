"""A rendezvous behind an authenticated socket: what strangers, wrong secrets and broken processes of the job can do."""

from __future__ import annotations

import gc
import json
import logging
import random
import socket
import struct
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
import zmq

from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.errors import CollectiveUnavailableError, LaunchError, ProtocolError
from lightning_asgd.core.job import address as job_address
from lightning_asgd.core.job import registry, rendezvous
from lightning_asgd.core.job.addresses import LOOPBACK
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.job.secret import LARGEST_ENTRY
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.elastic.serve_command import _entry
from lightning_asgd.hosting.host_entry import LEASE_S
from lightning_asgd.hosting.run_finder import RunFinder
from lightning_asgd.transports.zmq.sockets import keys_of
from tests.helpers.idle import idle_cpu_s
from tests.helpers.servers import SECRET

ZMQ = registry.kind_of("zmq")


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    with ZMQ.host_rendezvous() as hosted:
        yield hosted


@pytest.fixture
def guest(main: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    # On a busy machine ZeroMQ's greeting takes longer than usual: then torch's store is tried, in a thread that stays.
    monkeypatch.setattr(rendezvous, "_GREETING_S", 10.0)
    with Rendezvous.connect(*main.address, timeout_s=10.0) as connected:
        yield connected


def values(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8 if depth < 4 else 6)
    if kind < 6:
        text = "".join(chr(chance.choice((chance.randrange(128), chance.randrange(0xD800)))) for _ in range(kind * 9))
        return [None, True, chance.randrange(-(1 << 70), 1 << 70), chance.random() * 1e300, "", text][kind]
    items = [values(chance, depth + 1) for _ in range(chance.randrange(5))]
    return items if kind == 6 else {str(key): item for key, item in enumerate(items)}


def test_ten_thousand_random_entries_are_what_was_published(main: Rendezvous, guest: Rendezvous) -> None:
    chance = random.Random(0)
    published: dict[str, Any] = {}
    for _ in range(5_000):
        key, value = str(values(chance, 4))[:200], values(chance)
        published[key] = value
        (guest if chance.random() < 0.25 else main).put(key, value)
    for _ in range(5_000):
        key = chance.choice([*published])
        assert (guest if chance.random() < 0.25 else main).peek(key) == published[key]


def strangers(port: int, number: int, said: set[bytes]) -> None:
    """Bytes of many kinds. What is answered is kept: the greeting, and no more."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    plain = greeting.replace(b"CURVE", b"NULL\0")
    chance = random.Random(number)
    for index in range(number):
        for data in (
            b"",
            chance.randbytes(chance.randint(1, 2000)),
            plain + b"\x04\x05READY",
            greeting + chance.randbytes(chance.randint(1, 300)),  # a broken handshake
            greeting + b"\x06" + struct.pack(">Q", 1 << 40),  # a terabyte is promised
            struct.pack("<BI", 0, 0x3C85F7CE) + b"\x02" + struct.pack("<Q", 3) + b"run",  # a client of torch's store
        ):
            with socket.create_connection((LOOPBACK, port), timeout=5) as stranger:
                stranger.sendall(data)
                if index % 2:
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                elif index % 10 == 0:
                    stranger.settimeout(0.05)
                    try:
                        said.add(stranger.recv(4096))
                    except OSError:
                        continue


def test_strangers_neither_read_nor_write_and_the_processor_is_idle_afterwards(
    main: Rendezvous, guest: Rendezvous
) -> None:
    main.put("run", "counts-of-nobody-else")
    said: set[bytes] = set()
    idle = [socket.create_connection(main.address, timeout=5) for _ in range(100)]
    strangers(main.address[1], 150, said)
    assert guest.peek("run") == "counts-of-nobody-else"
    with Rendezvous.connect(*main.address, timeout_s=10.0) as late:
        late.put("late", 1)
    assert main.peek("late") == 1
    assert said
    assert not [data for data in said if b"counts" in data or len(data) > 64], "more than a greeting"
    for stranger in idle:
        stranger.close()
    assert idle_cpu_s(psutil.Process()) < 0.3


def test_another_secret_is_refused_within_seconds_and_both_sides_say_so(
    main: Rendezvous, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(main.address) as stranger:  # has no secret at all, and is not told of
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    with Rendezvous.connect(*main.address, timeout_s=50.0) as guest:
        assert guest.peek("job") is None
    assert not caplog.text
    monkeypatch.setenv(SECRET_ENV, SECRET + "?")
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=rf"transport='zmq', but no conn.*does not know this job's.*{SECRET_ENV}"):
        Rendezvous.connect(*main.address, timeout_s=50.0)
    monkeypatch.delenv(SECRET_ENV)
    with pytest.raises(LaunchError, match=rf"has transport='zmq', but {SECRET_ENV} is not set .* on all machines"):
        Rendezvous.connect(*main.address, timeout_s=50.0)
    assert time.monotonic() - begun < 10.0
    assert caplog.text.count(f"A process was refused at 127.0.0.1:{main.address[1]}: it has another") == 1


def test_a_process_without_a_secret_is_told_of_where_it_was_refused(
    main: Rendezvous, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(SECRET_ENV)
    with pytest.raises(LaunchError, match="LIGHTNING_ASGD_SECRET is not set for this one"):
        Rendezvous.connect(*main.address, timeout_s=50.0)
    assert "it has another LIGHTNING_ASGD_SECRET, or none." in caplog.text


@pytest.fixture(params=["", "another secret than the job's"])
def without_the_secret(main: Rendezvous, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """After the main process has begun, this one has no secret, or another one."""
    monkeypatch.delenv(SECRET_ENV)
    if request.param:
        monkeypatch.setenv(SECRET_ENV, request.param)


@pytest.mark.usefixtures("without_the_secret")
def test_a_worker_that_has_not_the_secret_does_not_try_again(main: Rendezvous) -> None:
    """Its machine is one of several: another one might host the servers, so other errors are tried again for long."""
    job = TrainingJob(1, 60.0)
    job.hosts = cast(Any, SimpleNamespace(locate=lambda *_: main.address))
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=r"xpected the same (secret|LIGHTNING_ASGD_SECRET) on all machines"):
        job._reach_host()
    assert time.monotonic() - begun < 20.0


@pytest.mark.usefixtures("without_the_secret")
def test_a_worker_of_a_run_with_several_hosts_that_has_not_the_secret_does_not_look_on(main: Rendezvous) -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:  # a host that does not answer could be back in time
        begun = time.monotonic()
        with pytest.raises(LaunchError, match=r"xpected the same (secret|LIGHTNING_ASGD_SECRET) on all machines"):
            RunFinder([main.address, silent.getsockname()]).find(60.0)
        with pytest.raises(LaunchError, match=r"xpected the same (secret|LIGHTNING_ASGD_SECRET) on all machines"):
            _entry("r", "zmq", 1, (LOOPBACK, 1), main.address, LEASE_S, [])
        assert time.monotonic() - begun < 20.0


def test_both_transports_are_named_where_they_differ(main: Rendezvous, guest: Rendezvous) -> None:
    main.announce_session("s", "zmq", ["server/0"])
    assert guest.session("s", "zmq", 5.0) == ["server/0"]
    with pytest.raises(LaunchError, match=r"has transport='zmq', but this worker has transport='rpc'"):
        guest.session("s", "rpc", 5.0)


def test_entries_are_bounded_in_size_and_in_sum(main: Rendezvous, guest: Rendezvous) -> None:
    with pytest.raises(ProtocolError, match=r"An entry of the rendezvous has 65,5\d\d bytes.*at most 65,536"):
        guest.put("large", "x" * LARGEST_ENTRY)
    text = "x" * (LARGEST_ENTRY - 100)
    tracemalloc.start()
    for number in range(256):
        guest.put(f"many/{number}", text)
    with pytest.raises(ProtocolError, match=r"all of them 16,\d{3},\d{3}\. Expected"):
        guest.put("one more", text)
    for _ in range(100):
        guest.put("many/0", "y" * (LARGEST_ENTRY - 100))  # in the place of what was there
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 40 << 20
    assert main.peek("many/0") == "y" * (LARGEST_ENTRY - 100)


def test_what_is_no_call_is_refused_and_nothing_is_made_of_it(
    main: Rendezvous,
    guest: Rendezvous,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "named_by_a_message.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    keys = keys_of(SECRET)
    context = zmq.Context()
    worker = context.socket(zmq.DEALER)
    worker.setsockopt(zmq.LINGER, 0)
    worker.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    worker.setsockopt(zmq.CURVE_PUBLICKEY, keys.worker_public)
    worker.setsockopt(zmq.CURVE_SECRETKEY, keys.worker)
    worker.connect("tcp://{}:{}".format(*main.address))
    calls: list[Any] = [None, "put", ["L", ["put", "x"]], ["L", ["put", 1, "2"]], ["L", ["peek", ["L", []]]]]
    calls += [["O", "named_by_a_message:Rule", {}], ["L", ["peek", ["O", "ASGD", {}]]], ["D", [["peek", "x"]]]]
    calls += [["L", ["put", "job", text]] for text in ("no JSON", "", "[" * 20_000)]
    for number, call in enumerate(calls):
        worker.send_multipart([json.dumps(["me", 1 + number, [], [], json.dumps(call)]).encode()])
    answers = [json.loads(worker.recv_multipart()[0]) for _ in calls if worker.poll(5000)]
    with caplog.at_level(logging.CRITICAL):
        worker.send_multipart([b"no JSON"])
        main.put("x", 1)
        assert guest.peek("x") == 1
    worker.close()
    context.term()
    assert sorted(number for number, *_ in answers) == [*range(1, 1 + len(calls))]
    assert all("neither a read nor a write" in header for *_, header in answers)
    assert "named_by_a_message" not in sys.modules


def test_a_main_process_that_starts_again_is_found_at_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    where = LOOPBACK, 0
    for number in range(3):
        with ZMQ.host_rendezvous(*where) as hosted:
            where = hosted.address
            hosted.announce_run("r", "zmq", [f"server/{number}"])
            found, run, keys = Rendezvous.find_run(*where, 10.0)
            assert (run, keys) == ({"run_id": "r", "transport": "zmq"}, [f"server/{number}"])
        with pytest.raises(LaunchError, match=r"The connection to the main process .* broke: ECONNREFUSED"):
            found.get("run", "`lightning-asgd serve`", 5.0)
        found.close()
    with pytest.raises(LaunchError, match="Found no job at"):
        Rendezvous.find_run(*where, 0.2)


def test_another_strategy_takes_the_port_over(main: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's store cannot share this one's socket, as it shares that of its own."""
    monkeypatch.setitem(job_address._hosted, main.address, main)
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", "1")
    job_address.release_port()
    assert main.address in job_address._hosted  # another port
    monkeypatch.setenv("MASTER_PORT", str(main.address[1]))
    job_address.release_port()
    assert main.address not in job_address._hosted
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        again = ZMQ.host_rendezvous(*main.address)
        again.put("x", 1)
        assert again.serves_torch
        assert Rendezvous.connect(*main.address, timeout_s=10.0).get("x", "The host", 5.0) == 1
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("side", ["main", "guest"])
def test_a_process_group_of_torchs_that_asks_for_the_store_learns_what_to_do(
    side: str, request: pytest.FixtureRequest
) -> None:
    """A job with transport='rpc' may use the rendezvous of an earlier one with 'zmq' in the same process."""
    with pytest.raises(CollectiveUnavailableError, match=r"with transport='zmq'.*Expected .*transport=\"rpc\".* first"):
        request.getfixturevalue(side).shared("session/s/")


def test_entries_of_a_main_process_without_the_secret_are_an_error_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has transport='rpc', and this process has the secret and transport='zmq'."""
    monkeypatch.delenv(SECRET_ENV, raising=False)
    main = registry.kind_of("rpc").host_rendezvous()
    main.announce_job()
    monkeypatch.setenv(SECRET_ENV, SECRET)
    monkeypatch.setattr(rendezvous, "_FOREIGN_S", 0.2)
    with pytest.raises(LaunchError, match=rf"'job' at .* was not written by .* Expected the same {SECRET_ENV} on all"):
        Rendezvous.connect(*main.address, timeout_s=10.0).get("job", "The main process", 50.0)


def test_a_late_greeting_of_zeromq_is_awaited_where_it_is_expected(
    main: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker on a busy machine prints the stack of torch's client, which ZeroMQ refuses."""
    main.put("x", 1)
    monkeypatch.setattr(rendezvous, "_GREETING_S", 0.0)
    monkeypatch.setattr(rendezvous, "_EXPECTED_GREETING_S", 10.0)
    monkeypatch.setattr(rendezvous.TorchStore, "connect", lambda *_: pytest.fail("torch's store was tried"))
    with Rendezvous.connect(*main.address, timeout_s=10.0, transport="zmq") as guest:
        assert guest.get("x", "The host", 5.0) == 1


def test_a_port_that_was_that_of_torchs_store_may_be_zeromqs_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives the ports of earlier jobs out again."""
    monkeypatch.setenv(SECRET_ENV, SECRET)
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        address = probe.getsockname()
    monkeypatch.setattr(rendezvous, "_silent", {address})
    with ZMQ.host_rendezvous(*address):
        assert address not in rendezvous._silent


def test_an_attempt_with_torchs_client_ends_soon_where_zeromq_listens(main: Rendezvous) -> None:
    """A process that ends while the attempt lasts aborts, and the attempt's thread cannot be stopped."""
    main.put("x", 1)
    attempt = rendezvous.TorchStore.connect(*main.address, SECRET, 60.0)
    with pytest.raises(RuntimeError):
        attempt.result(10.0)

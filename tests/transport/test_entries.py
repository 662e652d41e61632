"""Entries of the rendezvous: any process that reaches the store can write there, and has to be without effect."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from typing import Any

import pytest

from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.job import secret as job_secret
from lightning_asgd.core.job.rendezvous import Rendezvous, successor_of
from lightning_asgd.core.job.secret import LARGEST_ENTRY, given, key_for, provide, seal, unseal
from lightning_asgd.transports.zmq import sockets as zmq_sockets

SECRET = "known to this job only"
VALUES: list[Any] = [None, 1, "text", ["server/0"], {"address": "tcp://1.2.3.4:5", "pid": 3}, {"error": "gone"}]


@pytest.fixture(params=[SECRET, None], ids=["with a secret", "without"])
def secret(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    if request.param is None:
        monkeypatch.delenv(SECRET_ENV, raising=False)
    else:
        monkeypatch.setenv(SECRET_ENV, request.param)
    found: str | None = request.param
    return found


def garbage(chance: random.Random) -> bytes:
    """What a stranger writes: noise, JSON that is none of ours, and what looks like an entry."""
    noise = chance.randbytes(chance.randrange(200))
    kind = chance.randrange(6)
    if kind == 0:
        return noise
    value: Any = chance.choice([*VALUES, [[]] * 3, {"value": 1, "code": None}, {"value": "[", "code": "x"}, "\ud800"])
    if kind == 1:
        return json.dumps(value).encode()
    if kind == 2:
        return json.dumps({"value": json.dumps(value), "code": chance.randbytes(32).hex()}).encode()
    if kind == 3:
        return b"[" * 100_000
    if kind == 4:
        return b"x" * (LARGEST_ENTRY + 1)
    return json.dumps({"value": value, "code": ["y"]}).encode()


@pytest.mark.parametrize("value", VALUES)
def test_an_entry_is_what_was_published(secret: str | None, value: Any) -> None:
    assert unseal("key", seal("key", value, secret).encode(), secret) == value


def test_an_entry_counts_at_its_own_place_and_with_its_own_secret() -> None:
    entry = seal("server/0", {"address": "here"}, SECRET).encode()
    assert unseal("server/1", entry, SECRET) is None
    assert unseal("server/0", entry, SECRET + "!") is None
    assert unseal("server/0", seal("server/0", {"address": "elsewhere"}, None).encode(), SECRET) is None


def test_a_secret_that_a_job_made_for_itself_is_not_for_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SECRET_ENV, "LIGHTNING_ASGD_OWN_SECRET"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    served = Rendezvous.host()  # by `lightning-asgd serve`, without a secret
    served.announce_run("r", "rpc", ["server/0"])
    provide(one_machine=True)
    made = os.environ[SECRET_ENV]
    assert given() is None
    provide(one_machine=True)
    assert os.environ[SECRET_ENV] == made
    assert Rendezvous.find_run(*served.address, 10.0)[2] == ["server/0"]
    monkeypatch.setenv(SECRET_ENV, SECRET)
    assert given() == SECRET
    with pytest.raises(LaunchError, match="'run' at"):
        Rendezvous.find_run(*served.address, 0.1)


def test_each_purpose_has_a_key_of_its_own() -> None:
    keys = {key_for(purpose, secret) for purpose in (b"asgd server", b"asgd worker") for secret in (SECRET, "other")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}


def test_all_keys_come_from_one_slow_hash_of_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that people think of cannot be guessed from a key or a code as fast as one hash is computed."""
    slow, calls = hashlib.scrypt, list[dict[str, Any]]()

    def counted(secret: bytes, **options: Any) -> bytes:
        calls.append(options)
        return slow(secret, **options)

    monkeypatch.setattr(hashlib, "scrypt", counted)
    secret = f"a secret that no other test uses {os.getpid()}"
    keys = zmq_sockets.keys_of(secret)  # of CURVE
    entry = seal("server/0", 7, secret).encode()
    assert unseal("server/0", entry, secret) == 7
    assert zmq_sockets.keys_of(secret) == keys
    (options,) = calls
    assert options["n"] * options["r"] * 128 >= 16 << 20, "bytes that every guess needs"
    monkeypatch.setattr(job_secret, "_stretched", lambda secret: b"another key")
    assert zmq_sockets.keys_of(secret) != keys
    assert unseal("server/0", entry, secret) is None


def test_ten_thousand_foreign_values_never_raise(secret: str | None) -> None:
    chance = random.Random(1)
    for _ in range(10_000):
        found = unseal("server/0", garbage(chance), secret)
        assert found is None or secret is None


def test_a_job_goes_on_when_a_stranger_writes_over_its_entries(secret: str | None) -> None:
    host = Rendezvous.host()
    keys = ["server/0", "server/1"]
    host.put("session/s", keys)
    for index, key in enumerate(keys):
        host.put(key, {"address": f"tcp://here:{index}", "pid": index})
    peer = Rendezvous.connect(*host.address, timeout_s=10.0)

    def seen() -> tuple[Any, ...]:
        return peer.get("session/s", "The job", 5.0, kind=list), *(peer.server(i, k, 5.0) for i, k in enumerate(keys))

    before = seen()
    stranger: Any = host.shared("")
    for key in ("session/s", *keys, *map(successor_of, keys)):
        stranger.set(key, b"\xff garbage")
    assert seen() == before
    assert host.peek_server("server/0")["address"] == "tcp://here:0"
    host.put(successor_of("server/0"), "server/0.1")
    host.put("server/0.1", {"address": "tcp://there:7", "pid": 7})
    assert peer.server(0, "server/0", 5.0) == "tcp://there:7"


def test_successors_that_point_in_a_circle_end() -> None:
    host = Rendezvous.host()
    host.put("server/0", {"address": "tcp://here:0"})
    host.put(successor_of("server/0"), "server/1")
    host.put(successor_of("server/1"), "server/0")
    assert host.peek_server("server/0") == {}
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=r"Server 0 did not start within 0.1 s"):
        host.server(0, "server/0", 0.1)
    assert time.monotonic() - begun < 5.0


def test_an_endless_row_of_successors_ends() -> None:
    host = Rendezvous.host()
    for number in range(1100):
        host.put(successor_of(f"server/{number}"), f"server/{number + 1}")
    assert host.peek_server("server/0") == {}


def test_a_value_of_another_type_is_none(secret: str | None) -> None:
    host = Rendezvous.host()
    host.put("session/s", {"no": "list"})
    assert host.peek("session/s", list) is None
    host.put("session/s", ["server/0"])
    assert host.peek("session/s", list) == ["server/0"]


def test_a_process_without_the_secret_is_told_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Rendezvous.host()
    monkeypatch.delenv(SECRET_ENV, raising=False)
    host.put("session/s", ["server/0"])
    name = host.announce_job()
    assert host.announce_job() == name
    monkeypatch.setenv(SECRET_ENV, SECRET)
    other = Rendezvous.connect(*host.address, timeout_s=10.0)
    with pytest.raises(LaunchError, match=rf"'session/s' at 127.0.0.1:\d+ was not written by .*{SECRET_ENV}"):
        other.get("session/s", "The job", 0.1)
    assert other.announce_job() != name  # for its own processes

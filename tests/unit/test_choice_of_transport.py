"""Which transport a job gets, and what people are told of it."""

from __future__ import annotations

import contextlib
import os
import socket
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from lightning_fabric.plugins.environments import LightningEnvironment

from lightning_asgd.core.foundation.environment import RUN_ENV, SECRET_ENV, TRANSPORT_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError, LaunchError
from lightning_asgd.core.job import address as job_address
from lightning_asgd.core.job import rank_variables, registry, training_job
from lightning_asgd.core.job import secret as job_secret
from lightning_asgd.core.job.address import Surroundings
from lightning_asgd.core.job.rank_variables import RANK_VARIABLES
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.core.lightning.launchers import surroundings_of

SECRET = "known to all machines"
OWN_ENV = "LIGHTNING_ASGD_OWN_SECRET"


@pytest.fixture(autouse=True)
def without_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SECRET_ENV, OWN_ENV):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    job_address._said.clear()


@pytest.fixture
def without_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ConfigurationError("no pyzmq")

    monkeypatch.setattr(registry.kind_of("zmq"), "check_available", missing)


def test_machines_with_a_secret_and_pyzmq_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    name, why, who = registry.choose("auto", one_machine=False)
    assert (name, why) == ("zmq", f"{SECRET_ENV} is set")
    assert who == f"is encrypted and authenticated (key from {SECRET_ENV})."


def test_without_a_secret_the_line_says_who_could_get_in_and_how_to_make_and_hand_one_out() -> None:
    name, why, who = registry.choose("auto", one_machine=False)
    assert (name, why) == ("rpc", f"{SECRET_ENV} is not set")
    assert who.startswith("has no authentication: any user of these machines")
    for part in ("any host that reaches their ports, can run code as this user", "openssl rand -hex 32", "scp -p"):
        assert part in who


@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize("asked", ["auto", "rpc", "zmq"])
@pytest.mark.parametrize("secret", ["", "short"])
def test_a_short_secret_is_refused(secret: str, asked: str, one_machine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, secret)
    with pytest.raises(
        ConfigurationError, match=rf"{SECRET_ENV} has {len(secret)} characters\. Expected .* at least 16"
    ):
        registry.choose(asked, one_machine=one_machine)


def test_a_secret_that_a_job_on_one_machine_made_is_not_shared_with_others() -> None:
    job_secret.provide(one_machine=True)
    assert SECRET_ENV in os.environ
    assert registry.choose("auto", one_machine=False)[0] == "rpc"


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_such_a_secret_is_not_used_for_a_later_job_on_several_machines(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = registry.kind_of(transport)
    kind.provide_secret(one_machine=True)
    made = os.environ[SECRET_ENV]
    with contextlib.suppress(ConfigurationError):  # zmq needs one
        kind.provide_secret(one_machine=False)
    assert SECRET_ENV not in os.environ
    kind.provide_secret(one_machine=True)
    assert os.environ[SECRET_ENV] == made  # the rendezvous that this process hosts has it
    monkeypatch.setenv(SECRET_ENV, SECRET)
    kind.provide_secret(one_machine=False)
    assert os.environ[SECRET_ENV] == SECRET


def test_a_process_keeps_its_secret_where_its_environment_is_restored_between_two_jobs() -> None:
    with mock.patch.dict(os.environ):
        job_secret.provide(one_machine=True)
        made = os.environ[SECRET_ENV]
    with mock.patch.dict(os.environ):
        os.environ.pop(SECRET_ENV, None)
        os.environ.pop(OWN_ENV, None)
        job_secret.provide(one_machine=True)
        assert os.environ[SECRET_ENV] == made
        assert job_secret.given() is None


@pytest.mark.usefixtures("without_pyzmq")
def test_without_pyzmq_nothing_is_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    assert registry.choose("auto", one_machine=False)[:2] == ("rpc", "pyzmq is not installed")


def test_a_job_on_one_machine_is_encrypted_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.choose("auto", one_machine=True)[:2] == ("zmq", "one machine")  # its secret is made for it


@pytest.mark.usefixtures("without_pyzmq")
def test_on_one_machine_the_line_names_its_other_users() -> None:
    name, why, who = registry.choose("auto", one_machine=True)
    assert (name, why) == ("rpc", "pyzmq is not installed")
    assert who.startswith("has no authentication: any user of this machine can run code as this user.")
    assert "transport='zmq'" in who


@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize("asked", ["rpc", "zmq"])
def test_what_was_asked_for_is_taken(asked: str, one_machine: bool) -> None:
    name, why, who = registry.choose(asked, one_machine=one_machine)
    assert (name, why) == (asked, "as given")
    assert ("run code as this user" in who) == (asked == "rpc")


def test_what_the_environment_names_is_not_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSPORT_ENV, "rpc")
    assert registry.choose("rpc", one_machine=False)[1] == "as given"  # without a run the variable has no effect
    monkeypatch.setenv(RUN_ENV, "127.0.0.1:1/run")
    assert registry.choose("rpc", one_machine=False)[1] == "LIGHTNING_ASGD_TRANSPORT is set"
    assert registry.choose("zmq", one_machine=False)[1] == "as given"


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"transport='smoke'\. Expected 'rpc', 'zmq' or 'auto'"):
        registry.check_name("smoke")
    registry.check_name("auto")


def test_a_process_says_it_once_and_warns_if_anyone_can_get_in(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    for asked in ("rpc", "rpc", "auto", "zmq", "auto"):
        job_address.choose_transport(asked, one_machine=True, say=said.append)
    assert [" ".join(line.split()[:3]) for line in said] == ["Transport zmq is"]
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [" ".join(line.split()[:3]) for line in warned] == ["Transport rpc has"]


def test_a_worker_that_joins_a_run_warns_if_anyone_can_get_in(caplog: pytest.LogCaptureFixture) -> None:
    job = TrainingJob(1, 0.1, given=(("127.0.0.1", 1),), run_id="run")
    with pytest.raises(LaunchError):
        job.find_run()
    assert [record.levelname for record in caplog.records if "has no authentication" in record.message] == ["WARNING"]


def test_the_processes_of_a_job_on_one_machine_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's environment says of a worker that it was started from outside, since it has LOCAL_RANK."""
    monkeypatch.setenv(SECRET_ENV, SECRET)
    asked: list[bool] = []
    monkeypatch.setattr(registry, "choose", lambda name, *, one_machine: asked.append(one_machine) or ("rpc", "", ""))

    class Found(Exception):
        pass

    def found(*args: object, **kwargs: object) -> None:
        raise Found

    monkeypatch.setattr(job_address, "find_address", found)
    for started_by_us in (False, True):
        place = Surroundings(0, 2, 0, 1, external=started_by_us, by_hand=True, main=lambda: ("127.0.0.1", 1))
        monkeypatch.setattr(rank_variables, "address", lambda known=started_by_us: "127.0.0.1:1" if known else None)
        with pytest.raises(Found):
            TrainingJob(1, 10.0, asked="auto").begin(place, print, is_main=False)
    assert asked == [True, True]


class Kind:
    """Hosts nothing, and says where it would."""

    def host_rendezvous(self, *address: Any) -> Any:
        return SimpleNamespace(address=address or ("127.0.0.1", 1))


def test_a_job_on_several_machines_does_not_use_the_address_of_an_earlier_one_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT", rank_variables.OWNER_ENV):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(rank_variables, "_address", None)
    monkeypatch.setattr(job_address, "_hosted", {})
    kind, environment = cast(Any, Kind()), LightningEnvironment()

    def address(num_nodes: int) -> tuple[str, int]:
        return job_address.find_address(kind, surroundings_of(environment, num_nodes), is_main=True)

    assert address(1) == ("127.0.0.1", 1)
    with rank_variables.owning():  # as Lightning does when it starts workers
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="2", LOCAL_RANK="0")
    assert address(1) == ("127.0.0.1", 1)
    with pytest.raises(LaunchError, match="num_nodes=2 but MASTER_PORT is not set"):
        address(2)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "29400")
    with rank_variables.owning():  # what a user has set stays the user's
        os.environ["LOCAL_RANK"] = "0"
    environment = LightningEnvironment()
    assert address(2) == ("192.0.2.1", 29400)
    assert address(1) == ("127.0.0.1", 1)


def test_a_host_that_is_lost_while_another_thread_finds_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers are lost with their host: the second thread's connection breaks when the first has moved on."""
    job = TrainingJob(2, 10.0)
    old, new = ("127.0.0.1", 1), ("127.0.0.1", 2)
    hosts: Any = SimpleNamespace(address=old, is_lost=False, gave_up=False, check_host=lambda _: None)
    hosts.locate = lambda *about: hosts.address
    job.hosts, job.address = hosts, old

    def connect(timeout_s: float) -> Any:
        if hosts.address == old:
            hosts.address = new  # by the other thread
            raise LaunchError("The connection to the main process broke")
        entries = {"session": lambda *about: ["key 0", "key 1"], "server": lambda *about: "its address"}
        return contextlib.nullcontext(SimpleNamespace(address=new, tended=False, **entries))

    monkeypatch.setattr(job, "_rendezvous", connect)
    monkeypatch.setattr(training_job, "_transport", SimpleNamespace(addresses=("lost 0", "lost 1")))
    assert job.successor(1) == "its address"
    assert job.address == new


@pytest.mark.timeout(30)
def test_a_host_that_ends_just_before_a_worker_connects_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_job, "_ATTEMPT_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        old = taken.getsockname()
        with Rendezvous.host() as new:
            job = TrainingJob(1, 300.0)
            sights = iter([old, old])  # it was seen to live, and has ended since
            hosts: Any = SimpleNamespace(address=new.address, is_lost=False, gave_up=False, check_host=lambda _: None)
            hosts.locate = lambda *about: next(sights, new.address)
            job.hosts, job.address = hosts, old
            new.announce_session(job.session, "rpc", ["key"])
            new.put("key", {"address": "its:1"})
            monkeypatch.setattr(training_job, "_transport", SimpleNamespace(addresses=("lost:1",)))
            assert job.successor(0) == "its:1"
            assert job.address == new.address


@pytest.mark.parametrize(
    ("given", "num_nodes", "by_hand", "text"),
    [
        (None, 2, True, "num_nodes=2 but MASTER_PORT is not set"),
        ("0", 1, False, "MASTER_PORT is 0"),
        ("x", 1, True, "MASTER_PORT is 'x'. Expected a number from 1 to 65535"),
        ("65536", 2, True, "MASTER_PORT is '65536'. Expected a number"),
        (None, 2, False, ""),
        (None, 1, True, ""),
        ("29500", 2, True, ""),
    ],
)
def test_a_port_at_which_machines_cannot_meet(given: str | None, num_nodes: int, by_hand: bool, text: str) -> None:
    with pytest.raises(LaunchError, match=text) if text else contextlib.nullcontext():
        job_address.check_port(given, num_nodes, by_hand=by_hand)

"""Which transport a job gets, and what people are told of it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from lightning_asgd.adapter import job_address
from lightning_asgd.adapter.launchers import TrainingJob
from lightning_asgd.config import SECRET_ENV
from lightning_asgd.errors import ConfigurationError
from lightning_asgd.processes import rank_variables
from lightning_asgd.transports import job_secret, registry

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

    monkeypatch.setattr(registry.TRANSPORTS["zmq"], "check_available", missing)


def test_machines_with_a_secret_and_pyzmq_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    name, line = registry.choose("auto", one_machine=False)
    assert name == "zmq"
    assert line.startswith(f"Transport: zmq, since {SECRET_ENV} is set. Connections are encrypted")


def test_without_a_secret_the_line_says_who_could_get_in_and_how_to_make_and_hand_one_out() -> None:
    name, line = registry.choose("auto", one_machine=False)
    assert name == "rpc"
    assert line.startswith(f"Transport: rpc, since {SECRET_ENV} is not set. It has no authentication")
    for part in ("any host that reaches their ports, can run code as this user", "openssl rand -hex 32", "scp -p"):
        assert part in line


def test_a_short_secret_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, "short")
    assert registry.choose("auto", one_machine=False)[0] == "rpc"


def test_a_secret_that_a_job_on_one_machine_made_is_not_shared_with_others() -> None:
    job_secret.make_own()
    assert SECRET_ENV in os.environ
    assert registry.choose("auto", one_machine=False)[0] == "rpc"


@pytest.mark.usefixtures("without_pyzmq")
def test_without_pyzmq_nothing_is_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    name, line = registry.choose("auto", one_machine=False)
    assert name == "rpc"
    assert "since pyzmq is not installed" in line


def test_on_one_machine_the_line_names_its_other_users() -> None:
    name, line = registry.choose("auto", one_machine=True)
    assert name == "rpc"
    assert "the default on one machine. It has no authentication: any user of this machine can run code as" in line


@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize("asked", ["rpc", "zmq"])
def test_what_was_asked_for_is_taken(asked: str, one_machine: bool) -> None:
    name, line = registry.choose(asked, one_machine=one_machine)
    assert name == asked
    assert line.startswith(f"Transport: {asked}, as given.")
    assert ("run code as this user" in line) == (asked == "rpc")


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"transport='smoke'\. Expected 'rpc', 'zmq' or 'auto'"):
        registry.check_name("smoke")
    registry.check_name("auto")


def test_the_main_process_says_it_once() -> None:
    said: list[str] = []
    for asked in ("auto", "auto", "rpc", "zmq", "zmq"):
        job_address.choose_transport(asked, one_machine=True, say=said.append)
    assert [line.split(". ")[0] for line in said] == [
        "Transport: rpc, the default on one machine",
        "Transport: rpc, as given",
        "Transport: zmq, as given",
    ]


def test_the_processes_of_a_job_on_one_machine_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's environment says of a worker that it was started from outside, since it has LOCAL_RANK."""
    monkeypatch.setenv(SECRET_ENV, SECRET)
    asked: list[bool] = []
    monkeypatch.setattr(registry, "choose", lambda name, *, one_machine: asked.append(one_machine) or ("rpc", ""))

    class Found(Exception):
        pass

    def found(*args: object, **kwargs: object) -> None:
        raise Found

    monkeypatch.setattr(job_address, "find_address", found)
    for started_by_us in (False, True):
        environment = SimpleNamespace(creates_processes_externally=started_by_us)
        monkeypatch.setattr(rank_variables, "address", lambda known=started_by_us: "127.0.0.1:1" if known else None)
        with pytest.raises(Found):
            TrainingJob(1, 10.0, asked="auto").begin(environment, 1, SimpleNamespace(info=print), is_main=False)
    assert asked == [True, True]

"""Names, IPv4 and IPv6 addresses, with ports."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys

import pytest

from lightning_asgd.core.foundation.environment import joined, parted, run_place, server_address
from lightning_asgd.core.foundation.errors import ConfigurationError, LaunchError
from lightning_asgd.core.job.addresses import (
    LOOPBACK,
    ServerAddress,
    interface_of,
    is_loopback,
    listen,
    local_address_towards,
    resolve,
)


@pytest.mark.parametrize(
    ("host", "text"), [("10.0.0.1", "10.0.0.1:29400"), ("a.name", "a.name:29400"), ("fd00::1", "[fd00::1]:29400")]
)
def test_a_host_and_a_port_are_one_text(host: str, text: str) -> None:
    assert joined(host, 29400) == text
    assert parted(text) == (host, 29400)
    assert server_address(text, "job") == server_address(f"{text}/run", "job") == (host, 29400)
    assert run_place(f"{text}/a/run") == (((host, 29400),), "a/run")
    assert run_place(f"{text}, other:1/run") == (((host, 29400), ("other", 1)), "run")
    behind = ServerAddress(host, 29400, "0123456789ab", 24)
    assert str(behind) == f"tcp://{text}/24/0123456789ab"
    assert ServerAddress.of(str(behind)) == behind
    assert ServerAddress.of(f"tcp://{text}") == ServerAddress(host, 29400)


@pytest.mark.parametrize("text", ["", "host", "host:", ":29400", "host:http", "fd00::1", "fd00::1:29400", "h:70000"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"host and a port|without brackets"):
        parted(text)
    with pytest.raises(ConfigurationError, match=r'"host:port".*"\[address\]:port" for an IPv6 address'):
        server_address(text, "job")
    for run in (
        text,
        f"{text}/run",
        f"host:1,{text}/run",
        "host:1/",
        "host:0/run",
        "h:1/a,h:2/a",
        "h:1/a'",
        "h :1/a",
        b"h:1/a",
    ):
        with pytest.raises(ConfigurationError, match=r'run=.*"host:port/name".*"\[fd00::1\]:29400/my-model"'):
            run_place(run)


def test_a_name_is_resolved_to_ipv4_where_it_has_such_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 0, 0, 0))
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [six, four])
    assert resolve("both") == "10.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [six])
    assert resolve("six") == "fd00::1"


@pytest.mark.parametrize("host", [LOOPBACK, "::1", "localhost"])
def test_loopback_has_an_interface_and_can_be_listened_on(host: str) -> None:
    address = resolve(host)
    assert is_loopback(address)
    assert interface_of(address) == interface_of(LOOPBACK)
    assert local_address_towards(host) == address
    with listen(host, 0) as listener:
        assert listener.getsockname()[0] == address


def test_what_cannot_be_reached_is_named() -> None:
    with pytest.raises(LaunchError, match=r"Cannot reach no\.such\.name\.invalid: .* Set MASTER_ADDR"):
        local_address_towards("no.such.name.invalid")
    with pytest.raises(LaunchError, match=r"No network interface of this machine has the address 192\.0\.2\.77"):
        interface_of("192.0.2.77")


LOOP = (
    "import torch; from lightning_asgd import AsyncSGD; net = torch.nn.Linear(1, 1)\n"
    "with AsyncSGD(net, torch.optim.SGD(net.parameters(), 0.1), transport='rpc'): pass"
)
SERVE = "from lightning_asgd.cli.command_line import main; raise SystemExit(main({}))"


@pytest.mark.parametrize(
    "program",
    [LOOP, SERVE.format(["serve", "127.0.0.1:29400/r", "--transport", "rpc"])],
    ids=["a plain loop", "serve"],
)
def test_hosting_on_a_machine_without_loopback_says_so_at_once(program: str) -> None:
    alone = ["unshare", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a network namespace")
    done = subprocess.run([*alone, sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "Cannot reach 127.0.0.1" in done.stderr
    assert done.stderr.rstrip().endswith("Expected the loopback interface to be up: run `ip link set lo up`.")

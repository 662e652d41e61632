"""Health checks: one datagram asks, one replies."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.errors import LaunchError, ServerLostError
from lightning_asgd.elastic import health
from lightning_asgd.elastic.health import HealthResponder, ask_health

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@pytest.fixture(params=["", "a secret of these two alone"])
def secret(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv(SECRET_ENV, raising=False)
    if request.param:
        monkeypatch.setenv(SECRET_ENV, request.param)
    return str(request.param)


@pytest.mark.parametrize(
    "report", [(True, "1 server answers."), (False, "server 0 does not answer: sé."), (True, "é" * 9000)]
)
def test_the_report_arrives(port: int, secret: str, report: tuple[bool, str]) -> None:
    responder = HealthResponder(HOST, port, lambda: report)
    try:
        good, text = ask_health(HOST, port, 3.0)
    finally:
        responder.close()
    assert good is report[0]
    assert text == report[1] or (text.endswith("é ...") and len(text) > 50)


def test_with_another_secret_there_is_no_reply(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, "one that the other does not know")
    responder = HealthResponder(HOST, port, lambda: (True, "private"))
    try:
        monkeypatch.setenv(SECRET_ENV, "one that the first does not know")
        with pytest.raises(ServerLostError, match=r"no reply within 0\.2 s\. Expected .* same LIGHTNING_ASGD_SECRET"):
            ask_health(HOST, port, 0.2)
    finally:
        responder.close()


def test_a_reply_is_not_longer_than_its_question() -> None:
    nonce = b"n" * 16
    assert len(health._question(b"", nonce)) >= len(health._reply(b"", nonce, True, "x" * 5000))


def test_where_nothing_listens_the_error_says_so_at_once(port: int) -> None:
    with pytest.raises(ServerLostError, match="nothing listens there"):
        ask_health(HOST, port, 30.0)


def test_a_port_that_is_taken_is_refused(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((HOST, port))
        with pytest.raises(LaunchError, match=rf"Cannot listen on {HOST}:{port} for health checks .*Give another port"):
            HealthResponder(HOST, port, lambda: (True, ""))


def test_the_command_loads_neither_torch_nor_lightning(port: int) -> None:
    program = f"""
import sys
from lightning_asgd.cli.command_line import main
code = main(["health", "{HOST}:{port}"])
print(sorted({{"torch", "numpy", "pytorch_lightning", "lightning", "psutil"}} & sys.modules.keys()))
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (1, "[]")
    assert done.stderr.startswith(
        f"ServerLostError: The servers at {HOST}:{port} do not answer: nothing listens there."
    )

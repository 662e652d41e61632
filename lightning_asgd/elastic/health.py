"""One datagram asks whether the servers of a run answer, and one replies. Imports no torch, and opens no connection.

``lightning-asgd serve`` replies at the UDP port of the same number as its TCP port. With a secret, a datagram without
a valid code gets no reply. A reply is never longer than its question, so that it is of no use to flood a third machine.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from lightning_asgd.core.foundation.environment import SECRET_ENV, joined, server_address
from lightning_asgd.core.foundation.errors import LaunchError, ServerLostError
from lightning_asgd.core.foundation.validation import at_least
from lightning_asgd.core.job.addresses import family_of, resolve
from lightning_asgd.core.job.secret import given, key_for

_QUESTION = b"lightning-asgd health 1\n"
_NONCE, _CODE = 16, 32  # bytes
_SIZE = 1024  # of a question
_LONGEST = _SIZE - _CODE - 16  # of a report as JSON
_AGAIN_S = 0.5  # datagrams may be lost
_POLL_S = 0.5


class HealthResponder:
    """Replies to questions with what ``report`` returns. Raises a :class:`LaunchError` if the port is taken."""

    def __init__(self, host: str, port: int, report: Callable[[], tuple[bool, str]]) -> None:
        self._report, self._closing, self._key = report, threading.Event(), _key()
        try:
            address = resolve(host)
            self._socket = socket.socket(family_of(address), socket.SOCK_DGRAM)
        except OSError as error:
            raise LaunchError(
                f"Cannot resolve {host!r}: {error}. Expected a name or address of this machine."
            ) from error
        try:
            self._socket.bind((address, port))
        except OSError as error:
            self._socket.close()
            raise LaunchError(
                f"Cannot listen on {joined(host, port)} for health checks (UDP): {error}. Expected a port that no "
                "other process uses. Give another port, or an address of this machine."
            ) from error
        self._socket.settimeout(_POLL_S)
        self._thread = threading.Thread(target=self._serve, name="lightning_asgd.health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop replying."""
        self._closing.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(OSError):  # also of a timeout, and of a sender that has gone
                question, sender = self._socket.recvfrom(_SIZE + 1)
                nonce = question[len(_QUESTION) :][:_NONCE]
                if hmac.compare_digest(question, _question(self._key, nonce)):
                    self._socket.sendto(_reply(self._key, nonce, *self._report()), sender)


def ask_health(host: str, port: int, timeout_s: float) -> tuple[bool, str]:
    """Whether a run's servers are well, and a sentence. Raises a :class:`ServerLostError` if nothing replies."""
    key, nonce, deadline = _key(), os.urandom(_NONCE), time.monotonic() + timeout_s
    why = f"no reply within {timeout_s:g} s"
    try:
        address = resolve(host)
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as asking:
            asking.connect((address, port))
            while time.monotonic() < deadline:
                asking.send(_question(key, nonce))
                asking.settimeout(min(_AGAIN_S, max(deadline - time.monotonic(), 0.01)))
                with contextlib.suppress(TimeoutError):
                    told = _told(key, nonce, asking.recv(_SIZE + 1))
                    if told is not None:
                        return told
    except ConnectionRefusedError:
        why = "nothing listens there"
    except OSError as error:
        why = str(error)
    raise ServerLostError(
        f"The servers at {joined(host, port)} do not answer: {why}. Expected `lightning-asgd serve` to run there, with "
        f"the same {SECRET_ENV} as here, if any. Look at its output, and check that UDP reaches that port."
    )


def _key() -> bytes:
    secret = given()
    return b"" if secret is None else key_for(b"asgd health", secret)


def _code(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"\n".join(parts), "sha256").digest()


def _question(key: bytes, nonce: bytes) -> bytes:
    return (_QUESTION + nonce + _code(key, b"question", nonce)).ljust(_SIZE, b"\0")


def _reply(key: bytes, nonce: bytes, good: bool, text: str) -> bytes:
    report = json.dumps([good, text])
    while len(report) > _LONGEST:
        text = text[: len(text) * 3 // 4]
        report = json.dumps([good, f"{text} ..."])
    return _code(key, b"reply", nonce, report.encode()) + report.encode()


def _told(key: bytes, nonce: bytes, reply: bytes) -> tuple[bool, str] | None:
    """A reply's report; None if it is not one to this question."""
    code, report = reply[:_CODE], reply[_CODE:]
    if not hmac.compare_digest(code, _code(key, b"reply", nonce, report)):
        return None
    good, text = json.loads(report)
    return bool(good), str(text)


def health(run: str, *, timeout_s: float = 3.0) -> int:
    """Check that the servers of an elastic run answer.

    Prints one line within a fraction of a second, for probes. The exit code is 0 if all servers answer, else 1.

    Args:
        run: "host:port" or "host:port/name" of one host, as `lightning-asgd serve` prints it.
        timeout_s: seconds to wait for a reply.
    """
    at_least("timeout_s", timeout_s, 0, above=True, finite=True)
    good, text = ask_health(*server_address(run, "run"), timeout_s)
    if good and (name := run.partition("/")[2]) and not text.startswith(f"Run {name!r} at "):
        good, text = False, f"{text} Expected run {name!r}, as given."
    (sys.stdout if good else sys.stderr).write(f"{text}\n")
    return 0 if good else 1

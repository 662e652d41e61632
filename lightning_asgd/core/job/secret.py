"""What follows from a job's secret: keys, and entries of the rendezvous that only those who know it can write."""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable
from typing import Any

from lightning_asgd.core.foundation.environment import SECRET_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError

HAND_OUT = (
    "`(umask 077; openssl rand -hex 32 > asgd.secret)` makes one, `scp -p asgd.secret OTHER:` hands it to another "
    f"machine. Then run `export {SECRET_ENV}=$(cat asgd.secret)` on each."
)
_LEAST = 16  # characters of a secret
_OWN_ENV = "LIGHTNING_ASGD_OWN_SECRET"  # equals the secret that a job made for itself
_own: str | None = None  # the same: servers outlive a job, and a program may restore its environment between two jobs

LARGEST_ENTRY = 1 << 16  # bytes; a server's last output is the longest thing that is published


@functools.lru_cache(maxsize=8)
def _stretched(secret: str) -> bytes:
    """Slow to compute on purpose: a secret that people think of has less entropy than a key."""
    # A guess takes 16 MiB and 0.05 s of CPU time, which every process of a job spends once.
    return hashlib.scrypt(secret.encode(), salt=b"lightning-asgd", n=1 << 14, r=8, p=1, dklen=32)


def key_for(purpose: bytes, secret: str) -> bytes:
    """32 bytes that follow from a secret, others for each purpose (at most 16 bytes)."""
    return hashlib.blake2b(key=_stretched(secret), digest_size=32, person=purpose).digest()


def provide(*, one_machine: bool) -> None:
    """Make a secret for the jobs of this machine, whose processes inherit the environment, unless there is one.

    For a job on several machines it is withdrawn: the other machines' processes do not know it.
    """
    global _own
    if not one_machine and given() is None:
        os.environ.pop(SECRET_ENV, None)
    elif one_machine and SECRET_ENV not in os.environ:
        _own = os.environ.get(_OWN_ENV) or _own or secrets.token_hex(32)
        os.environ[SECRET_ENV] = os.environ[_OWN_ENV] = _own


def check(needed: str = "") -> None:
    """Raise a ``ConfigurationError`` for a secret that is too short; where it is ``needed``, also if there is none."""
    secret = os.environ.get(SECRET_ENV)
    if needed if secret is None else len(secret) < _LEAST:
        given = "is not set" if secret is None else f"has {len(secret)} characters"
        raise ConfigurationError(
            f"{needed or 'The'} environment variable {SECRET_ENV} {given}. Expected the same secret of at least "
            f"{_LEAST} characters on all machines. {HAND_OUT}"
        )


def given() -> str | None:
    """The secret that a user has set: not one that an earlier job of this process made for itself."""
    secret = os.environ.get(SECRET_ENV)
    return None if secret == os.environ.get(_OWN_ENV) else secret


def treat_as_given() -> Callable[[], None]:
    """Make :func:`given` return the job's own secret, too. Calling the returned function undoes this."""
    own = os.environ.pop(_OWN_ENV, None)
    return lambda: None if own is None else os.environ.__setitem__(_OWN_ENV, own)


def variables() -> dict[str, str | None]:
    """What to give :func:`take` in a process that does not inherit the environment, such as a fork server's child."""
    return {name: os.environ.get(name) for name in (SECRET_ENV, _OWN_ENV)}


def take(variables: dict[str, str | None]) -> None:
    """Adopt the secret of the process that started this one; if that has none, drop any that is set here."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def seal(key: str, value: Any, secret: str | None) -> str:
    """A JSON value for an entry of the rendezvous, with a message authentication code if there is a secret.

    The code covers the entry's key too, so that no valid value can be moved to another place.
    """
    text = json.dumps(value)
    return json.dumps({"value": text, "code": _code(key, text, secret) if secret else ""})


def unseal(key: str, data: bytes, secret: str | None) -> Any:
    """What :func:`seal` was given; None for what it did not make, or made with another secret."""
    if len(data) > LARGEST_ENTRY:
        return None
    try:
        entry = json.loads(data)
        text, code = entry["value"], entry["code"]
        if secret and not hmac.compare_digest(code.encode(), _code(key, text, secret).encode()):
            return None
        return json.loads(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # any process may write anything there
        return None


def _code(key: str, text: str, secret: str) -> str:
    return hmac.new(key_for(b"asgd rendezvous", secret), f"{key}\n{text}".encode(), "sha256").hexdigest()

"""What both ends of a ZeroMQ connection share: keys, settings of sockets, the thread that owns them, frames.

Every connection is encrypted and authenticated with CURVE, and nothing is unpickled. Only the files of this folder
import ``zmq`` (``pip install pyzmq``). All processes of a job share a secret, from which the key pairs of its
servers and of its workers follow. With a process that does not know it the handshake fails, before a message is read or
memory is allocated for one: a server sends it no answer, not even an error, and a worker no message. Messages are those
of ``core/protocol/codec.py``, cut in frames of a few megabytes, or together in one if they are small. So no peer can
have more than a frame allocated before its handshake is complete.

ZeroMQ reconnects by itself. Unanswered calls are repeated over the new connection and answered once (see
:mod:`lightning_asgd.core.calls.reliable_calls`). If no process listens at a server's address any more, the server has
ended, and calls fail.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import zmq
from zmq.utils import z85

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.job.secret import key_for
from lightning_asgd.core.protocol import codec

log = logging.getLogger(__name__)

_FRAME = 4 << 20  # bytes
_LARGEST = _FRAME + (1 << 16)  # a frame with what CURVE adds
_HEADER = 4 << 20
_SMALL, _TOGETHER = 4096, 1024  # bytes of buffers that share a frame, and how many do: no frame is larger than _FRAME
_BEAT_MS, _SILENT_MS = 5000, 20_000  # of ZeroMQ's own heartbeats, which detect lost machines
_TICK_MS = 100


@dataclass(frozen=True)
class Keys:
    """What follows from a job's secret; all in Z85."""

    server_public: bytes
    server: bytes
    worker_public: bytes
    worker: bytes


def keys_of(secret: str) -> Keys:
    """The key pairs that follow from a job's secret."""

    def pair(role: bytes) -> tuple[bytes, bytes]:
        private: bytes = z85.encode(key_for(role, secret))
        return zmq.curve_public(private), private

    return Keys(*pair(b"asgd server"), *pair(b"asgd worker"))


def secure(sock: Any, *, beats: bool) -> None:
    """Options for both ends. Only one ``beats``: if both did, a server with many workers would have twice the work."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
    if beats:
        sock.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
        sock.setsockopt(zmq.HEARTBEAT_TTL, _SILENT_MS)  # for the other end


class Loop:
    """A thread that owns sockets, since no two threads may use one. Other threads submit work to it."""

    def __init__(self, name: str) -> None:
        self.context = zmq.Context(io_threads=1)
        self.poller = zmq.Poller()
        self._wake, self._bell = socket.socketpair()
        self._wake.setblocking(False)
        self._bell.setblocking(False)
        self.poller.register(self._wake.fileno(), zmq.POLLIN)
        self._work: deque[Callable[[], None]] = deque()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, work: Callable[[], None]) -> None:
        """Have the thread call a function soon."""
        self._work.append(work)
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: it has ended
            self._bell.send(b".")

    def tick(self, ready: dict[Any, int]) -> None:
        """Serve the sockets that are ready, and check time-outs; from the thread."""
        raise NotImplementedError

    def end(self) -> None:
        """Close the sockets; from the thread."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            while not self.closed.is_set():
                ready = dict(self.poller.poll(_TICK_MS))
                with contextlib.suppress(BlockingIOError):
                    while self._wake.recv(4096):
                        pass
                while self._work:
                    self._work.popleft()()
                self.tick(ready)
        except Exception:
            log.exception("The thread %s failed. This is a bug.", self.thread.name)
        finally:
            self.closed.set()
            self.end()
            while self._work:
                self._work.popleft()()
            self.context.destroy(linger=0)
            self._wake.close()
            self._bell.close()

    def close(self) -> None:
        """End the thread, and wait for it. May be called more than once."""
        self.closed.set()
        self.submit(lambda: None)
        if self.thread is not threading.current_thread() and self.thread.ident is not None:
            self.thread.join()


# ---------------------------------------------------------------------- frames


def frames_of(about: list[Any], value: Any) -> list[Any]:
    """A message's frames: the header, and buffers that are cut where they are large."""
    return addressed(about, encoded(value)[0])


def encoded(value: Any) -> tuple[list[Any], int]:
    """The frames of a message to any receiver, of which the first lacks its beginning; and the bytes in all."""
    header, buffers = codec.encode(value)
    views = [memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"") for buffer in buffers]
    sizes = [view.nbytes for view in views]
    first = json.dumps([sizes, header.decode()])[1:].encode()
    if len(first) > _HEADER:
        raise ConfigurationError(
            f"A message's header has {len(first):,} bytes. Expected at most {_HEADER:,}: broadcast less, or tensors."
        )
    frames: list[Any] = [first]
    for parts in _frames(sizes):
        cut = [views[index][start:end] for index, start, end in parts]
        frames.append(cut[0] if len(cut) == 1 else b"".join(cut))
    return frames, len(first) + sum(sizes)


def addressed(about: list[Any], frames: list[Any]) -> list[Any]:
    """The frames that :func:`encoded` returns, for one receiver: ``about``, which is not empty, begins the header."""
    first, *others = frames
    return [json.dumps(about)[:-1].encode() + b", " + first, *others]


def assemble(sizes: Sequence[int], frames: Sequence[Any]) -> list[Any]:
    """The buffers of a message, writable."""
    if any(type(size) is not int or size < 0 for size in sizes) or sum(sizes) != sum(len(f.buffer) for f in frames):
        raise ValueError("other sizes")  # before memory is allocated for them
    buffers = [numpy.empty(size, numpy.uint8) for size in sizes]
    for parts, frame in zip(_frames(sizes), frames, strict=True):
        data, at = numpy.frombuffer(frame.buffer, numpy.uint8), 0
        if len(data) != sum(end - start for _, start, end in parts):
            raise ValueError("a frame of another size")
        for index, start, end in parts:
            buffers[index][start:end] = data[at : at + end - start]
            at += end - start
    return buffers


def _frames(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """What each frame holds of a message's buffers: which, from where, to where. Small ones share a frame."""
    small: list[tuple[int, int, int]] = []
    for index, size in enumerate(sizes):
        if 0 < size <= _SMALL:
            small.append((index, 0, size))
        if small and (size > _SMALL or len(small) == _TOGETHER):
            yield small
            small = []
        if size > _SMALL:
            yield from ([(index, start, min(start + _FRAME, size))] for start in range(0, size, _FRAME))
    if small:
        yield small

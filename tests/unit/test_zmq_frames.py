"""How ZeroMQ's messages are cut into frames, and put together again."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asgd.core.protocol import codec

pytest.importorskip("zmq")
from lightning_asgd.transports.zmq.sockets import addressed, assemble, encoded, frames_of

FRAME = 4 << 20
SIZES = st.sampled_from([0, 1, 7, 4095, 4096, 4097, 100_000, FRAME, FRAME + 1])


def received(frames: list[Any]) -> list[Any]:
    return [SimpleNamespace(buffer=memoryview(bytes(frame))) for frame in frames]


def value_of(frames: list[Any]) -> Any:
    *_, sizes, header = json.loads(bytes(frames[0]))
    return codec.decode(header.encode(), assemble(sizes, received(frames[1:])))


@given(st.lists(SIZES, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_message_is_put_together_as_it_was(sizes: list[int]) -> None:
    value = [bytes([index]) * size for index, size in enumerate(sizes)]
    frames = frames_of([1], value)
    assert value_of(frames) == value
    assert all(len(frame) <= FRAME for frame in frames[1:])


def test_small_buffers_share_a_frame_and_large_ones_are_not_copied() -> None:
    assert len(frames_of([1], [torch.zeros(4) for _ in range(1000)])) == 2
    assert len(frames_of([1], [b"x" * 4096] * 1025)) == 3  # a frame is not larger than others
    large = torch.zeros(100_000)
    (_, frame), _ = encoded(large)
    large[0] = 1.0
    assert bytes(frame[:4]) == large[:1].numpy().tobytes()


def test_one_encoding_serves_every_receiver() -> None:
    frames, nbytes = encoded({0: torch.ones(2), 1: "x"})
    for number in (3, 10**6):
        mine = addressed([number], frames)
        assert json.loads(mine[0])[0] == number
        assert mine[1] is frames[1]
        assert value_of(mine)[0].tolist() == [1.0, 1.0]
    assert nbytes == sum(map(len, frames))


@pytest.mark.parametrize(
    ("sizes", "frames"),
    [
        ([10], []),
        ([10], [b"x" * 9]),
        ([], [b"x"]),
        ([-1], []),
        ([10**15, 5 - 10**15], [b"x" * 5]),
        ([1.0], [b"x"]),
        ([True], [b"x"]),
        ([5000, 5], [b"x" * 5, b"x" * 5000]),
        ([5, 5], [b"x" * 5, b"x" * 5]),
    ],
)
def test_frames_that_do_not_fit_are_refused_before_memory_is_allocated(sizes: Any, frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"other sizes|another size|zip"):
        assemble(sizes, received(frames))

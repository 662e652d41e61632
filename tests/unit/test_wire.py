"""Messages become bytes and the same messages again; other bytes become errors and nothing else."""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd import algorithms, compression
from lightning_asgd.algorithms import ASGD, EASGD, Downpour, DropStale, StreamingDiLoCo
from lightning_asgd.core import protocol
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol import Contribution, Epoch, Exchange, InitShard, Join, Pickled, Policy, Reply
from lightning_asgd.core.protocol.codec import decode, encode


def there_and_back(value: Any) -> Any:
    header, buffers = encode(value)
    return decode(header, [bytearray(buffer) for buffer in buffers])


KEYS = st.integers(1 - (1 << 60), (1 << 60) - 1) | st.text(max_size=3) | st.binary(max_size=3)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "value",
    [
        tuple((i, i + 3) for i in range(0, 9000, 5)),
        {i: 7 * i for i in range(2000)},
        {i: f"worker {i}" for i in range(2000)},
        list(range(2000)),
        tuple(range(2000)),
        frozenset(range(2000)),
        ((1, 2.5), (None, "x"), (True, False)),
        ((1, 2), (3, [4])),
        tuple((i, 1 << 70) for i in range(100)),
        tuple((i, bool(i)) for i in range(100)),
        {i: i > 5 for i in range(100)},
        {i: i / 3 for i in range(100)},
        {"M": 5},
        ((1, 2), (3, 4, 5)),
        ((1, 2), [3, 4]),
        {1: [2], b"3": 4, None: 5, Role.PARAMETER: 6},
        (),
        ((), ()),
        {},
    ],
)
def test_many_plain_values(value: Any) -> None:
    """They are not looked at one by one where JSON knows them."""
    back = there_and_back({"value": value})["value"]
    assert back == value
    assert type(back) is type(value)
    assert [type(item) for item in back] == [type(item) for item in value]
    assert repr(back) == repr(value)


@pytest.mark.parametrize(
    "header", ['["P", [1, 2, 3]]', '["P", [1, [2]]]', '["P", {"1": 2}]', '["P", 5]', '["D", [[1]]]']
)
def test_what_are_no_pairs_is_an_error(header: str) -> None:
    with pytest.raises(ProtocolError):
        decode(header.encode(), [])


@given(PLAIN)
def test_plain_values(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


@given(
    st.sampled_from(
        [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    ),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_tensors_bit_by_bit(dtype: torch.dtype, shape: list[int]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = there_and_back(tensor)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back, tensor)
    back.zero_()  # memory of its own, that can be written to


def test_views_arrive_without_what_they_are_views_of() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    assert torch.equal(there_and_back(matrix.t()), matrix.t())
    assert torch.equal(there_and_back(matrix[1]), matrix[1])


@pytest.mark.parametrize(
    "message",
    [
        Join("s", 1, 2, Policy(silence_s=3.0)),
        InitShard("s", 0, ((Role.PARAMETER, "float32", 3),), ASGD("sum", transforms=(DropStale(3),))),
        InitShard("s", 0, (), Downpour("adam", options={"betas": (0.9, 0.99)}), compression=compression.Int8()),
        InitShard("s", 0, (), EASGD()),
        InitShard("s", 0, (), StreamingDiLoCo()),
        Contribution("s", 0, 3, "broadcast", "x", payload={"a": (1, None)}, answer={0: 1.5, 3: "x"}),
        Epoch("e", 3, (1, 3), b"\x00\xff", ((0, 1),)),
        Reply(3, 1, Verdict.APPLIED, pushes={0: 1}, incarnations={1: 2}, left={2: "gone"}, stopped=4),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages(message: Any) -> None:
    back = there_and_back(message)
    assert back == message
    assert repr(back) == repr(message)


def test_an_exchange_with_its_weights() -> None:
    back = there_and_back(Exchange("s", 0, 1, 0, True, True, (torch.arange(5.0), (torch.ones(2), torch.zeros(0)))))
    assert torch.equal(back.update[0], torch.arange(5.0))
    assert back.update[1][1].shape == (0,)


def test_tensors_that_torch_has_yet_to_conjugate_or_negate() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (numbers.conj(), numbers.conj().imag, numbers.conj()[1:]):
        assert torch.equal(there_and_back(lazy), lazy)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (torch.eye(2).to_sparse(), r"torch\.float32 and torch\.sparse_coo"),
        (torch.zeros(2, device="meta"), r"torch\.float32 and torch\.strided on meta"),
    ],
    ids=["sparse", "meta"],
)
def test_a_tensor_that_cannot_be_sent_is_an_error_that_names_its_kind(tensor: torch.Tensor, named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        encode([tensor])


class Mine:
    """Of no class that the package knows."""


@dataclass(frozen=True)
class Tripled(algorithms.Algorithm):
    """A user's own rule."""

    factor: float = 3.0


@dataclass(frozen=True)
class Halved(algorithms.Transform):
    """A user's own transform."""


def test_algorithms_and_transforms_of_users_are_imported_by_name() -> None:
    mine = Tripled(2.0, transforms=[Halved(), algorithms.DropStale(3)])
    assert there_and_back(mine) == mine


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "no_such_module:Rule",
        "tests.unit.test_wire:Mine",
        "tests.unit.test_wire:algorithms.ASGD",
        "lightning_asgd.algorithms:ASGD",  # which goes by its short name
        ":ASGD",
    ],
)
def test_nothing_else_is_made_by_its_module(name: str) -> None:
    with pytest.raises(ProtocolError):
        decode(json.dumps(["O", name, {}]).encode(), [])


def test_an_object_crosses_closed_or_not_at_all() -> None:
    message = Contribution("s", 0, 1, "broadcast", "x", payload=Pickled(b"abc"), answer={0: Pickled(b"")})
    assert there_and_back(message) == message
    with pytest.raises(ProtocolError, match=r"test_wire.Mine cannot be sent without pickle"):
        encode({"elsewhere": Mine()})


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[",
        b"{}",
        b"[]",
        b'["X"]',
        b'["T",0,"float32",[1]]',
        b'["T",0,"load",[1]]',
        b'["T",0,"float32",[-1]]',
        b'["T",7,"float32",[1]]',
        b'["O","Popen",{"args":1}]',
        b'["O","Role",{}]',
        b'["O","Join",{"session":"s","shell":1}]',
        b'["O","Join",{}]',
        b'["E","Join",1]',
        b'["E","Role","no such role"]',
        b'["D",[[1]]]',
        b'["L",[["B",0],["B",0]]]',  # each buffer is used once
        b"[" * 5000,
        b'["L",[' * 50 + b"]]" * 50,
    ],
)
def test_what_is_no_message_is_an_error(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(header, [b"12345"])


COLLIDING = [number * ((1 << 61) - 1) for number in range(40_000)]  # whole numbers of one hash


@pytest.mark.parametrize(
    "value",
    [
        ["S", COLLIDING],
        ["F", COLLIDING],
        ["M", [item for number in COLLIDING for item in (number, 0)]],
        ["D", [[number, ["L", []]] for number in COLLIDING]],
        ["S", [["U", [number]] for number in COLLIDING]],
        ["D", [[["U", [number]], 0] for number in COLLIDING]],
        ["M", [item for number in range(1, 40_000) for item in (number << 20, 0)]],
        ["T", 0, "float32", [1 << 13_000] * 1000],
        ["T", 0, "float32", [1] * 100_000],
    ],
    ids=["set", "frozenset", "plain dict", "dict", "set of tuples", "dict by tuples", "many", "sizes", "dimensions"],
)
def test_a_small_message_keeps_no_server_busy(value: Any) -> None:
    header, begun = json.dumps(value).encode(), time.process_time()
    with pytest.raises(ProtocolError):
        decode(header, [bytearray(4)])
    assert time.process_time() - begun < 2.0


@pytest.mark.parametrize("value", [{(1, 2)}, {(1,): 2}, {1 << 62: "x"}, frozenset([2.5])], ids=str)
def test_keys_that_no_server_takes_are_not_sent(value: Any) -> None:
    with pytest.raises(ProtocolError, match="members or keys"):
        encode(value)


@given(st.binary(max_size=60), st.binary(max_size=10))
def test_rubbish_is_an_error_or_a_plain_value(header: bytes, buffer: bytes) -> None:
    try:
        value = decode(header, [buffer])
    except ProtocolError:
        return
    json.dumps(value)


def test_a_pickled_message_names_no_file_of_the_protocol() -> None:
    """RPC pickles messages: a version whose classes lie elsewhere must come as far as comparing PROTOCOL."""
    text = pickle.dumps(protocol.Join("s", 0, 1, policy=protocol.Policy(1.0)))
    assert b"lightning_asgd.protocol" in text
    assert b"lightning_asgd.core" not in text
    assert pickle.loads(text) == protocol.Join("s", 0, 1, policy=protocol.Policy(1.0))

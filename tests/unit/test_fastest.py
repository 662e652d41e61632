"""The fastest m of n: whose gradients make a step. The race itself is a benchmark."""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("fastest")


@pytest.fixture
def holder(fastest: Any) -> Any:
    """Of six weights in two parameters, all zero, which go down by the mean of two gradients."""
    parameters = [torch.zeros(2, 2), torch.zeros(2)]
    return fastest.Holder(parameters, torch.optim.SGD(parameters, lr=1.0), 2)


@pytest.fixture
def workers(holder: Any) -> Iterator[list[socket.socket]]:
    """Links of three workers, which the holder answers."""
    pairs = [socket.socketpair() for _ in range(3)]
    threads = [threading.Thread(target=holder.answer, args=(there,), daemon=True) for _, there in pairs]
    for thread in threads:
        thread.start()
    yield [here for here, _ in pairs]
    for here, there in pairs:
        here.shutdown(socket.SHUT_RDWR)
        here.close()
        there.close()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def gradient(value: float) -> torch.Tensor:
    return torch.arange(6.0) * value


def test_the_first_gradients_are_averaged_and_the_late_one_is_dropped(holder: Any) -> None:
    assert [holder.admits(0) for _ in range(3)] == [True, True, False]
    holder.add(gradient(1))
    assert holder.step == 0
    assert not holder.weights.any()
    holder.add(gradient(3))
    step, weights = holder.after(0)
    assert step == 1
    assert torch.equal(weights, -gradient(2))
    assert not holder.admits(0)
    assert [holder.admits(1) for _ in range(3)] == [True, True, False]
    for value in (5, 7):
        holder.add(gradient(value))
    assert torch.equal(holder.after(0)[1], -gradient(2 + 6))


def test_a_late_worker_goes_on_from_the_newest_weights(fastest: Any, workers: list[socket.socket]) -> None:
    def weights_of(link: socket.socket) -> tuple[int, torch.Tensor]:
        step, weights = fastest.receive(link), torch.empty(6)
        fastest.fill(link, weights)
        return step, weights

    def offer(link: socket.socket, step: int) -> None:
        fastest.send(link, step)
        assert fastest.receive(link) == step  # it is among the first

    first, second, slow = workers
    assert all(weights_of(link)[0] == 0 for link in workers)
    for step in range(3):
        for link in (first, second):
            offer(link, step)
        for link in (first, second):
            link.sendall(gradient(step + 1).numpy().tobytes())
        for link in (first, second):
            assert weights_of(link)[0] == step + 1
    fastest.send(slow, 0)  # when the others have made three steps
    step, weights = weights_of(slow)
    assert step == 3
    assert torch.equal(weights, -gradient(1 + 2 + 3))
    offer(slow, 3)
    offer(first, 3)
    fastest.send(second, 3)  # third of two
    slow.sendall(gradient(0).numpy().tobytes())
    first.sendall(gradient(2).numpy().tobytes())
    assert all(torch.equal(weights_of(link)[1], -gradient(6 + 1)) for link in workers)

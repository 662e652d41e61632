"""Which gradients travel together, and whose they are: with one worker, whose mean is its own gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.futures import Future

from lightning_asgd.algorithms import LayerWise
from lightning_asgd.core.foundation.layout import build_layout
from lightning_asgd.core.worker.synchronizer import Training
from lightning_asgd.layerwise import layer_gradients
from lightning_asgd.layerwise.layer_gradients import LayerGradients


class Alone:
    """The connection of the only worker."""

    sender = ("session", 0)

    def __init__(self, servers: int = 1) -> None:
        self.servers = range(servers)
        self.messages: list[tuple[int, Any]] = []

    def post(self, server: int, message: Any) -> Future[Any]:
        self.messages.append((server, message))
        answer: Future[Any] = Future()
        answer.set_result(message.gradient)
        return answer

    def result(self, server: int, future: Future[Any]) -> Any:
        return future.wait()


def made(
    module: nn.Module, optimizers: Sequence[Any], connection: Alone, delay: int = 0, *, one_machine: bool = False
) -> LayerGradients:
    training = Training(optimizers=lambda: optimizers, late_steps=True)
    layout = build_layout(module.named_parameters(), 1)
    given = (cast(Any, connection), layout, module, LayerWise(delay), training, lambda: None)
    return LayerGradients(*given, one_machine=one_machine)


def trained(module: nn.Module, optimizers: Sequence[Any], loss: Any, ours: LayerGradients | None) -> None:
    for optimizer in optimizers:

        def closure(optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            value = loss(module)
            value.backward()
            return value

        optimizer.step(ours.wrap(optimizer, closure) if ours is not None else closure)


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)), nn.Linear(16, 1))


def loss_of(module: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    value: torch.Tensor = module(torch.randn(4, 16)).square().mean()
    return value


@pytest.mark.parametrize(
    ("limit", "piece", "one_machine", "messages"),
    [
        (1, 1 << 30, False, 21),
        (3 * 4 * 272, 1 << 30, False, 7),
        (1 << 30, 1 << 30, False, 1),
        (1 << 30, 4000, False, 6),
        (1, 1000, False, 41),
        (1, 1000, True, 21),
        (1 << 30, 1000, True, 1),
    ],
)
def test_small_layers_leave_together_and_large_ones_in_pieces_over_a_network(
    limit: int, piece: int, one_machine: bool, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_gradients, "_BUNDLE", limit)
    monkeypatch.setattr(layer_gradients, "_PIECE", piece)
    one, other = deep(), deep()
    connection = Alone(servers=2)
    mine = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)]
    ours = made(one, mine, connection, one_machine=one_machine)
    for _ in range(3):
        trained(one, mine, loss_of, ours)
    assert len(connection.messages) == 3 * messages
    assert sum(m.gradient.numel() for _, m in connection.messages) == 3 * sum(p.numel() for p in one.parameters())
    assert len({server for server, _ in connection.messages}) == min(2, messages)
    assert len({(m.step, m.layer) for _, m in connection.messages}) == 3 * messages
    ours.catch_up()
    theirs = [torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)]
    for _ in range(3):
        trained(other, theirs, loss_of, None)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    ours.close()


def test_weights_and_biases_may_have_optimizers_of_their_own() -> None:
    one, other = deep(), deep()
    found = []
    for module, connection in ((one, Alone()), (other, None)):
        parameters = dict(module.named_parameters())
        weights = [p for name, p in parameters.items() if name.endswith("weight")]
        biases = [p for name, p in parameters.items() if name.endswith("bias")]
        optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(biases, lr=0.1)]
        ours = None if connection is None else made(module, optimizers, connection)
        for _ in range(3):
            trained(module, optimizers, loss_of, ours)
        if ours is not None:
            ours.catch_up()
        found.append(parameters)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_belongs_to_another_optimizer_is_neither_sent_nor_changed() -> None:
    module = deep()
    first, second = module[:10], module[10:]
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)]
    connection = Alone()
    ours = made(module, optimizers, connection)
    trained(module, optimizers, loss_of, ours)
    ours.catch_up()
    connection.messages.clear()
    before = [p.detach().clone() for p in second.parameters()]
    trained(module, optimizers[:1], loss_of, ours)  # its backward reaches the other's parameters, too
    assert sum(m.gradient.numel() for _, m in connection.messages) == sum(p.numel() for p in first.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, second.parameters(), strict=True))
    ours.close()


def test_shared_parameters_of_two_optimizers_are_sent_without_what_is_only_one_of_theirs() -> None:
    module = nn.ModuleDict({"body": nn.Linear(16, 16), "a": nn.Linear(16, 1), "b": nn.Linear(16, 1)})
    body, a, b = (list(module[name].parameters()) for name in ("body", "a", "b"))
    optimizers = [torch.optim.SGD(body + a, lr=0.1), torch.optim.SGD(body + b, lr=0.1)]
    connection = Alone()
    ours = made(module, optimizers, connection)

    def loss(module: Any) -> torch.Tensor:
        shared = module["body"](torch.ones(1, 16))
        value: torch.Tensor = (module["a"](shared) + module["b"](shared)).sum()
        return value

    trained(module, optimizers, loss, ours)
    sent = [message.gradient.numel() for _, message in connection.messages]
    assert sorted(sent) == sorted([17, 272, 17, 272])
    ours.close()


def test_sparse_gradients_and_layers_without_a_gradient() -> None:
    module = nn.ModuleDict({"words": nn.Embedding(10, 4, sparse=True), "unused": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    ours = made(module, [optimizer], Alone())
    ours._called = set()  # awaited in the step
    before = module["words"].weight.detach().clone()
    trained(module, [optimizer], lambda m: m["words"](torch.tensor([3])).sum(), ours)
    changed = (module["words"].weight.detach() - before).abs().sum(1)
    assert changed.nonzero().flatten().tolist() == [3]
    ours.close()

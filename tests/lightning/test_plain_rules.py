"""Plain loops of two processes whose workers wait for each other: they train what one process trains on all batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from lightning_asgd import Advanced, AsyncSGD
from lightning_asgd.algorithms import ASGD, LayerWise
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError
from tests.helpers.plain import Counts, numbered
from tests.helpers.ports import free_port
from tests.lightning.test_runs import to_file

STEPS, BATCH = 8, 6
LENGTHS = (1, 5)  # tokens of a worker's texts


def made() -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    used, unused = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(2, 2)
    model = nn.ModuleList([used, unused])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def clipped(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    mse_loss(model[0](x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def accumulated(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    for part in range(3):
        (mse_loss(model[0](x[part::3]), y[part::3]) / 3).backward()
    optimizer.step()


def with_closure(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model[0](x), y)
        loss.backward()
        return loss

    optimizer.step(closure)


def with_gradients_of_its_own(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    parameters = list(model[0].parameters())
    gradients = torch.autograd.grad(mse_loss(model[0](x), y), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def with_a_scaler(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(mse_loss(model[0](x), y)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)


WAYS: list[Callable[..., None]] = [clipped, accumulated, with_closure, with_gradients_of_its_own, with_a_scaler]


def trained(way: Callable[..., None], rank: int | None = None, **rule: Any) -> list[float]:
    """The weights after some steps with both workers' samples, or with those of the worker of a rank."""
    model, optimizer = made()

    def train() -> None:
        for step in range(STEPS):
            x, y = batch(step)
            way(model, optimizer, *((x, y) if rank is None else (x[rank::2], y[rank::2])))

    if rank is None:
        train()
    else:
        with AsyncSGD(model, optimizer, **rule) as asgd:
            train()
            assert asgd.stats.steps == STEPS
    assert way is not clipped or rule.get("algorithm") != LayerWise() or model[1].weight.grad is None  # type: ignore[union-attr]
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def by_tokens(rank: int | None = None) -> float:
    """A weight that is trained on texts of different lengths, with a mean over tokens as loss."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.01)
    texts = [torch.full((length, 1), float(length)) for length in LENGTHS]

    def train(text: torch.Tensor, count: Callable[[Any], None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            weight(text).square().mean().backward()
            count({"attention_mask": torch.ones(1, len(text))})
            optimizer.step()

    if rank is None:
        train(torch.cat(texts), lambda _: None)
        return weight.weight.item()
    rule: dict[str, Any] = {
        "nsync": "restarted",
        "total_steps": 10,
        "algorithm": "local_sgd",
        "advanced": Advanced(units="tokens"),
    }
    with AsyncSGD(weight, optimizer, **rule) as asgd:
        train(texts[rank], asgd.count_batch)
        assert asgd.stats.exchanges == STEPS  # 10 steps of two workers give the period 1
    return weight.weight.item()


def long_period(rank: int) -> int:
    """Exchanges of 20 steps, where 10,000 steps of the chief's two workers give the period 5."""
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    total = (10_000, 10)[rank]
    with AsyncSGD(layer, optimizer, nsync="restarted", total_steps=total, algorithm="local_sgd") as asgd:
        for _ in range(20):
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return asgd.stats.exchanges


def late(rank: int) -> list[float]:
    """Weights with a delay of two steps, of which a worker has no batch for the last one."""
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with AsyncSGD(layer, optimizer, algorithm=LayerWise(2)) as asgd:
        for _ in range(6 - rank):
            optimizer.zero_grad()
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        asgd.sync()
        if rank == 0:  # and then none at all
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        asgd.sync()
        assert asgd.stats.steps == 6 + 1 - 2 * rank
    return torch.cat([p.detach().flatten() for p in layer.parameters()]).tolist()


def unfrozen(rank: int) -> list[float]:
    """The weights of a layer that is unfrozen after an epoch."""
    torch.manual_seed(5 + rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with AsyncSGD(model, optimizer, nsync=1) as asgd:
        for epoch in asgd.epochs(2):
            if epoch == 1:
                model[0].requires_grad_(requires_grad=True)
            for (x,) in asgd.batches(torch.utils.data.TensorDataset(torch.randn(8, 2)), batch_size=1):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
            asgd.sync()
        names = [spec.name for spec in asgd._in_use.synchronizer.layout.tensors]
        assert "0.weight" in names
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def grown(rank: int, how: str) -> list[float]:
    """Layer-wise weights between two sync points, after a layer was unfrozen, or was given to the optimizer."""
    torch.manual_seed(6 + rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(how == "given")
    optimizer = torch.optim.SGD(model.parameters() if how == "unfrozen" else model[1].parameters(), lr=0.1)
    with AsyncSGD(model, optimizer, algorithm=LayerWise()) as asgd:
        for epoch in asgd.epochs(3):
            if epoch == 1 and how == "unfrozen":
                model[0].requires_grad_(requires_grad=True)
            if epoch == 1 and how == "given":
                optimizer.add_param_group({"params": list(model[0].parameters())})
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 2)).square().sum().backward()
                optimizer.step()
            weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return weights


def unfrozen_within_a_pass(rank: int) -> str:
    """The error where a worker has unfrozen a layer, and the other has not."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    asgd = AsyncSGD(model, optimizer, nsync=1)

    def train() -> None:
        for (x,) in asgd.batches(data, batch_size=1):
            model[0].requires_grad_(rank == 1)
            model(x).sum().backward()
            optimizer.step()

    with pytest.raises(ConfigurationError) as error, asgd:
        train()
    return str(error.value)


def with_a_step_in_backward(rank: int) -> str:
    """The error where an optimizer steps in a hook of backward."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(ASGDError) as error, AsyncSGD(model, optimizer, algorithm=LayerWise()):
        model(torch.ones(1, 2)).sum().backward()
    handle.remove()
    return str(error.value)


def with_a_rest(rank: int) -> list[float]:
    """How often each sample was trained, with steps of four batches, and a step for the rest after each pass."""
    model = Counts(62)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with AsyncSGD(model, optimizer, nsync=1, algorithm=ASGD("sum")) as asgd:
        for epoch in range(3):
            waiting = 0
            for (numbers,) in asgd.batches(numbered(62), batch_size=(2, 3)[rank], accumulate=4):
                model(numbers).backward()
                waiting = (waiting + 1) % 4
                if not waiting:
                    optimizer.step()
                    optimizer.zero_grad()
            if waiting or epoch == rank:  # on one worker at least
                optimizer.step()
                optimizer.zero_grad()
    return model.seen.tolist()


def member(folder: Path, rank: int, port: int) -> None:
    """A worker of several jobs, one after the other."""
    to_file(folder / f"{rank}.log")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    found = {way.__name__: trained(way, rank, algorithm=LayerWise()) for way in WAYS}
    found |= {"tokens": by_tokens(rank), "period": long_period(rank), "late": late(rank), "epoch": unfrozen(rank)}
    found["rest"] = with_a_rest(rank)
    found |= {how: grown(rank, how) for how in ("unfrozen", "given")}
    found |= {"within": unfrozen_within_a_pass(rank), "step": with_a_step_in_backward(rank)}
    torch.save(found, folder / str(rank))


def killed(folder: Path, rank: int, port: int) -> None:
    """A worker of a job with layer-wise gradients; that of rank 1 ends before the others."""
    to_file(folder / f"{rank}.log")
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with AsyncSGD(layer, optimizer, algorithm=LayerWise()) as asgd:
        for step in range(STEPS):
            layer(torch.ones(1, 2)).sum().backward()
            if rank == 1 and step == 3:
                os._exit(1)
            optimizer.step()
        assert asgd.stats.steps == STEPS


def test_a_killed_worker_is_not_waited_for(tmp_path: Path, mains: Any) -> None:
    """No process has started the workers that would report it, and none sends heartbeats."""
    port = free_port()
    workers = [mains(target=killed, args=(tmp_path, rank, port)) for rank in (0, 1)]
    try:
        for worker in workers:
            worker.start()
        for worker, code in zip(workers, (0, 1), strict=True):
            worker.join(100)
            assert worker.exitcode == code, "".join(log.read_text() for log in tmp_path.glob("*.log"))
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def test_two_processes_train_what_one_trains_on_all_batches(tmp_path: Path, mains: Any) -> None:
    port = free_port()
    workers = [mains(target=member, args=(tmp_path, rank, port)) for rank in (0, 1)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(100)
            assert worker.exitcode == 0, "".join(log.read_text() for log in tmp_path.glob("*.log"))
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    mine, theirs = (torch.load(tmp_path / str(rank)) for rank in (0, 1))
    for way in WAYS:
        assert mine[way.__name__] == pytest.approx(trained(way), abs=1e-5), way.__name__
    assert mine["tokens"] == pytest.approx(by_tokens(), abs=1e-6)
    assert mine["period"] == 4
    assert mine["within"].startswith("Parameters were unfrozen on workers [1], not on [0]. Expected the same on all")
    assert mine["step"].startswith("An optimizer stepped during a backward pass, or after one that raised")
    assert mine["rest"] == [3.0] * 62
    assert mine == theirs

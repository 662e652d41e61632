"""Other users of torch.distributed in the workers' processes, which somebody else has started."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterDataPipe

from lightning_asgd import ASGDStrategy
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.errors import CollectiveUnavailableError
from tests.helpers.holding import await_file
from tests.helpers.ports import free_port
from tests.lightning.models import Regression, digest, loader, trainer

SAMPLES, BATCH = 512, 8  # 64 batches
AHEAD = 45  # batches of rank 0 for which the slow one waits: more than twice as many as are left for it


class Slow(Regression):
    """One of the ranks takes much longer for a batch, and in its third one waits until the other is far ahead."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.is_ahead = folder / "ahead"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(0.1)
            if batch_idx == 2:
                await_file(self.is_ahead)
        elif batch_idx == AHEAD - 1:
            self.is_ahead.touch()
        return super().training_step(batch, batch_idx)


class Terminated(Regression):
    """One of the ranks gets SIGTERM in its sixth batch, for which the other waits in its first: else it trained all."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.signalled = folder / "signalled"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 0 and batch_idx == 0:
            await_file(self.signalled)
        if self.global_rank == 1 and batch_idx == 5:
            self.signalled.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def fit(folder: Path, module: Regression, **options: Any) -> Any:
    run = trainer(folder, ASGDStrategy(nsync=4), max_epochs=1, **options)
    run.fit(module, loader(SAMPLES, BATCH))
    return run


def not_in_step(folder: Path, rank: int, port: int) -> Any:
    """Whether ranks keep their own pace although a script has made a process group of torch's."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2)
    module = Slow(folder)
    fit(folder, module)
    return {"batches": len(module.losses), "backend": dist.get_backend()}


def ddp_afterwards(folder: Path, rank: int, port: int) -> Any:
    """A-SGD and then DDP in the same processes."""
    fit(folder, Regression())
    module = Regression()
    trainer(folder, "ddp", max_epochs=1).fit(module, loader(SAMPLES, BATCH))
    weights = digest(torch.nn.ParameterList(module.parameters()))
    return {"batches": len(module.losses), "digest": weights, "backend": dist.get_backend()}


def one_is_terminated(folder: Path, rank: int, port: int) -> Any:
    """Rank 1 gets SIGTERM, and the other trains all there is."""
    module = Terminated(folder)
    run = fit(folder, module)
    return {"batches": len(module.losses), "step": run.global_step}


class Numbers(IterDataPipe[Any]):
    """As many samples as others have, each with its number."""

    def __iter__(self) -> Iterator[Any]:
        yield from ((torch.full((8,), i / SAMPLES), torch.tensor([i / SAMPLES]), i) for i in range(SAMPLES))


class Grouped(Regression):
    """Notes its samples by epoch, and the sum over a process group that it makes with gloo."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[list[int]] = []
        self.sums: list[float] = []
        self.refusal = ""
        self.group: Any = None

    def on_fit_start(self) -> None:
        self.group = dist.new_group(backend="gloo")

    def on_train_epoch_start(self) -> None:
        self.samples.append([])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.samples[-1] += batch[2].tolist()
        if dist.get_backend(self.group) == "asgd" and not self.refusal:
            try:
                dist.all_reduce(torch.ones(1), group=self.group)
            except CollectiveUnavailableError as error:
                self.refusal = str(error)
        return super().training_step(batch[:2], batch_idx)

    def on_train_epoch_end(self) -> None:
        total = torch.tensor([self.global_rank + 1.0])
        dist.all_reduce(total, group=self.group)
        self.sums.append(total.item())


def pipes(folder: Path, rank: int, port: int, transport: str, processes: int) -> Any:
    """What groups and loaders that ask for gloo are given."""
    logging.basicConfig()
    os.environ[SECRET_ENV] = "a secret of this test alone"
    module = Grouped()
    keep = {"multiprocessing_context": "fork", "persistent_workers": True} if processes else {}
    data = DataLoader(Numbers().shuffle().sharding_filter(), BATCH, num_workers=processes, **keep)
    trainer(folder, ASGDStrategy(nsync=4, transport=transport), max_epochs=2).fit(module, data)
    backend = dist.get_backend(module.group)
    return {"samples": module.samples, "sums": module.sums, "refusal": module.refusal, "backend": backend}


def _process(job: Callable[..., Any], folder: Path, rank: int, port: int) -> None:
    with (folder / f"output{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    (folder / f"result{rank}.json").write_text(json.dumps(job(folder, rank, port)))


def run(mains: Any, job: Callable[..., Any], folder: Path, seconds: float = 50) -> tuple[list[Any], list[int | None]]:
    """Results and exit codes of both ranks."""
    port = free_port()
    processes = [mains(target=_process, args=(job, folder, rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    files = [folder / f"result{rank}.json" for rank in range(2)]
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    said = "\n".join((folder / f"output{rank}").read_text()[-3000:] for rank in range(2))
    assert None not in codes, f"not over after {seconds} s:\n{said}"
    assert results[0] is not None, said
    return results, codes


def test_a_process_group_of_somebody_else_does_not_put_workers_in_step(tmp_path: Path, mains: Any) -> None:
    (zero, one), codes = run(mains, not_in_step, tmp_path)
    assert codes == [0, 0]
    assert zero["backend"] == one["backend"] == "gloo"
    assert zero["batches"] + one["batches"] == SAMPLES // BATCH
    assert zero["batches"] > 2 * one["batches"]  # in step they would be equal


def test_ddp_in_the_same_processes_afterwards(tmp_path: Path, mains: Any) -> None:
    (zero, one), codes = run(mains, ddp_afterwards, tmp_path)
    assert codes == [0, 0]
    assert zero == one
    assert zero["batches"] == SAMPLES // BATCH // 2
    assert zero["backend"] == "gloo"  # DDP's own: ours would carry its gradients over the servers


def test_a_worker_that_gets_sigterm_ends_and_the_others_go_on(tmp_path: Path, mains: Any) -> None:
    (zero, one), codes = run(mains, one_is_terminated, tmp_path)
    assert codes == [0, 0]  # Lightning ends with SystemExit
    assert one is None
    assert zero["batches"] > SAMPLES // BATCH // 2
    assert "Error" not in (tmp_path / "output1").read_text()


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("transport", "backend", "said"),
    [
        ("rpc", "gloo", "They are neither encrypted nor authenticated."),
        ("zmq", "asgd", "A process group with backend 'gloo' was requested. A-SGD's own backend serves it"),
    ],
)
def test_gloo_and_iter_data_pipes(
    tmp_path: Path, mains: Any, transport: str, backend: str, said: str, processes: int
) -> None:
    """Their loaders make a group by gloo, of which all learn the seed to shuffle by."""
    if transport == "zmq":
        pytest.importorskip("zmq")
    (zero, one), codes = run(mains, functools.partial(pipes, transport=transport, processes=processes), tmp_path)
    assert codes == [0, 0]
    assert zero["backend"] == one["backend"] == backend
    assert zero["sums"] == one["sums"] == [3.0, 3.0]
    for mine, theirs in zip(zero["samples"], one["samples"], strict=True):
        assert sorted(mine + theirs) == list(range(SAMPLES))
        assert sorted(mine) != mine  # shuffled
    assert (tmp_path / "output0").read_text().count(said) == 1
    if backend == "asgd":
        assert "all_reduce was called in the asynchronous phase" in zero["refusal"]

"""Jobs on a CUDA device. Every one of them trains in processes of its own: CUDA does not survive a fork."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.shared_device import SharedCUDA
from lightning_asgd import Advanced, ASGDStrategy, AsyncSGD, Timeouts
from lightning_asgd.algorithms import ASGD, Downpour
from tests.helpers.programs import environment
from tests.helpers.servers import servers_of
from tests.lightning.models import Recorder, Regression, digest, loader, trainer
from tests.lightning.test_islands import Started
from tests.lightning.test_islands import serve as serve_islands
from tests.lightning.test_processes import Signpost, alive, training, wait_until
from tests.lightning.test_runs import EPOCHS, SAMPLES, Counts, address_of_run, serve, to_file

CUDA = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")]
ON_CUDA = pytest.param("cuda", marks=CUDA)


def on_cuda(function: Any) -> Any:
    for mark in CUDA:
        function = mark(function)
    return pytest.mark.timeout(150)(function)


@pytest.fixture
def start(tmp_path: Path, mains: Any) -> Iterator[Callable[..., Any]]:
    """Starts processes that the test's end kills."""
    started = []

    def begin(target: Any, *args: Any) -> Any:
        started.append(mains(target=target, args=(tmp_path, *args)))
        started[-1].start()
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.join()


def finish(process: Any, log: Path, seconds: float = 60) -> None:
    process.join(seconds)
    assert process.exitcode == 0, log.read_text()[-5000:]


# ---------------------------------------------------------------------- one worker is Lightning alone


class Model(Regression):
    """With optimizers that only CUDA has. The loss of some batches is infinite, so that a GradScaler skips steps."""

    def __init__(self, optimizer: str = "", spoiled: tuple[int, ...] = (), compiled: str = "") -> None:
        super().__init__()
        self.optimizer, self.spoiled = optimizer, spoiled
        if compiled:
            self.net.compile(mode=compiled)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        return loss * float("inf") if batch_idx in self.spoiled else loss

    def configure_optimizers(self) -> Any:
        if not self.optimizer:
            return super().configure_optimizers()
        return torch.optim.AdamW(self.parameters(), lr=0.01, **{self.optimizer: True})


def precise(accelerator: str, precision: str) -> dict[str, Any]:
    """A Trainer's arguments. Lightning's GradScaler is one for CUDA; torch has one for the CPU as well."""
    if accelerator == "cpu" and precision == "16-mixed":
        return {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    return {"precision": precision}


def train_both(folder: Path, accelerator: str, cases: list[str]) -> None:
    """Train the same with Lightning alone and as the one worker of a job."""
    to_file(folder / "both.log")
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {}
    for case in cases:
        model, how = CASES[case]
        for strategy in ("auto", ASGDStrategy(1), ASGDStrategy(5)):
            pl.seed_everything(1, verbose=False)
            module = Model(**model)
            about = {**how, **precise(accelerator, how.get("precision", "32-true"))}
            made = trainer(folder, strategy, devices=1, accelerator=accelerator, use_distributed_sampler=False, **about)
            made.fit(module, loader())
            state = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
            scaler = getattr(made.precision_plugin, "scaler", None)
            exchanges = 0 if isinstance(strategy, str) else strategy.stats.exchanges
            counted = {"step": made.global_step, "scale": scaler and scaler.get_scale()}
            found.setdefault(case, []).append((state, counted, exchanges))
    torch.save(found, folder / "both.pt")


SKIPPED = (0, 1, 7, 8, 9, 20)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "16-mixed": ({}, {"precision": "16-mixed"}),
    "16-mixed, skipped": ({"spoiled": SKIPPED}, {"precision": "16-mixed"}),
    "16-mixed, skipped, fused": ({"spoiled": SKIPPED, "optimizer": "fused"}, {"precision": "16-mixed"}),
    "16-mixed, skipped, clipped": ({"spoiled": SKIPPED}, {"precision": "16-mixed", "gradient_clip_val": 0.1}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
    "bf16-true": ({}, {"precision": "bf16-true"}),
    "16-true": ({}, {"precision": "16-true"}),
    "fused": ({"optimizer": "fused"}, {}),
    "capturable": ({"optimizer": "capturable"}, {}),
    "clipped": ({}, {"gradient_clip_val": 0.1}),
    "compiled": ({"compiled": "default"}, {}),
    "CUDA graphs": ({"compiled": "reduce-overhead"}, {}),
}


@pytest.mark.parametrize(
    ("accelerator", "cases"),
    [pytest.param("cpu", ["16-mixed, skipped"], marks=pytest.mark.slow), pytest.param("cuda", list(CASES), marks=CUDA)],
)
def test_one_worker_trains_as_lightning_does(tmp_path: Path, start: Any, accelerator: str, cases: list[str]) -> None:
    finish(start(train_both, accelerator, cases), tmp_path / "both.log", 180)
    for case, (alone, *ours) in torch.load(tmp_path / "both.pt").items():
        assert alone[1]["scale"] is None or "skipped" not in case or alone[1]["scale"] < 2**16
        for state, counted, exchanges in ours:
            assert counted == alone[1], case
            assert exchanges > 5, case
            torch.testing.assert_close(state, alone[0], msg=lambda text, case=case: f"{case}: {text}")


def train_downpour(folder: Path, accelerator: str, optimizer: str) -> None:
    to_file(folder / "downpour.log")
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    module = Model(optimizer, SKIPPED)
    advanced = Advanced(overlap=False)  # else it depends on how late answers are
    strategy = ASGDStrategy(2, algorithm=Downpour(), advanced=advanced)
    how = precise(accelerator, "16-mixed")
    data = loader(batch_size=256).dataset[:]
    before = float(module.loss(data))
    trainer(folder, strategy, devices=1, accelerator=accelerator, max_epochs=3, **how).fit(module, loader())
    torch.save({"before": before, "loss": float(module.cpu().loss(data))}, folder / "downpour.pt")


@pytest.mark.parametrize("accelerator", ["cpu", ON_CUDA])
@pytest.mark.parametrize("optimizer", ["", "fused"])
def test_a_step_that_is_skipped_pushes_no_gradient(
    tmp_path: Path, start: Any, accelerator: str, optimizer: str
) -> None:
    finish(start(train_downpour, accelerator, optimizer), tmp_path / "downpour.log")
    assert "rejected" not in (tmp_path / "downpour.log").read_text()
    found = torch.load(tmp_path / "downpour.pt")
    assert found["loss"] < found["before"] / 10  # without any push they would be equal


# ---------------------------------------------------------------------- elastic runs


def attach(folder: Path, name: str, accelerator: str, address: str, transport: str, step_s: float = 0.005) -> None:
    """A worker of an elastic run."""
    to_file(folder / f"{name}.log")
    torch.set_num_threads(1)
    options: dict[str, Any] = {"transport": transport, "timeouts": Timeouts(silence_s=2.0)}
    strategy = ASGDStrategy(2, algorithm=ASGD("sum"), run=address, **options)
    data = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=2, shuffle=True)
    module = Counts(step_s)
    marks = [Mark(folder / f"{name}.mark")]
    trainer(folder, strategy, devices=1, accelerator=accelerator, max_epochs=EPOCHS, callbacks=marks).fit(module, data)
    found = {"seen": module.seen.detach().cpu(), "digest": digest(module), "steps": strategy.stats.steps}
    torch.save({**found, "device": marks[0].device}, folder / f"{name}.pt")


class Mark(pl.Callback):
    """Writes the present epoch to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.file.write_text(str(trainer.current_epoch))
        self.device = str(module.device)


def trains(folder: Path, name: str, epoch: int) -> Callable[[], bool]:
    file = folder / f"{name}.mark"
    return lambda: file.exists() and int(file.read_text() or -1) >= epoch


@pytest.fixture(params=["rpc", "zmq"])
def run(request: Any, tmp_path: Path, start: Any) -> Iterator[tuple[str, str, Any]]:
    """An elastic run's address, its transport, and the process that serves."""
    served = start(serve, request.param)
    yield address_of_run(tmp_path), request.param, served
    os.kill(served.pid, signal.SIGTERM)
    served.join(60)


@on_cuda
@pytest.mark.parametrize("other", ["cpu", "cuda"])
def test_a_worker_on_cuda_trains_with_another_one(tmp_path: Path, start: Any, run: Any, other: str) -> None:
    address, transport, served = run
    workers = {name: start(attach, name, kind, address, transport) for name, kind in (("a", "cuda"), ("b", other))}
    wait_until(lambda: all(trains(tmp_path, name, 1)() for name in workers), 60, "training of both")
    assert not set(on_the_device()) & {served.pid, *(server.pid for server in servers_of(served.pid))}
    for name, process in workers.items():
        finish(process, tmp_path / f"{name}.log")
    found = {name: torch.load(tmp_path / f"{name}.pt") for name in workers}
    assert [found[name]["device"] for name in "ab"] == ["cuda:0", {"cpu": "cpu", "cuda": "cuda:0"}[other]]
    assert all(each["seen"].tolist() == [float(EPOCHS)] * SAMPLES for each in found.values())
    assert all(each["steps"] > 1 for each in found.values())
    assert found["a"]["digest"] == found["b"]["digest"]


def on_the_device() -> list[int]:
    """Processes that have a context on it, as far as the driver says."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return [
        int(line) for line in subprocess.run(command, text=True, capture_output=True).stdout.split() if line.isdigit()
    ]


@on_cuda
def test_a_worker_that_is_killed_on_cuda_starts_again_and_nothing_is_lost(tmp_path: Path, start: Any, run: Any) -> None:
    address, transport, _ = run
    workers = {name: start(attach, name, kind, address, transport) for name, kind in (("a", "cuda"), ("b", "cpu"))}
    wait_until(lambda: all(trains(tmp_path, name, 1)() for name in workers), 60, "training of both")
    workers["a"].kill()
    workers["a"].join()
    (tmp_path / "a.mark").unlink()
    workers["a"] = start(attach, "a", "cuda", address, transport)
    wait_until(trains(tmp_path, "a", 2), 60, "training again")
    for name, process in workers.items():
        finish(process, tmp_path / f"{name}.log")
        assert torch.load(tmp_path / f"{name}.pt")["seen"].tolist() == [float(EPOCHS)] * SAMPLES


# ---------------------------------------------------------------------- jobs


def main_process(folder: Path, start_method: str, epochs: int) -> None:
    to_file(folder / "job.log")
    os.environ.pop("MASTER_PORT", None)
    strategy: Any = ASGDStrategy(2, start_method=start_method, timeouts=Timeouts(silence_s=2.0))
    callbacks = [Signpost(folder), Recorder(folder)]
    made = trainer(folder, strategy, devices=2, accelerator=SharedCUDA(), max_epochs=epochs, callbacks=callbacks)
    module = Regression()
    made.fit(module, loader(), loader(64))
    torch.save({"digest": digest(module)}, folder / "job.pt")


def begin_job(folder: Path, start_method: str, epochs: int) -> subprocess.Popen[bytes]:
    """A program of its own, as a shell starts it."""
    program = folder / "job.py"
    program.write_text(
        f"import pathlib\nfrom tests.lightning.test_cuda import main_process\n\nif __name__ == '__main__':\n"
        f"    main_process(pathlib.Path({str(folder)!r}), {start_method!r}, {epochs})\n"
    )
    return subprocess.Popen([sys.executable, str(program)], env=environment(lean=False))


@on_cuda
@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_two_workers_of_a_job_share_the_device(tmp_path: Path, start_method: str) -> None:
    main = begin_job(tmp_path, start_method, 2)
    assert main.wait(120) == 0, (tmp_path / "job.log").read_text()[-5000:]
    ends = [Recorder.read(tmp_path, rank)[-1] for rank in (0, 1)]
    assert ends[0]["digest"] == ends[1]["digest"] == torch.load(tmp_path / "job.pt")["digest"]
    assert ends[0]["stats"]["steps"] + ends[1]["stats"]["steps"] == 2 * 32


@on_cuda
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_on_the_device_when_a_signal_ends_the_job(tmp_path: Path, signum: signal.Signals) -> None:
    main = begin_job(tmp_path, "popen", 1_000_000)
    try:
        wait_until(lambda: training(tmp_path), 60, "training")
        family = psutil.Process(main.pid).children(recursive=True)
        os.kill(main.pid, signum)
        main.wait(15)
        wait_until(lambda: not alive(family), 15, "the end of all processes")
        assert not {process.pid for process in family} & set(on_the_device())
    finally:
        main.kill()
        main.wait()


# ---------------------------------------------------------------------- checkpoints


def train_to(folder: Path, name: str, accelerator: str, epochs: int, resumes: str, own: bool) -> None:
    to_file(folder / f"{name}.log")
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    module = Model()
    strategy: Any = "auto" if own else ASGDStrategy(2)
    about: dict[str, Any] = {"max_epochs": epochs, "use_distributed_sampler": False, "accelerator": accelerator}
    made = trainer(folder, strategy, devices=1, **about)
    made.fit(module, loader(), ckpt_path=str(folder / resumes) if resumes else None)
    made.save_checkpoint(folder / f"{name}.ckpt")
    state = {key: tensor.cpu() for key, tensor in module.state_dict().items()}
    torch.save({"state": state, "step": made.global_step}, folder / f"{name}.pt")


@on_cuda
@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_checkpoint_of_one_device_resumes_on_another(tmp_path: Path, start: Any, first: str, second: str) -> None:
    for name, accelerator, epochs, resumes, own in (
        ("first", first, 1, "", False),
        ("second", second, 3, "first.ckpt", False),
        ("alone", "cpu", 3, "", True),
    ):
        finish(start(train_to, name, accelerator, epochs, resumes, own), tmp_path / f"{name}.log")
    alone, ours = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "second"))
    assert ours["step"] == alone["step"] == 3 * 32
    torch.testing.assert_close(ours["state"], alone["state"], rtol=1e-2, atol=1e-3)  # devices round differently


# ---------------------------------------------------------------------- islands


@pytest.fixture
def islands(tmp_path: Path, mains: Any, start: Any) -> Iterator[tuple[str, Started]]:
    served = start(serve_islands)
    started = Started(tmp_path, mains, served)
    yield address_of_run(tmp_path), started
    started.end()
    os.kill(served.pid, signal.SIGTERM)
    served.join(60)


@on_cuda
@pytest.mark.parametrize(
    ("inside", "size", "backend"),
    [("DDP", 1, None), ("DDP", 2, "gloo"), ("FSDP2", 1, None)],  # NCCL takes one process per device
)
def test_an_island_on_cuda_trains_as_lightnings_own_strategy_does(
    islands: Any, inside: str, size: int, backend: str | None
) -> None:
    address, started = islands
    how = {"size": size, "backend": backend, "accelerator": SharedCUDA()}
    started.start("plain", inside, "", **how)
    started.results("plain")
    started.start("island", inside, address, **how)
    for theirs, ours in zip(started.results("plain"), started.results("island"), strict=True):
        assert ours["seen"] == theirs["seen"]
        assert ours["step"] == theirs["step"]
        for name, tensor in theirs["state"].items():
            assert torch.equal(ours["state"][name], tensor)
        assert ours["metrics"] == theirs["metrics"]


@on_cuda
def test_an_island_on_cuda_and_one_on_cpus_train_together(islands: Any) -> None:
    address, started = islands
    started.start("a", "FSDP2", address, epochs=EPOCHS, counts=True, size=1, accelerator="cuda")
    started.start("b", "DDP", address, epochs=EPOCHS, counts=True)
    for each in started.results("a", "b"):
        seen = each["state"]["net.0.weight"].flatten()
        assert seen.tolist() == [float(EPOCHS)] * len(seen)


# ---------------------------------------------------------------------- plain loops


def loop(folder: Path, accelerator: str, fused: bool) -> None:
    to_file(folder / "loop.log")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1).to(accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    scaler = torch.amp.GradScaler(accelerator)
    skipped = 0
    with AsyncSGD(model, optimizer, nsync=2) as asgd:
        for epoch in asgd.epochs(4):
            for number, (x, y) in enumerate(asgd.batches(loader().dataset, batch_size=8)):
                optimizer.zero_grad()
                with torch.autocast(accelerator, torch.float16):
                    loss = torch.nn.functional.mse_loss(model(x.to(accelerator)), y.to(accelerator))
                spoiled = float("inf") if (epoch, number) in ((0, 1), (1, 3)) else 1.0
                scaler.scale(loss * spoiled).backward()
                scaler.step(optimizer)
                scale = scaler.get_scale()
                scaler.update()
                skipped += scaler.get_scale() < scale
        found = {"loss": float(loss), "steps": asgd.stats.steps, "exchanges": asgd.stats.exchanges, "skipped": skipped}
    torch.save(found, folder / "loop.pt")


@pytest.mark.parametrize("accelerator", [pytest.param("cpu", marks=pytest.mark.slow), ON_CUDA])
@pytest.mark.parametrize("fused", [False, True])
def test_a_plain_loop_with_a_grad_scaler(tmp_path: Path, start: Any, accelerator: str, fused: bool) -> None:
    finish(start(loop, accelerator, fused), tmp_path / "loop.log")
    found = torch.load(tmp_path / "loop.pt")
    assert found["loss"] < 0.5
    assert found["exchanges"] > 10
    assert found["skipped"] >= 2
    assert found["steps"] == 4 * 32 - (0 if fused and accelerator == "cuda" else found["skipped"])

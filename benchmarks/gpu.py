"""Everything that needs an accelerator, in about a quarter of an hour: tests, samples per second, memory, a trace.

    python benchmarks/gpu.py

Writes ``results/gpu.md``, with the device's name, and ``results/gpu-trace.json``, which chrome://tracing and Perfetto
show. The trace tells how much of the time in which an exchange copies is also time in which the device trains. On a
machine without an accelerator it says so, and exits with 0. Exits with 1 if a part fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from ranks import clean_environment
from throughput import trainer_options

from lightning_asgd import Advanced
from lightning_asgd.core.algorithms.config import SECRET_ENV

ROOT = Path(__file__).resolve().parents[1]
# At most, of one program of a part; there are four of "throughput" and two of "sharded".
SECONDS = {"tests": 500.0, "throughput": 120.0, "memory": 90.0, "trace": 120.0, "sharded": 60.0}
PARAMETERS = 17_000_000
WARM_UP, TRACED = 20, 60  # steps
Interval = tuple[float, float]

# ---------------------------------------------------------------------- the trace


def busy_module(width: int, sharded: bool = False) -> Any:
    """A layer of ``width`` x ``width`` parameters that keeps a device busy: its batch is on the device already."""
    import pytorch_lightning as pl

    class Busy(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(width, width)
            self.sharded = sharded

        def configure_model(self) -> None:
            if self.sharded:
                from torch.distributed.fsdp import fully_shard

                self.sharded = False
                fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self, mesh=self.device_mesh["data_parallel"])

        def on_fit_start(self) -> None:
            self.batch = torch.randn(width, width, device=self.device)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(self.batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    return Busy()


def fit(accelerator: str, strategy: Any, callbacks: list[Any], *, sharded: bool = False) -> dict[str, float]:
    """Train ``busy_module``. Returns seconds per step, the peak of device memory, and the bytes of the parameters."""
    import pytorch_lightning as pl
    from torch.utils.data import DataLoader

    class Clock(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (WARM_UP, WARM_UP + TRACED):
                if accelerator == "cuda":
                    torch.cuda.synchronize()
                self.begin, self.took_s = time.monotonic(), time.monotonic() - getattr(self, "begin", 0.0)

    clock = Clock()
    about: dict[str, Any] = {"accelerator": accelerator, "devices": 1, "callbacks": [clock, *callbacks]}
    trainer = pl.Trainer(**{**trainer_options(), **about}, strategy=strategy)
    before = 0
    if accelerator == "cuda":
        gc.collect()  # the module of the run before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    module = busy_module(4096 if accelerator == "cuda" else 256, sharded)
    trainer.fit(module, DataLoader(range(WARM_UP + TRACED + 5)))  # type: ignore[arg-type]
    peak = torch.cuda.max_memory_allocated() - before if accelerator == "cuda" else 0
    return {"step_s": clock.took_s / TRACED, "peak": peak, "vector": 4 * sum(p.numel() for p in module.parameters())}


def trace(accelerator: str, file: Path) -> None:
    """Train with exchanges and without, say how long steps took and what memory, and write what the device did."""
    import pytorch_lightning as pl
    from torch.profiler import ProfilerActivity, profile

    from lightning_asgd import ASGDStrategy

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if accelerator == "cuda" else [])]

    class Traced(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == WARM_UP:
                self.exchanges = trainer.strategy.stats.exchanges
                self.profile = profile(activities=activities)
                self.profile.start()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == WARM_UP + TRACED - 1:
                if accelerator != "cpu":
                    torch.accelerator.synchronize()
                self.profile.stop()
                self.exchanges = trainer.strategy.stats.exchanges - self.exchanges

    found: dict[str, list[dict[str, float]]] = {"alone": [], "10": [], "1, offload": [], "1": []}
    for _ in range(3):  # interleaved
        for name, runs in found.items():
            nsync, _, offload = name.partition(", ")
            strategy = (
                "auto"
                if name == "alone"
                else ASGDStrategy(int(nsync), advanced=Advanced(offload=bool(offload)), monitor=False)
            )
            runs.append(fit(accelerator, strategy, []))
    traced = Traced()
    fit(accelerator, ASGDStrategy(1, monitor=False), [traced])
    traced.profile.export_chrome_trace(str(file))
    print(json.dumps({"exchanges": traced.exchanges, **found}))


def island(accelerator: str, address: str) -> None:
    """Print the device memory of an island of one process with FSDP2 inside; of FSDP2 alone without an address."""
    from pytorch_lightning.strategies import ModelParallelStrategy

    from lightning_asgd import ASGDStrategy

    strategy: Any = ModelParallelStrategy(1, 1, process_group_backend=None if accelerator == "cuda" else "gloo")
    if address:
        strategy = ASGDStrategy(1, island=strategy, run=address)
    print(json.dumps(fit(accelerator, strategy, [], sharded=True)))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, in order, without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common_s(ones: Iterable[Interval], others: Iterable[Interval]) -> float:
    """How long both go on."""
    pairs = ((a, b) for a in merged(ones) for b in merged(others))
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def overlap(events: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """Seconds of exchanges on the device, and how many of them go by while another stream computes.

    The stream with the most kernels is that of training; all of the others' work belongs to exchanges.
    """
    streams: dict[Any, dict[str, list[Interval]]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            begin = event["ts"] / 1e6
            kinds = streams.setdefault(event["args"]["stream"], {})
            kinds.setdefault(event["cat"], []).append((begin, begin + event["dur"] / 1e6))
    if not streams:
        return 0.0, 0.0
    training = streams.pop(max(streams, key=lambda stream: len(streams[stream].get("kernel", ()))))
    exchanges = merged(each for kinds in streams.values() for intervals in kinds.values() for each in intervals)
    return sum(end - begin for begin, end in exchanges), common_s(exchanges, training.get("kernel", ()))


# ---------------------------------------------------------------------- the parts


def call(part: str, *arguments: str) -> tuple[bool, str]:
    """Run a program of this repository for so long. Returns whether it succeeded, and its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    print(f"{part} (at most {SECONDS[part]:.0f} s) ...", flush=True)
    about: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, **about) as process:
        try:
            output = process.communicate(timeout=SECONDS[part])[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # its ranks and servers end with it
            output = f"{process.communicate()[0]}\nIt was not done within {SECONDS[part]:.0f} s."
    return process.returncode == 0, output


def tests(accelerator: str, workers: int, folder: Path) -> tuple[bool, str]:
    """Those that are skipped elsewhere."""
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.device" in file.read_text()]
    good, output = call("tests", "-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider", *files)
    summary = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return good, summary[-1] if good and summary else output


def throughput(accelerator: str, workers: int, folder: Path) -> tuple[bool, str]:
    """Samples per second of one worker beside Lightning alone, and of four, which may share a device."""
    file = folder / "gpu-throughput.json"
    rows = ["| parameters | workers | samples/s | fastest | slowest |", "|---|---|---|---|---|"]
    systems = ["one alone", *(["DDP"] if workers > 1 else []), "A-SGD"]
    for params in (600_000, PARAMETERS):
        for count in (1, 4):
            about = [f"--accelerator={accelerator}", f"--workers={count}", f"--params={params}", "--nsync", "1", "10"]
            length = ["--repeats=2", "--seconds=2", f"--json={file}", "--systems", *systems]
            good, output = call("throughput", "benchmarks/throughput.py", *about, *length)
            if not good:
                return False, output
            (scenario,) = json.loads(file.read_text())["scenarios"]
            for name, runs in scenario["runs"].items():
                speeds = [run["samples_per_s"] for run in runs]
                size = f"{params / 1e6:g} M"
                rows.append(f"| {size} | {count} | {name} | {max(speeds):,.0f} | {min(speeds):,.0f} |")
    return True, f"{workers} devices, batch 32:\n\n" + "\n".join(rows)


def memory(accelerator: str, workers: int, folder: Path) -> tuple[bool, str]:
    """Host memory of workers and servers."""
    good, output = call("memory", "benchmarks/memory.py", "--brief", f"--accelerator={accelerator}")
    return good, f"Host memory (RSS): {output.strip()}" if good else output


def traced(accelerator: str, workers: int, folder: Path) -> tuple[bool, str]:
    """What exchanges cost a busy device, whether they overlap with training there, and the memory that they take."""
    file = folder / "gpu-trace.json"
    good, output = call("trace", "benchmarks/gpu.py", f"--device={accelerator}", f"--trace={file}")
    if not good:
        return False, output
    exchanges_s, at_once_s = overlap(json.loads(file.read_text())["traceEvents"])
    if not exchanges_s:
        return accelerator == "cpu", "The trace shows no work of exchanges on a stream of their own."
    found = json.loads(output.splitlines()[-1])
    rows = ["| a busy device | ms per step, median (min-max) | device memory beyond it |", "|---|---|---|"]
    for name in ("alone", "10", "1", "1, offload"):
        took = sorted(1000 * run["step_s"] for run in found[name])
        beyond = (found[name][0]["peak"] - found["alone"][0]["peak"]) / found[name][0]["vector"]
        shown = "one alone" if name == "alone" else f"A-SGD nsync {name}"
        rows.append(f"| {shown} | {took[1]:.2f} ({took[0]:.2f}-{took[2]:.2f}) | {beyond:.1f} x the parameters |")
    each_ms, number = 1000 * exchanges_s / max(1, found["exchanges"]), found["exchanges"]
    rows += [
        "",
        f"{number} exchanges in {TRACED} steps with nsync 1. Each took {each_ms:.2f} ms of device time; during "
        f"{at_once_s / exchanges_s:.0%} of it the device was training as well.",
    ]
    return True, "\n".join(rows)


def sharded(accelerator: str, workers: int, folder: Path) -> tuple[bool, str]:
    """Device memory of an island with FSDP2 inside, beyond FSDP2 alone."""
    command = [sys.executable, "-c", "from lightning_asgd.cli.command_line import main; raise SystemExit(main())"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), SECRET_ENV: "known to this program alone"}
    about: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command, "serve", "127.0.0.1:0/gpu"], env=environment, **about) as served:
        try:
            lines = iter(served.stdout or ())
            address = next((line.partition('run="')[2].partition('"')[0] for line in lines if 'run="' in line), "")
            if not address:
                return False, f"`lightning-asgd serve` did not start: exit code {served.wait()}"
            threading.Thread(target=list, args=(lines,), daemon=True).start()  # so that it can write on
            os.environ[SECRET_ENV] = environment[SECRET_ENV]
            found = []
            for given in ("", address):
                good, output = call("sharded", "benchmarks/gpu.py", f"--device={accelerator}", f"--island={given}")
                if not good:
                    return False, output
                found.append(next(json.loads(line) for line in output.splitlines() if line.startswith('{"step_s"')))
        finally:
            served.terminate()
    beyond = (found[1]["peak"] - found[0]["peak"]) / found[1]["vector"]
    return True, f"An island with FSDP2 inside takes {beyond:.1f} x the parameters of device memory beyond FSDP2 alone."


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="FOLDER")
    parser.add_argument("--device", help=argparse.SUPPRESS)  # "cpu" stands in for one, to try this program itself
    parser.add_argument(
        "--parts", nargs="+", metavar="PART", help="only these: tests, throughput, memory, traced, sharded"
    )
    parser.add_argument("--island", help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    accelerator = args.device or (found.type if found is not None else None)
    if accelerator is None:
        print("This machine has no accelerator that torch can use: nothing was run.")
        return 0
    if args.trace is not None:
        trace(accelerator, args.trace)
        return 0
    if args.island is not None:
        island(accelerator, args.island)
        return 0
    clean_environment()
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    module = torch.get_device_module(accelerator)
    name = module.get_device_name() if hasattr(module, "get_device_name") else accelerator
    count = torch.accelerator.device_count() if accelerator != "cpu" else 1
    # Lightning knows no other accelerators by name, and starts no workers on MPS.
    parts = [tests, throughput, memory, traced, sharded] if accelerator in ("cuda", "cpu") else [tests]
    parts = [part for part in parts if args.parts is None or part.__name__ in args.parts]
    text, passed = [f"# {name}, {count} of them, torch {torch.__version__}"], True
    for part in parts:
        good, said = part(accelerator, min(4, count), folder)
        passed &= good
        text.append(said if good else f"FAILED: {part.__name__}\n\n```\n{said[-4000:]}\n```")
        print(text[-1], flush=True)
    (folder / "gpu.md").write_text("\n\n".join(text) + "\n")
    print(f"table: {folder / 'gpu.md'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

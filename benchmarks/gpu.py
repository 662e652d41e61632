"""Everything that needs an accelerator, in under ten minutes: tests, samples per second, memory, and a trace.

    python benchmarks/gpu.py

Writes ``results/gpu.md``, with the device's name, and ``results/gpu-trace.json``, which chrome://tracing and Perfetto
show. The trace tells how much of the time in which an exchange copies is also time in which the device trains. On a
machine without an accelerator it says so, and exits with 0. Exits with 1 if a part fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from ranks import clean_environment
from throughput import build_loader, build_module, trainer_options

ROOT = Path(__file__).resolve().parents[1]
SECONDS = {"tests": 180.0, "throughput": 240.0, "memory": 90.0, "trace": 80.0}  # at most, by part; 590 s together
PARAMETERS = 17_000_000
WARM_UP, TRACED = 20, 20  # steps
Interval = tuple[float, float]

# ---------------------------------------------------------------------- the trace


def trace(accelerator: str, file: Path) -> None:
    """Train with an exchange at every step, write what the device did in some of them, and say what memory it took."""
    import pytorch_lightning as pl
    from torch.profiler import ProfilerActivity, profile

    from lightning_asgd import ASGDStrategy

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if accelerator == "cuda" else [])]

    class Traced(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == WARM_UP:
                self.profile = profile(activities=activities)
                self.profile.start()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == WARM_UP + TRACED:
                if accelerator != "cpu":
                    torch.accelerator.synchronize()
                self.profile.stop()

    peaks = []
    for strategy in ("auto", ASGDStrategy(1, monitor=False)):
        callback = Traced()
        about: dict[str, Any] = {"accelerator": accelerator, "devices": 1, "callbacks": [callback]}
        about["limit_train_batches"] = WARM_UP + TRACED + 5
        trainer = pl.Trainer(**{**trainer_options(), **about}, strategy=strategy)
        if accelerator == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.fit(build_module(PARAMETERS), build_loader(32 * (WARM_UP + TRACED + 5), 32))
        peaks.append(torch.cuda.max_memory_allocated() if accelerator == "cuda" else 0)
    callback.profile.export_chrome_trace(str(file))
    print(json.dumps({"alone": peaks[0], "asgd": peaks[1]}))


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
    good, output = call("tests", "-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider", "tests")
    summary = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return good, summary[-1] if good and summary else output


def throughput(accelerator: str, workers: int, folder: Path) -> tuple[bool, str]:
    """Samples per second: one worker per device, at most four."""
    file = folder / "gpu-throughput.json"
    about = [f"--accelerator={accelerator}", f"--workers={workers}", f"--params={PARAMETERS}", "--nsync", "10", "1"]
    length = ["--repeats=2", "--seconds=3", f"--json={file}"]
    good, output = call("throughput", "benchmarks/throughput.py", *about, *length)
    if not good:
        return False, output
    (scenario,) = json.loads(file.read_text())["scenarios"]
    rows = [f"| {workers} workers, 17 M parameters, samples/s | fastest | slowest |", "|---|---|---|"]
    for name, runs in scenario["runs"].items():
        speeds = [run["samples_per_s"] for run in runs]
        rows.append(f"| {name} | {max(speeds):.0f} | {min(speeds):.0f} |")
    return True, "\n".join(rows)


def memory(accelerator: str, workers: int, folder: Path) -> tuple[bool, str]:
    """Host memory of workers and servers."""
    good, output = call("memory", "benchmarks/memory.py", "--brief", f"--accelerator={accelerator}")
    return good, f"Host memory (RSS): {output.strip()}" if good else output


def traced(accelerator: str, workers: int, folder: Path) -> tuple[bool, str]:
    """Whether exchanges overlap with training on the device, and the memory that they take there."""
    file = folder / "gpu-trace.json"
    good, output = call("trace", "benchmarks/gpu.py", f"--device={accelerator}", f"--trace={file}")
    if not good:
        return False, output
    exchanges_s, at_once_s = overlap(json.loads(file.read_text())["traceEvents"])
    if not exchanges_s:
        return accelerator == "cpu", "The trace shows no work of exchanges on a stream of their own."
    peaks = json.loads(output.splitlines()[-1])
    beyond = (peaks["asgd"] - peaks["alone"]) / (4 * PARAMETERS)
    return True, (
        f"Exchanges took {1000 * exchanges_s / TRACED:.2f} ms of device time per step. During "
        f"{at_once_s / exchanges_s:.0%} of it the device was training as well. They take {beyond:.1f} x the parameters "
        "of device memory."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="FOLDER")
    parser.add_argument("--device", help=argparse.SUPPRESS)  # "cpu" stands in for one, to try this program itself
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
    clean_environment()
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    module = torch.get_device_module(accelerator)
    name = module.get_device_name() if hasattr(module, "get_device_name") else accelerator
    count = torch.accelerator.device_count() if accelerator != "cpu" else 1
    # Lightning knows no other accelerators by name, and starts no workers on MPS.
    parts = [tests, throughput, memory, traced] if accelerator in ("cuda", "cpu") else [tests]
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

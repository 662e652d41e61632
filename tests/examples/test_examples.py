"""The examples in their fast modes. Most are run in a fork, since importing Lightning takes longer than they do."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import sklearn.datasets
import torch
import torchvision
import yaml

from lightning_asgd.cli.command_line import main
from lightning_asgd.monitor.metric_log import find_log, read
from tests.helpers.programs import environment
from tests.helpers.wandb_file import contents
from tests.lightning.test_processes import wait_until

ROOT = Path(__file__).parents[2]
PRELOADED = (pl, sklearn.datasets, torch, torchvision)  # what the examples import

Start = Callable[..., Any]


def copied(folder: Path) -> Path:
    """A copy of the examples, which write beside themselves."""
    return Path(shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True))


def be_program(folder: Path, output: str, name: str, arguments: tuple[str, ...]) -> None:
    """What a forked process does: as good as ``python examples/NAME ARGUMENTS``."""
    with (folder / output).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(environment(WANDB_MODE="offline"))
    os.chdir(folder)
    script = copied(folder) / name
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def serve(folder: Path) -> None:
    """``lightning-asgd serve``, as a forked process."""
    with (folder / "serve.log").open("w") as file:
        os.dup2(file.fileno(), 1)
    raise SystemExit(main(["serve", "127.0.0.1:0/digits"]))


@pytest.fixture(scope="module")
def context() -> Any:
    """Forks of a server that has imported everything, and done nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@pytest.fixture
def start(context: Any, tmp_path: Path) -> Any:
    """Starts programs; they end with the test."""
    started = []

    def start(target: Callable[..., None], *arguments: Any) -> Any:
        process = context.Process(target=target, args=(tmp_path, *arguments))
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def run(start: Start, folder: Path, name: str, *arguments: str, seconds: float = 250) -> str:
    """Run an example, and return what it printed."""
    process = start(be_program, "output", name, arguments)
    process.join(seconds)
    output = (folder / "output").read_text()
    assert process.exitcode == 0, output
    return output


def numbers(pattern: str, text: str) -> list[float]:
    """What the groups of a pattern match."""
    found = re.search(pattern, text)
    assert found, text
    return [float(group) for group in found.groups()]


@pytest.mark.timeout(600)
def test_images_end_with_the_accuracy_of_the_best_checkpoint(start: Start, tmp_path: Path) -> None:
    output = run(start, tmp_path, "image_classification.py", "--fast", "--strategy", "asgd_fork")
    (accuracy,) = numbers(r"accuracy ([\d.]+) of .*/image_classification/best.ckpt", output)
    best = torch.load(tmp_path / "results" / "image_classification" / "best.ckpt", weights_only=False)
    (saver,) = (state for name, state in best["callbacks"].items() if "ModelCheckpoint" in name)
    assert accuracy == pytest.approx(float(saver["best_model_score"]), abs=6e-4)  # three digits are printed
    assert best["hyper_parameters"]["classes"] == 8


def test_images_of_ones_own_are_read_from_folders(tmp_path: Path) -> None:
    datasets = runpy.run_path(str(ROOT / "examples" / "image_classification.py"))["datasets"]
    for part, name in itertools.product(("train", "val"), ("cats", "dogs")):
        (tmp_path / part / name).mkdir(parents=True)
        picture = torch.full((3, 90, 70), 255, dtype=torch.uint8)
        torchvision.io.write_png(picture, str(tmp_path / part / name / "1.png"))
    for images in datasets(tmp_path, 0):
        assert images.classes == ["cats", "dogs"]
        assert [(image.shape, label) for image, label in images] == [((3, 64, 64), 0), ((3, 64, 64), 1)]


@pytest.mark.timeout(600)
def test_the_character_model_learns_and_writes(start: Start, tmp_path: Path) -> None:
    output = run(start, tmp_path, "char_lm.py", "--fast", "--strategy", "asgd_fork")
    (nats,) = numbers(r"held-out loss ([\d.]+) nats", output)
    assert nats < 3.7  # it begins at 4.4, which is what guessing among all characters comes to
    assert len(output.split("bits per character\n\n")[1]) > 600


@pytest.mark.timeout(600)
def test_the_gan_finds_the_ring_and_saves_a_picture(start: Start, tmp_path: Path) -> None:
    # 40 s by itself; beside the other groups of tests on a slow machine more than 100.
    output = run(start, tmp_path, "gan.py", "--fast", "--strategy", "asgd_fork", seconds=400)
    clouds, inside = numbers(r"(\d) of 8 clouds, ([\d.]+) of the points", output)
    assert clouds >= 4
    assert inside > 0.25  # of points spread evenly over the ring's square it would be 0.1
    assert (tmp_path / "results" / "gan.png").stat().st_size > 10_000


@pytest.mark.timeout(600)
def test_a_recommender_learns_with_its_tables_on_the_servers(start: Start, tmp_path: Path) -> None:
    output = run(start, tmp_path, "recommender.py", "--fast", "--strategy", "asgd_fork", seconds=400)
    accuracy, best = numbers(r"accuracy ([\d.]+) on held-out clicks; the hidden model has ([\d.]+)", output)
    assert best - 0.05 < accuracy < best  # a constant answer has 0.5


@pytest.mark.timeout(600)
def test_the_posterior_s_band_holds_the_data_and_widens_in_the_gap(start: Start, tmp_path: Path) -> None:
    output = run(start, tmp_path, "bayesian.py", "--fast")
    covered, error = numbers(r"([\d.]+) of new observations within the band; error of the mean ([\d.]+)", output)
    deviation, inside = numbers(r"deviation ([\d.]+) where there are data, ([\d.]+) in the gap", output)
    assert 0.9 < covered < 1
    assert error < 0.3
    assert 0.2 < deviation < inside  # 0.2 is the observations' noise
    assert (tmp_path / "results" / "bayesian.png").stat().st_size > 10_000


@pytest.mark.timeout(600)
def test_the_command_line_takes_strategy_and_monitor_from_a_file_and_saves_them(start: Start, tmp_path: Path) -> None:
    forked = ("--trainer.strategy.init_args.start_method", "fork", "--trainer.max_epochs", "2")
    config = "examples/cli/configs/asgd.yaml"
    copied(tmp_path)
    run(start, tmp_path, "cli/main.py", "fit", "--config", config, *forked)
    version = tmp_path / "lightning_logs" / "version_0"
    saved = yaml.safe_load((version / "config.yaml").read_text())["trainer"]
    assert saved["strategy"]["class_path"] == "lightning_asgd.ASGDStrategy"
    assert saved["strategy"]["init_args"]["nsync"] == 10
    args = {"every_n_seconds": 2, "detail": "summary"}
    assert saved["callbacks"] == [{"class_path": "lightning_asgd.ASGDMonitor", "init_args": args}]
    (record,) = read(find_log(version))
    assert record.end == "done"
    # What was saved is a configuration again.
    run(start, tmp_path, "cli/main.py", "fit", "--config", str(version / "config.yaml"), "--trainer.max_epochs", "1")


def test_the_configurations_differ_in_the_trainer_only() -> None:
    single, ddp, asgd = (
        yaml.safe_load((ROOT / "examples" / "cli" / "configs" / f"{name}.yaml").read_text())
        for name in ("single", "ddp", "asgd")
    )
    for one, other in itertools.pairwise((single, ddp, asgd)):
        assert {**one, "trainer": None} == {**other, "trainer": None}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sweep_runs_its_grid_offline_and_ends_with_a_table(start: Start, tmp_path: Path) -> None:
    output = run(start, tmp_path, "wandb_sweep.py", "--grid", "--fast")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["1", "5"]
    assert all(float(row[2]) > 0.8 for row in rows)
    assert float(rows[0][4]) > 3 * float(rows[1][4])  # exchanges
    logged = [contents(file) for file in (tmp_path / "results" / "wandb").glob("offline-run-*/*.wandb")]
    assert sorted(run["config"]["asgd"]["nsync"] for run in logged) == [1, 5]
    assert all({"val_acc", "asgd/staleness/mean"} <= set(run["history"]) for run in logged)


def test_an_agent_of_the_sweep_can_start_the_program() -> None:
    sweep = yaml.safe_load((ROOT / "examples" / "wandb_sweep.yaml").read_text())
    script = ROOT / sweep["program"]
    for name in sweep["parameters"]:  # an agent gives them as --name=value
        assert f'"--{name}"' in script.read_text()


@pytest.mark.timeout(600)
def test_a_worker_of_spot_machines_goes_by_sigterm_and_another_one_takes_over(start: Start, tmp_path: Path) -> None:
    start(serve)
    log = tmp_path / "serve.log"
    wait_until(lambda: log.exists() and 'run="' in log.read_text(), 60, "the servers' start")
    address = log.read_text().partition('run="')[2].partition('"')[0]
    first = start(be_program, "first", "spot_worker.py", ("--run", address))
    checkpoint = tmp_path / "results" / "spot_worker" / "last.ckpt"
    wait_until(checkpoint.exists, 60, "the first epoch")
    os.kill(first.pid, signal.SIGTERM)
    first.join(200)
    assert first.exitcode == 0, (tmp_path / "first").read_text()
    assert "epochs, accuracy" not in (tmp_path / "first").read_text()
    output = run(start, tmp_path, "spot_worker.py", "--run", address)
    epochs, accuracy = numbers(r"(\d+) epochs, accuracy ([\d.]+)", output)
    assert epochs == 20
    assert accuracy > 0.9


# ---------------------------------------------------------------------- those that start processes of their own


def run_example(folder: Path, seconds: float, name: str, *arguments: str) -> str:
    """Run a copy of an example, and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(copied(folder) / name), *arguments],
        env=environment(lean=False),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=4 * seconds,  # a machine may be a quarter as fast
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_the_quickstart_trains_prints_a_table_and_saves_a_picture(tmp_path: Path) -> None:
    output = run_example(tmp_path, 100, "quickstart.py", "--only", "asgd", "--fast")
    (row,) = [line for line in output.splitlines() if line.startswith("│ A-SGD")]
    equal, rate, slowed, slow_rate = (float(cell.replace(",", "")) for cell in row.split("│")[2:6])
    assert min(equal, slowed) > 0.8  # two epochs
    assert min(rate, slow_rate) > 0  # beside other tests either may be higher: a worker that waits leaves its core
    assert (tmp_path / "results" / "quickstart.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_monitored_example_ends_with_a_report(tmp_path: Path) -> None:
    output = run_example(tmp_path, 100, "monitor/callback.py", "--fast")
    report = Path(output.splitlines()[-1].removeprefix("Report: "))
    assert report == tmp_path / "results" / "monitor" / "report" / "report.html"
    assert "worker 1" in report.read_text()
    assert len(list(report.parent.glob("*.png"))) == 6


@pytest.mark.slow
def test_the_paper_s_experiments_end_with_a_table_verdicts_and_a_picture(tmp_path: Path) -> None:
    output = run_example(tmp_path, 160, "paine2013.py", "--quick")
    rows = [line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│ ")]
    runs = ["1 worker", "2 workers, cold, nsync 10", "2 workers, warm, nsync 10", "2 workers, warm, nsync 1"]
    assert rows == runs
    for experiment in "123":
        claims = [line for line in output.splitlines() if line.startswith(f"{experiment}. ")]
        assert claims
        assert all("seen" in claim for claim in claims)
    assert (tmp_path / "results" / "paine2013.png").stat().st_size > 10_000

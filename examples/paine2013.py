"""The three experiments of the original paper, at the size of a laptop.

    python examples/paine2013.py            # digits, about nine minutes on two cores
    python examples/paine2013.py --quick    # a small version; too short for meaningful results
    python examples/paine2013.py --data cifar10 --root PATH     # if the data are at PATH: nothing is downloaded

T. Paine, H. Jin, J. Yang, Z. Lin, T. Huang, "GPU Asynchronous Stochastic Gradient Descent to Speed Up Neural Network
Training", 2013 (arXiv 1312.6186). The paper calls workers clients. Its rule adds every push in full, ASGD("sum").

1. Several workers, with the settings of one, reach the accuracy of one.
2. From a cold start several workers learn more slowly at first and faster later; a warm start fixes that.
3. After a warm start, a small nsync processes fewer mini-batches in the same time and still has the lower error.

It ends with a table, a picture in results/paine2013.png, and says for each claim whether the measured figures show it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from digits import DigitsCNN, datasets
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.algorithms import ASGD
from lightning_asgd.report.picture_style import PAPER, pyplot

RESULTS = Path(__file__).resolve().parent.parent / "results"
SEEDS = 5  # of experiment 1: with the sum of all pushes, one validation of one run may be ten per cent off
NEAR = 0.01  # of the accuracy of one worker


# ---------------------------------------------------------------- what is trained


@dataclass(frozen=True)
class Task:
    """Data, network and settings, the same in every run."""

    train: Dataset[Any]
    val: Dataset[Any]
    network: Any  # makes a network
    lr: float
    batch: int
    passes: int  # over the training data, in every run of the first experiment
    warm: float  # share of the single worker's run after which the others start warm
    step_s: float  # every step takes at least this long: see Recorder
    window: int  # mini-batches over which the plotted error is averaged


def task(data: str, root: Path | None, quick: bool) -> Task:
    """What to train: 22 passes as in the paper but for digits, a network like its for ImageNet, plain SGD throughout.

    The learning rate for digits is one at which four workers, whose pushes are added whole, still learn: at ten times
    that they do not, though one does. Momentum would have the effect of a larger learning rate. The weights begin as
    He et al. 2015 draw them. PyTorch's own are 2.4 times smaller; there the loss is so flat at the start that several
    workers cannot learn more slowly than one: it takes many steps, and they take more.
    """
    if data == "digits":
        train, val = datasets()
        return Task(train, val, digits_network, 0.01, 16, 2 if quick else 32, 0.3, 0.01, 60)
    from torchvision import datasets as tv
    from torchvision import models
    from torchvision import transforms as tf

    if root is None:
        raise SystemExit(f"--data {data} needs --root, the folder that the data is in.")
    normalize = tf.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    passes = 1 if quick else 22
    if data == "cifar10":
        flip = [tf.RandomCrop(32, padding=4), tf.RandomHorizontalFlip()]
        parts = [
            tv.CIFAR10(str(root), train, transform=tf.Compose([*(flip if train else []), tf.ToTensor(), normalize]))
            for train in (True, False)
        ]
        return Task(*parts, cifar_network, 0.05, 128, passes, 0.25, 0.0, 200)
    crop = [tf.RandomResizedCrop(224), tf.RandomHorizontalFlip()]
    centre = [tf.Resize(256), tf.CenterCrop(224)]
    parts = [
        tv.ImageFolder(str(root / part), tf.Compose([*first, tf.ToTensor(), normalize]))
        for part, first in (("train", crop), ("val", centre))
    ]
    return Task(*parts, lambda: models.alexnet(weights=None), 0.01, 128, passes, 0.25, 0.0, 500)


def digits_network() -> nn.Module:
    """The network of digits.py, with other first weights."""
    network = DigitsCNN().net
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return network


def cifar_network() -> nn.Module:
    """Three convolutions and a linear layer, as in the example networks of cuda-convnet, which the paper extended."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(3, 32), *block(32, 32), *block(32, 64), nn.Flatten(), nn.Dropout(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers)


def curvature(network: nn.Module, data: Dataset[Any], samples: int = 1024, rounds: int = 30) -> float:
    """The largest curvature of the loss, by power iteration. Descent with a rate lr is unstable above 2 / lr."""
    x, y = next(iter(DataLoader(data, samples)))
    parameters = list(network.eval().parameters())
    loss = functional.cross_entropy(network(x), y)
    slope = torch.autograd.grad(loss, parameters, create_graph=True)
    direction = [torch.randn_like(p) for p in parameters]
    found = 0.0
    for _ in range(rounds):
        length = math.sqrt(sum(float(d.square().sum()) for d in direction))
        direction = [d / length for d in direction]
        along = sum((s * d).sum() for s, d in zip(slope, direction, strict=True))
        turned = torch.autograd.grad(along, parameters, retain_graph=True)  # type: ignore[arg-type]
        found = sum(float((t * d).sum()) for t, d in zip(turned, direction, strict=True))
        direction = list(turned)
    return found


class Classifier(LightningModule):
    """Nothing here knows of A-SGD, but that it keeps the latest mini-batch's error and when the step began."""

    def __init__(self, network: nn.Module, lr: float) -> None:
        super().__init__()
        self.net = network
        self.lr = lr
        self.begun = 0.0
        self.error = torch.zeros(())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.begun = time.perf_counter()
        x, y = batch
        logits = self.net(x)
        self.error = (logits.detach().argmax(1) != y).float().mean()
        return functional.cross_entropy(logits, y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        accuracy = (self.net(x).argmax(1) == y).float().mean()
        self.log("val_acc", accuracy, sync_dist=True, batch_size=len(y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


# ---------------------------------------------------------------- one run


@dataclass(frozen=True)
class Run:
    """One training run.

    Cold runs take the passes over the data that the single worker takes (``passes``) as often as there are workers, so
    that all last about as long; the accuracy after the first ``passes`` is that of experiment 1, which is repeated with
    other seeds, without the rest. Warm runs last ``seconds``.
    """

    workers: int
    nsync: int = 10
    warm: bool = False
    seconds: float | None = None
    seed: int = 1


class Recorder(Callback):
    """The error of every mini-batch of worker 0, and the time of training at which it was through.

    The error is that of the weights the worker has just trained with, as in the paper. It flatters a large nsync: what
    the sum of all pushes spoils on the servers a worker mends in its next few steps, before the next exchange.
    Validation is after an exchange of all, and tells.

    Worker 0's mini-batches are enough: every worker draws its own from the same data and holds the same weights, but
    for what the others have learnt since its last exchange, so the others' curves are this one with other noise.

    With ``step_s`` every step takes that long at least, for four workers on two cores would each train at half speed.
    As long as they sleep a good part of their steps they behave like four machines. A step then counts ``step_s`` on
    the time axis even where it took longer because cores were busy, which four machines would not have seen. What
    exchanges took is measured and comes on top, as in the paper: that is what a small nsync pays. Without ``step_s``
    the time axis is the clock's.

    Args:
        run: which run this is.
        task: see there.
        file: where worker 0 leaves its results.
        checkpoint: where worker 0 leaves a checkpoint, and after how many steps.
    """

    def __init__(self, run: Run, task: Task, file: Path, checkpoint: tuple[Path, int] | None) -> None:
        self.run, self.task, self.file, self.checkpoint = run, task, file, checkpoint
        self.seconds: list[float] = []
        self.errors: list[Tensor] = []
        self.accuracy: list[float] = []
        self.checkpoint_s: float | None = None
        self._since = 0.0  # beginning of the training, moved on by the time that was none
        self._paused: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._since = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._paused is not None:
            self._since += time.perf_counter() - self._paused
            self._paused = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(max(0.0, pl_module.begun + self.task.step_s - time.perf_counter()))
        self.errors.append(pl_module.error)
        exchanges = trainer.strategy.stats.round_trip_s if self.run.workers > 1 else 0.0  # one alone needs none
        counted = len(self.errors) * self.task.step_s + exchanges
        self.seconds.append(counted if self.task.step_s else time.perf_counter() - self._since)
        if self.checkpoint is not None and len(self.errors) == self.checkpoint[1]:
            self.checkpoint_s = self.seconds[-1]
            self._paused = time.perf_counter()
            trainer.save_checkpoint(self.checkpoint[0])
        if self.run.seconds is not None and self.seconds[-1] >= self.run.seconds:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.accuracy.append(trainer.callback_metrics["val_acc"].item())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            stats = trainer.strategy.stats
            result = {"seconds": self.seconds, "errors": torch.stack(self.errors).tolist(), "accuracy": self.accuracy}
            result |= {"checkpoint_s": self.checkpoint_s, "staleness": stats.staleness_mean, "refused": stats.refused}
            self.file.write_text(json.dumps(result))


def train(run: Run, task: Task, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Train, and return what worker 0 recorded."""
    print(f"=== {name(run)} ...", end=" ", flush=True)
    begun = time.perf_counter()
    # After a warm start no batch comes a second time in order.
    seed_everything(1000 + run.seed if run.warm else run.seed, verbose=False)
    module = Classifier(task.network(), task.lr)
    saves = None
    steps = len(task.train) * task.passes // task.batch // run.workers  # type: ignore[arg-type]
    if run.warm:
        module.load_state_dict(torch.load(checkpoint, weights_only=False)["state_dict"])
    elif run == Run(1):
        saves = (checkpoint, round(steps * task.warm))
    # The end of an epoch is a sync point, where all wait for each other and push what they have: with epochs of one
    # pass, 22 steps for each of four workers, there would be no nsync of 100. So all passes are one epoch here.
    train = DataLoader(ConcatDataset([task.train] * task.passes), task.batch, shuffle=True, drop_last=True)
    val = DataLoader(task.val, task.batch)
    recorder = Recorder(run, task, folder / "result.json", saves)
    gpus = torch.cuda.device_count() >= run.workers
    trainer = Trainer(
        accelerator="gpu" if gpus else "cpu",
        devices=run.workers,
        # Forked workers start at once; CUDA wants new processes. No overlap: the paper's workers wait for an exchange.
        strategy=ASGDStrategy(
            run.nsync, algorithm=ASGD("sum"), advanced=Advanced(overlap=False), start_method="spawn" if gpus else "fork"
        ),
        max_epochs=run.workers if run.seed == 1 else 1,
        callbacks=[recorder],
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, train, val)
    result: dict[str, Any] = json.loads(recorder.file.read_text())
    print(f"{len(result['errors'])} mini-batches per worker, {time.perf_counter() - begun:.0f} s", flush=True)
    return result


# ---------------------------------------------------------------- the experiments

COLORS = {1: PAPER["grey"], 2: PAPER["orange"], 4: PAPER["blue"]}
NSYNC_COLORS = PAPER["green"], PAPER["blue"], PAPER["red"]


def name(run: Run) -> str:
    workers = "1 worker" if run.workers == 1 else f"{run.workers} workers"
    return workers if run.workers == 1 else f"{workers}, {'warm' if run.warm else 'cold'}, nsync {run.nsync}"


def main() -> None:
    parser = argparse.ArgumentParser(description="The three experiments of Paine et al. 2013.")
    parser.add_argument("--data", choices=("digits", "cifar10", "imagenet"), default="digits")
    parser.add_argument("--root", type=Path, help="folder of CIFAR-10 (as torchvision has it) or ImageNet (train, val)")
    parser.add_argument("--quick", action="store_true", help="few passes, two workers: seconds instead of minutes")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # Lightning would give the single worker all cores
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of Lightning's calls into torch
    chosen = task(args.data, args.root, args.quick)
    most = 2 if args.quick else 4
    nsyncs = (1, 10) if args.quick else (1, 10, 100)
    results: dict[Run, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "single.ckpt"

        def do(run: Run) -> None:
            results[run] = train(run, chosen, checkpoint, Path(folder))

        single = Run(1)
        do(single)
        seed_everything(single.seed, verbose=False)
        network = chosen.network()
        curvatures = [curvature(network, chosen.train)]
        state = torch.load(checkpoint, weights_only=False)["state_dict"]
        network.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
        curvatures.append(curvature(network, chosen.train))
        results[single]["curvatures"] = curvatures
        seconds = results[single]["seconds"][-1] - results[single]["checkpoint_s"]
        for workers in (2, 4):
            if workers <= most:
                do(Run(workers))
                do(Run(workers, warm=True, seconds=seconds))
        for nsync in nsyncs:
            if nsync != single.nsync:
                do(Run(most, nsync, warm=True, seconds=seconds))
        for seed in range(2, 2 if args.quick else SEEDS + 1):
            for workers in (1, 2, 4):
                do(Run(workers, seed=seed))
    figures = Figures(results, chosen)
    print_table(figures)
    print_claims(figures)
    RESULTS.mkdir(exist_ok=True)
    save_picture(figures, RESULTS / "paine2013.png")


@dataclass(frozen=True)
class Mean:
    """A mean, and its standard error."""

    value: float
    error: float

    def __sub__(self, other: Mean) -> Mean:
        return Mean(self.value - other.value, math.hypot(self.error, other.error))

    @property
    def sign(self) -> int:
        """1 or -1 if the value is more than two standard errors above or below 0, else 0."""
        return 0 if abs(self.value) <= 2 * self.error else (1 if self.value > 0 else -1)

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % ± {200 * self.error:.1f}"


class Figures:
    """What the table, the claims and the picture need of the results."""

    def __init__(self, results: dict[Run, dict[str, Any]], task: Task) -> None:
        self.results, self.task = results, task
        self.single = Run(1)
        self.cold = [run for run in results if not run.warm and run.seed == 1]
        self.warm = [run for run in results if run.warm and run.nsync == self.single.nsync]
        self.most = max(run.workers for run in results)
        self.nsyncs = sorted((run for run in results if run.warm and run.workers == self.most), key=lambda r: r.nsync)
        self.start_s = results[self.single]["checkpoint_s"]
        self.end_s = min(
            self.seconds(run)[-1] for run in results if run.seed == 1
        )  # so that all are compared over the same time

    def seconds(self, run: Run) -> list[float]:
        """When every mini-batch was through. A warm run begins where the single worker's checkpoint was written."""
        return [s + (self.start_s if run.warm else 0.0) for s in self.results[run]["seconds"]]

    def between(self, run: Run, begin: float, end: float) -> list[float]:
        """The errors of the mini-batches of a stretch of time."""
        pairs = zip(self.seconds(run), self.results[run]["errors"], strict=True)
        return [error for second, error in pairs if begin < second <= end]

    def error(self, run: Run, begin: float, end: float) -> Mean:
        return mean(self.between(run, begin, end))

    def smooth(self, run: Run) -> tuple[list[float], list[float]]:
        """The error averaged over a window that slides over the mini-batches, at the middle of the window."""
        seconds, errors, width = self.seconds(run), self.results[run]["errors"], self.task.window
        sums = [0.0]
        for error in errors:
            sums.append(sums[-1] + error)
        ends = range(width, len(errors) + 1)
        return [seconds[end - width // 2 - 1] for end in ends], [
            (sums[end] - sums[end - width]) / width for end in ends
        ]

    def accuracies(self, workers: int) -> list[float]:
        """Accuracy on the validation data after the passes that the single worker takes, of every seed, ascending."""
        runs = (run for run in self.results if run.workers == workers and not run.warm)
        return sorted(self.results[run]["accuracy"][0] for run in runs)

    def accuracy(self, workers: int) -> float:
        """Its median."""
        return statistics.median(self.accuracies(workers))

    def slower(self, run: Run, other: Run, begin: float, end: float, stretches: int = 10) -> list[int]:
        """For stretches of equal time: 1 where the error of ``run`` is above that of ``other``, -1 where below."""
        cuts = [begin + i * (end - begin) / stretches for i in range(stretches + 1)]
        pairs = list(itertools.pairwise(cuts))
        return [(self.error(run, *pair) - self.error(other, *pair)).sign for pair in pairs]

    def jumps(self, run: Run, size: int = 20) -> Mean:
        """How jagged the curve is: the change of the error from one ``size`` of mini-batches to the next."""
        errors = self.between(run, self.start_s, self.end_s)
        parts = [statistics.fmean(errors[i : i + size]) for i in range(0, len(errors) - size + 1, size)]
        return mean([abs(b - a) for a, b in itertools.pairwise(parts)])


def mean(values: list[float]) -> Mean:
    if len(values) < 2:
        return Mean(math.nan, math.nan)
    return Mean(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))


def print_table(f: Figures) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"\nlr {f.task.lr}, batch {f.task.batch} per worker, every step at least {1000 * f.task.step_s:.0f} ms; "
        f"training error over all {f.end_s:.0f} s;\nthe warm runs begin with the weights of the single worker "
        f"at {f.start_s:.1f} s",
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    for column in (
        "mini-batches\nper worker",
        "\nper s",
        f"training error\n- {f.start_s:.1f} s",
        f"\n- {f.end_s:.0f} s",
        f"accuracy after\n{f.task.passes} passes, median",
        "\nat the end",
        "mean\nstaleness",
    ):
        table.add_column(column, justify="right")
    for run, r in ((run, r) for run, r in f.results.items() if run.seed == 1):
        early = "" if run.warm else f"{f.error(run, 0, f.start_s).value:.3f}"
        late = f"{f.error(run, f.start_s, f.end_s).value:.3f}"
        accuracy = "" if run.warm else f"{f.accuracy(run.workers):.3f}"
        rate = f"{len(r['seconds']) / r['seconds'][-1]:.0f}"
        cells = [str(len(r["errors"])), rate, early, late, accuracy, f"{r['accuracy'][-1]:.3f}"]
        table.add_row(name(run), *cells, "" if run.workers == 1 else f"{r['staleness']:.1f}")
    Console(width=max(Console().width, 120)).print(table)


def print_claims(f: Figures) -> None:
    """Whether each claim was seen.

    For accuracies the medians over the seeds count. A difference of errors counts from two standard errors on, within
    one run of each.
    """
    print("\nThe paper's claims, and the results here (± two standard errors, of one run each):\n")
    more = [run for run in f.cold if run.workers > 1]
    for run in more:
        claim = f"{run.workers} workers reach the accuracy of one in as many passes"
        both = [f.accuracies(workers) for workers in (run.workers, 1)]
        found, other = (f"{100 * statistics.median(a):.1f} % ({100 * a[0]:.1f} to {100 * a[-1]:.1f})" for a in both)
        last = f.results[run]["accuracy"][-1]
        seen_one = f.accuracy(run.workers) >= f.accuracy(1) - NEAR
        say("1", claim, seen_one, f"{found} against {other}; {100 * last:.1f} % in as many seconds, one run")
    for run in more:
        signs = f.slower(run, f.single, 0, f.end_s)
        decided = [sign for sign in signs if sign]
        line = "".join({1: "+", -1: "-", 0: "="}[sign] for sign in signs)
        claim = f"from a cold start {run.workers} workers learn more slowly at first, faster later"
        seen: bool | None = decided[:1] == [1] and decided[-1:] == [-1]
        if not seen and 1 in decided and -1 in decided[decided.index(1) :]:
            seen = None
        found = f"error above (+) or below (-) that of one in ten equal stretches of {f.end_s:.0f} s: {line}"
        say("2", claim, seen, found)
    for run in f.warm:
        cold = Run(run.workers)
        half = (f.start_s + f.end_s) / 2
        later = f.error(run, f.start_s, half)
        gain = later - f.error(cold, f.start_s, half)
        claim = f"a warm start fixes that for {run.workers} workers"
        slow = 1 in f.slower(cold, f.single, 0, f.end_s)
        found = f"{later} against {f.error(cold, f.start_s, half)} cold and {f.error(f.single, f.start_s, half)} of one"
        repaired = gain.sign < 0 and (later - f.error(f.single, f.start_s, half)).sign <= 0
        nothing = "" if slow else "; there was nothing to fix"
        say("2", claim, slow and repaired, f"error from {f.start_s:.1f} to {half:.1f} s {found}{nothing}")
    first, then = f.results[f.single]["curvatures"]
    limit = 2 / f.task.lr
    print(
        f"     The loss's largest curvature is {first:.0f} at the cold start and {then:.0f} at the warm one. The steps "
        f"of one are unstable above {limit:.0f},\n     those of {f.most} whose pushes are added above "
        f"{limit / f.most:.0f}, and earlier because they arrive late."
    )
    single = f.error(f.single, f.start_s, f.end_s)
    for run in f.nsyncs:
        error = f.error(run, f.start_s, f.end_s)
        at_the_end = f"accuracy of the servers' weights at the end {100 * f.results[run]['accuracy'][-1]:.1f} %"
        claim = f"after a warm start {run.workers} workers with nsync {run.nsync} are faster than one"
        say("3", claim, (error - single).sign < 0, f"error {error} against {single} in the same time; {at_the_end}")
    small, large = f.nsyncs[0], f.nsyncs[-1]
    counts = [len(f.between(run, f.start_s, f.end_s)) for run in (small, large)]
    errors = [f.error(run, f.start_s, f.end_s) for run in (small, large)]
    jumps = [f.jumps(run) for run in (small, large)]
    pair = f"nsync {small.nsync}"
    other = f"with nsync {large.nsync}"
    say("3", f"{pair} processes fewer mini-batches", counts[0] < 0.98 * counts[1], f"{counts[0]}, {counts[1]} {other}")
    say("3", f"{pair} yet has the lower error", (errors[0] - errors[1]).sign < 0, f"{errors[0]}, {errors[1]} {other}")
    jagged = (jumps[1] - jumps[0]).sign > 0
    found = f"the error of 20 mini-batches changes by {jumps[1]} to the next 20, {jumps[0]} with nsync {small.nsync}"
    say("3", f"nsync {large.nsync} makes the curve jagged", jagged, found)


def say(experiment: str, claim: str, seen: bool | None, found: str) -> None:
    verdict = {True: "seen", False: "NOT seen", None: "seen in part"}[seen]
    print(f"{experiment}. {claim}: {verdict}.\n     {found}")


def save_picture(f: Figures, path: Path) -> None:
    plt = pyplot()
    fig, (cold, warm, nsync) = plt.subplots(1, 3, figsize=(15, 4.8), sharey=True, layout="constrained")
    fig.get_layout_engine().set(wspace=0.04, w_pad=0.1, h_pad=0.1)

    def draw(axes: Any, run: Run, label: str, color: str, style: str = "-") -> None:
        seconds, errors = f.smooth(run)
        axes.plot(seconds, [100 * e for e in errors], style, color=color, lw=1.5, label=label)

    def count(run: Run) -> str:
        return "1 worker" if run.workers == 1 else f"{run.workers} workers"

    for run in f.cold:
        last = 100 * f.accuracy(run.workers)
        draw(cold, run, f"{count(run)} ({last:.1f} %)", COLORS[run.workers])
    for run in f.cold:
        if run.workers > 1:
            draw(warm, run, f"{count(run)}, cold", COLORS[run.workers], ":")
    draw(warm, f.single, "1 worker", COLORS[1])
    for run in f.warm:
        draw(warm, run, f"{count(run)}, warm", COLORS[run.workers])
    draw(nsync, f.single, "1 worker", COLORS[1])
    for run, color in zip(f.nsyncs, NSYNC_COLORS, strict=False):
        processed = len(f.between(run, f.start_s, f.end_s))
        draw(nsync, run, f"nsync {run.nsync} ({processed:,} mini-batches)", color)
    titles = {
        cold: (
            f"1. Cold start, nsync {f.single.nsync}",
            f"validation accuracy\nafter {f.task.passes} passes in brackets",
        ),
        warm: (f"2. Cold and warm start, nsync {f.single.nsync}", None),
        nsync: (f"3. {f.most} workers, warm start", "mini-batches per worker\nin the same time in brackets"),
    }
    for axes, (title, legend) in titles.items():
        axes.set(title=title, xlabel="seconds of training", xlim=(0, f.end_s), ylim=(0, None))
        axes.grid(axis="y")
        if axes is not cold:
            axes.axvline(f.start_s, color=PAPER["soft"], lw=0.8, ls="--")
            axes.annotate(
                "warm start",
                (f.start_s, 0.99),
                (-5, 0),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                va="top",
                ha="right",
                color=PAPER["soft"],
                fontsize=9,
            )
        axes.legend(loc="upper right", title=legend, alignment="left", title_fontsize=9, fontsize=9)
    cold.set_ylabel(f"training error in %, mean of {f.task.window} mini-batches")
    fig.savefig(path, dpi=150)
    print(f"\nSaved {os.path.relpath(path)}")


if __name__ == "__main__":
    main()

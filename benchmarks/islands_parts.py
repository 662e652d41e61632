"""Two islands beside Lightning's DDP: accuracy; and their checkpoints. Parts of :mod:`islands`."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from islands_program import Task, loss_of
from islands_ranks import Place, Shape, run_islands
from plain_loop import digits, network
from pytorch_lightning.callbacks import ModelCheckpoint
from rich.markup import escape
from rich.table import Table
from throughput import CONSOLE, trainer_options
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_asgd.algorithms import Algorithm, DiLoCo

RUN_S = 300.0
Row = tuple[Shape, Algorithm | None]
CONTEXT, SYMBOLS, WIDTH = 48, 96, 48  # of the transformer
DDP, WORKERS, ISLANDS = Shape(1, 4, joined=False), Shape(2, 1), (Shape(2, 2, "ddp"), Shape(2, 2, "fsdp2"))


# ---------------------------------------------------------------------- accuracy


@dataclass(frozen=True)
class Problem:
    """What is trained.

    Attributes:
        limit: how much worse than DDP over all ranks islands may be: of an accuracy that much, of a loss that share.
        algorithm: of the islands for which that holds; None for the package's default.
    """

    name: str
    data: Callable[[], tuple[Dataset[Any], Any]]
    layers: Callable[[], list[nn.Module]]
    optimizer: Callable[[Any], Any]
    batch: int  # of a rank
    epochs: int
    limit: float
    rising: bool  # an accuracy, which is better if it is higher; else a loss
    algorithm: Algorithm | None = None

    @property
    def rows(self) -> list[Row]:
        """What is compared: DDP, two ordinary workers, and islands, also with the package's default."""
        algorithms = dict.fromkeys((None, self.algorithm))
        return [(DDP, None), (WORKERS, None), *itertools.product(ISLANDS, algorithms)]


class Positions(nn.Embedding):
    """Adds what tells one place from another."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class Causal(nn.TransformerEncoderLayer):
    """Sees what is before a character, and not what is behind it."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return super().forward(x, src_mask=mask, is_causal=True)


@cache
def text() -> tuple[Dataset[Any], Any]:
    """Pieces of the standard library's modules in the order of their names; every tenth piece is held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = "".join(p.read_text(errors="ignore") for p in sorted(folder.glob("*.py")))[:400_000]
    codes = torch.tensor([ord(c) - 31 if 32 <= ord(c) < 126 else 0 for c in source])
    pieces = codes.unfold(0, CONTEXT + 1, CONTEXT)
    held_out = torch.arange(len(pieces)) % 10 == 0
    train, test = (TensorDataset(part[:, :-1], part[:, 1:]) for part in (pieces[~held_out], pieces[held_out]))
    return train, test


def transformer() -> list[nn.Module]:
    """0.07 million parameters."""
    block = partial(Causal, WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    embeddings = [nn.Embedding(SYMBOLS, WIDTH), Positions(CONTEXT, WIDTH)]
    return [*embeddings, block(), block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)]


SGD, ADAM = partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(torch.optim.AdamW, lr=2e-3)
PROBLEMS = (
    Problem("digits", digits, lambda: [*network()], SGD, 32, 20, 0.01, rising=True),
    Problem("text", text, transformer, ADAM, 16, 3, 0.01, rising=False, algorithm=DiLoCo(0.9, 0.5)),
)


def train(problem: Problem, seed: int, algorithm: Algorithm | None, place: Place) -> dict[str, Any]:
    """Train, and measure the result."""
    pl.seed_everything(seed, verbose=False)
    shape = place.shape
    module = Task(problem.layers(), problem.optimizer, sharded=shape.inside == "fsdp2")
    data, held_out = problem.data()
    options = {**trainer_options(), "max_epochs": problem.epochs, "devices": shape.ranks}
    options["callbacks"] = [place.together()]
    pl.Trainer(strategy=place.strategy(algorithm=algorithm), **options).fit(
        module, DataLoader(data, problem.batch * 4 // shape.size, shuffle=True)
    )
    whole = nn.ModuleDict({"layers": nn.Sequential(*problem.layers())})
    whole.load_state_dict(module.whole())
    layers, (x, y) = whole["layers"].eval(), held_out[:]
    with torch.no_grad():
        accuracy = (layers(x).argmax(-1) == y).float().mean()
        return {"measure": float(accuracy if problem.rising else loss_of(layers, x, y))}


def accuracy(seeds: int) -> list[bool]:
    """Print accuracy and loss; True where islands are as good as DDP, on average.

    With the package's default they are not on text, and neither are two ordinary workers: a mean of Adam's steps loses
    beside DDP, also if both workers average at the same time. An outer optimizer with momentum makes up for it.
    """
    verdicts = []
    for problem in PROBLEMS:
        found: dict[Row, list[float]] = {row: [] for row in problem.rows}
        for seed in range(seeds):
            for (shape, algorithm), values in found.items():
                answers = run_islands(shape, partial(train, problem, seed, algorithm), RUN_S)
                assert len({answer["measure"] for answer in answers}) == 1, answers
                values.append(answers[0]["measure"])
        measure = "accuracy" if problem.rising else "loss"
        title = f"{problem.name}, four ranks, {problem.epochs} epochs, {seeds} seeds: {measure}"
        table = Table("", "mean", "min - max", "beside DDP", "goal", title=title, title_justify="left")
        base = statistics.mean(found[DDP, None])
        for (shape, algorithm), values in found.items():
            mean = statistics.mean(values)
            worse = base - mean if problem.rising else mean / base - 1
            counts = shape in ISLANDS and algorithm == problem.algorithm
            verdicts.append(not counts or worse <= problem.limit)
            share, goal = (f"{-worse:+.4f}", -problem.limit) if problem.rising else (f"{worse:+.1%}", problem.limit)
            form = "+.2f" if problem.rising else "+.0%"
            name = str(shape) if algorithm is None else f"{shape}, {type(algorithm).__name__}"
            spread = f"{min(values):.4f} - {max(values):.4f}"
            table.add_row(name, f"{mean:.4f}", spread, share, format(goal, form) if counts else "")
        CONSOLE.print(table)
    return verdicts


# ---------------------------------------------------------------------- checkpoints


class Weights(pl.Callback):
    """Notes the whole weights when training begins."""

    first: dict[str, Any]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.first = arrays(module.whole())


def arrays(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The same for another process: torch would send a reference to this one's memory."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def fit(folder: Path, name: str, epochs: int, resumed: Path | None, distributed: bool, place: Place) -> dict[str, Any]:
    """Train digits with checkpoints, from one if it is given; the first and last weights, and what was trained.

    ``distributed`` says whether every rank writes a file of its own.
    """
    pl.seed_everything(1, verbose=False)
    problem, shape, weights = PROBLEMS[0], place.shape, Weights()
    module = Task(problem.layers(), problem.optimizer, sharded=shape.inside == "fsdp2" and shape.ranks > 1)
    saver = ModelCheckpoint(folder, "{epoch}-" + name, save_top_k=-1)
    options: dict[str, Any] = {
        **trainer_options(),
        "enable_checkpointing": True,
        "callbacks": [weights, saver, place.together()],
    }
    if shape.ranks > 1:
        options["strategy"] = place.strategy(save_distributed_checkpoint=distributed)
    trainer = pl.Trainer(**{**options, "max_epochs": epochs, "devices": shape.ranks})
    data = DataLoader(problem.data()[0], problem.batch, shuffle=True)
    trainer.fit(module, data, ckpt_path=resumed, weights_only=False)
    states = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
    moved = sum(float(getattr(each, "_local_tensor", each).abs().sum()) for each in states)
    last = {"first": weights.first, "last": arrays(module.whole()), "file": saver.best_model_path}
    return {**last, "steps": trainer.global_step, "epoch": trainer.current_epoch, "moved": moved}


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether all weights have the same bits."""
    return mine.keys() == theirs.keys() and all((value == theirs[name]).all() for name, value in mine.items())


def weights_in(file: Path) -> dict[str, Any]:
    """The weights of a checkpoint as one process reads them: of the files of several ranks, with torch's utility.

    Lightning's own expects what its FSDPStrategy writes, and ModelParallelStrategy names the weights differently.
    """
    if file.is_dir():
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(file, file.parent / "whole.ckpt")
        file = file.parent / "whole.ckpt"
    return arrays(torch.load(file, weights_only=False)["state_dict"])


def checkpoint() -> list[bool]:
    """Write checkpoints and continue from them; True where nothing is lost."""
    return [saved(distributed=distributed) for distributed in (False, True)]


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder, which forked ranks do not remove when they end."""
    folder = Path(tempfile.mkdtemp(prefix="asgd-islands-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def saved(*, distributed: bool) -> bool:
    """One kind of checkpoint, in all the ways to load it."""
    with scratch() as folder:
        two, four, alone = Shape(2, 2, "fsdp2"), Shape(1, 4, "fsdp2"), Shape(1, 1, "fsdp2", joined=False)
        written = run_islands(two, partial(fit, folder, "written", 2, None, distributed), RUN_S)
        files = {each["file"] for each in written}  # an island that does not write may know an earlier file only
        found = {"the islands' weights are the same": all(same(each["last"], written[0]["last"]) for each in written)}
        file = Path(max(files))
        kept = weights_in(file)
        found["one process reads the same weights"] = same(kept, written[0]["last"])
        for shape in (four, two) if distributed else (four, two, alone):
            try:
                answers = run_islands(shape, partial(fit, folder, f"from-{shape.ranks}", 3, file, distributed), RUN_S)
            except RuntimeError as error:
                found[f"{shape} resumes: {str(error)[-900:]}"] = False
                continue
            found[f"{shape} begins with the same weights"] = all(same(each["first"], kept) for each in answers)
            counts = {(each["epoch"], each["steps"] > written[0]["steps"]) for each in answers}
            found[f"{shape} trains one more epoch ({counts}, {answers[0]['steps']} steps)"] = counts == {(3, True)}
    kind = "one file per rank" if distributed else "one file"
    CONSOLE.print(f"{kind}: {file.name} of {sorted(Path(each).name for each in files)}, {written[0]['steps']} steps")
    for text, good in found.items():
        CONSOLE.print(f"  {'[green]yes[/]' if good else '[red]NO[/]'}  {escape(text)}")
    return all(found.values())

"""Servers of a job on two of its nodes, of which a server, the second node and then the first one are killed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.foundation.errors import ConfigurationError
from tests.helpers.ports import free_port
from tests.helpers.servers import servers_of
from tests.lightning.test_lost_host import Tell, WithTest
from tests.lightning.test_processes import wait_until

NODES, SAMPLES = 3, 200


class TellEpochs(Tell):
    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_epoch_end(trainer, *args)
        with (self.folder / f"epochs{self.rank}").open("a") as file:
            file.write(".")
        (self.folder / f"shares{self.rank}").write_text(str([block is not None for block in self.blocks(trainer)]))

    def blocks(self, trainer: Any) -> Any:
        (channel,) = trainer.strategy.fit_session.synchronizer.channels
        return channel.replica.blocks


def work(folder: Path, node: int, port: int, transport: str) -> None:
    """The only worker of a node, with the variables that a user sets."""
    with (folder / f"output{node}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    about = {"NODE_RANK": node, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in about.items()}
    os.environ["LIGHTNING_ASGD_SECRET"] = "of this test alone"
    os.chdir(folder)
    module, data = WithTest(SAMPLES, 0.005), TensorDataset(torch.arange(SAMPLES))
    strategy = ASGDStrategy(
        nsync=2, algorithm=ASGD("sum"), transport=transport, num_servers=2, advanced=Advanced(server_machines=2)
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=NODES,
        strategy=strategy,
        max_epochs=1_000_000,
        callbacks=[TellEpochs(folder, node)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.test(module, DataLoader(data, 2), verbose=False)  # the fit that follows keeps the servers
    trainer.fit(module, DataLoader(data, 2, shuffle=True))
    seen = sorted(Counter(module.seen.tolist()).items())
    sys.stdout.write(f"seen: {seen} {trainer.current_epoch} {sorted(strategy.stats.lost_workers)}\n")
    trainer.test(module, DataLoader(data, 2), verbose=False)
    sys.stdout.write("tested\n")
    sys.stdout.flush()


@pytest.mark.parametrize("transport", ["zmq", pytest.param("rpc", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lost", [(1,), *(pytest.param(nodes, marks=pytest.mark.slow) for nodes in ((0,), (1, 0)))])
def test_a_server_and_nodes_are_killed(tmp_path: Path, mains: Any, transport: str, lost: tuple[int, ...]) -> None:
    port = free_port()
    workers = [mains(target=work, args=(tmp_path, node, port, transport)) for node in range(NODES)]

    def said(node: int) -> str:
        return (tmp_path / f"output{node}").read_text()

    def epochs_of(node: int) -> int:
        file = tmp_path / f"epochs{node}"
        return len(file.read_text()) if file.exists() else 0

    def train(*nodes: int) -> None:
        """Wait until each of these has trained two more epochs: no push is on some servers only at the end of one."""
        before = {node: epochs_of(node) for node in nodes}

        def trained() -> bool:
            ended = [node for node in nodes if workers[node].exitcode is not None]
            assert not ended, said(ended[0])
            return all(epochs_of(node) >= before[node] + 2 for node in nodes)

        wait_until(trained, 60, "training")

    family: list[psutil.Process] = []
    left = set(range(NODES))
    try:
        for worker in workers:
            worker.start()
        train(*left)
        for node in left:  # another machine's server could not map the memory that a worker shares with a lost one
            assert (tmp_path / f"shares{node}").read_text().endswith("False]")
        servers = [servers_of(worker.pid) for worker in workers]
        assert [len(each[:1]) for each in servers] == [1, 1, 0]
        assert max(map(len, servers)) <= 2, "one more is kept ready after a while"
        servers[1][0].kill()
        train(*left)
        for node in lost:
            family += psutil.Process(workers[node].pid).children(recursive=True)
            (tmp_path / f"hold{node}").touch()
            wait_until((tmp_path / f"held{node}").exists, 60, "the worker, between two pushes")
            workers[node].kill()
            workers[node].join()
            left.remove(node)
            train(*left)
        for node in left:
            family += psutil.Process(workers[node].pid).children(recursive=True)
        (tmp_path / "stop").touch()
        for node in left:
            workers[node].join(100)
            assert workers[node].exitcode == 0, said(node)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    last = said(min(left))  # that of the chief
    seen = last.partition("seen: ")[2].split()
    assert seen, last
    epochs = float(seen[2])
    assert f"seen: [({epochs}, {SAMPLES})] {int(epochs)} {sorted(lost)}\n" in last, "every sample once per epoch"
    assert last.rstrip().endswith("tested")
    assert "Server 1 (process" in said(1)
    assert "A replacement is being started." in said(1)
    if lost[0] == 1:
        assert "The first process of node 1, which runs servers 1, is lost. Others are started here." in said(0)
    if 0 in lost:
        assert "This process hosts the servers from now on." in said(min(left))
    _, alive = psutil.wait_procs(family, 10)
    assert not alive


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"advanced": Advanced(server_machines=2)},
            "server_machines=2 was given with num_servers=1. Expected at least one server",
        ),
        (
            {"advanced": Advanced(server_machines=2), "num_servers": 2, "run": "h:1/r"},
            "server_machines=2 was given with run='h:1/r'. Expected none: `lightning-asgd serve",
        ),
        (
            {"advanced": Advanced(server_machines=2), "num_servers": 2, "island": 2},
            "server_machines=2 was given with island=2. Expected none: the servers of islands",
        ),
        (
            {"advanced": Advanced(server_machines=2), "num_servers": 2, "start_method": "fork"},
            "server_machines=2 was given with start_method='fork'. Expected 'popen'",
        ),
    ],
)
def test_what_nodes_cannot_share_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        ASGDStrategy(**options)
    assert text in str(raised.value)


def test_more_machines_than_nodes_are_refused_by_name(tmp_path: Path) -> None:
    strategy = ASGDStrategy(num_servers=2, advanced=Advanced(server_machines=2))
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, default_root_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"^Advanced\.server_machines=2 was given in a job with num_nodes=1"):
        trainer.fit(WithTest(4, 0.0), DataLoader(TensorDataset(torch.arange(4)), 2))

"""Two machines that disagree: both say why, within seconds after their programs have begun."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import network
from lightning_asgd.core.algorithms.config import SECRET_ENV
from tests.helpers.programs import environment

REASON = network.available()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
SECRET = "known to both machines"
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
WITHIN_S = 5.0
PROGRAM = """
import sys, time
import pytorch_lightning as pl, torch
from torch.utils.data import DataLoader, TensorDataset
from lightning_asgd import ASGDStrategy

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

data = DataLoader(TensorDataset(torch.randn(640, 4)), batch_size=4)
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
print("BEGUN", flush=True)
pl.Trainer(accelerator="cpu", strategy=ASGDStrategy(), max_epochs=1, **quiet, **eval(sys.argv[1])).fit(Model(), data)
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[network.Network]:
    with network.two_machines() as pair:
        yield pair


class Node:
    """A program on one of the machines."""

    def __init__(self, folder: Path, machines: network.Network, number: int, options: Any, variables: Any) -> None:
        self.output = folder / f"output{number}"
        (folder / "program.py").write_text(PROGRAM)
        about = {"num_nodes": 2, "devices": 1, **options}
        own = {"NODE_RANK": str(number), "MASTER_ADDR": machines.addresses[0], "MASTER_PORT": "29555"}
        wanted = {SECRET_ENV: SECRET, **own, **variables}
        given = environment(**{name: value for name, value in wanted.items() if value is not None})
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*machines.prefix(number), sys.executable, str(folder / "program.py"), repr(about)],
                env=given,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self.output.read_text()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def named(nodes: list[Node], texts: tuple[str, str]) -> list[float]:
    """Seconds from the time when both programs have begun until each has said its text."""
    begun: float | None = None
    found: dict[int, float] = {}
    until = time.monotonic() + 90
    while len(found) < 2:
        now = time.monotonic()
        if begun is None and all("BEGUN" in node.said for node in nodes):
            begun, until = now, now + 2 * WITHIN_S
        for number, (node, text) in enumerate(zip(nodes, texts, strict=True)):
            if number not in found and re.search(text, node.said):
                found[number] = now
        assert now < until, f"not said: {[t for n, t in enumerate(texts) if n not in found]}\n" + "\n---\n".join(
            node.said[-3000:] for node in nodes
        )
        time.sleep(0.05)
    return [max(0.0, at - (begun or at)) for at in found.values()]


def check(nodes: list[Node], texts: tuple[str, str], *, both_end: bool) -> None:
    """Whether both say their text in time, and both end, or the second one does."""
    try:
        took = named(nodes, texts)
        assert max(took) < WITHIN_S, f"{took}\n{nodes[0].said}\n{nodes[1].said}"
        for node in nodes[0 if both_end else 1 :]:
            assert node.process.wait(30) not in (0, None), node.said
    finally:
        for node in nodes:
            node.end()


def another_version(folder: Path) -> str:
    """A path on which another version of the library is found first, whose messages differ."""
    shutil.copytree(ROOT / "lightning_asgd", folder / "other" / "lightning_asgd")
    messages = folder / "other" / "lightning_asgd" / "core" / "protocol" / "session.py"
    old, number = messages.read_text(), r"(?m)^PROTOCOL = \d+$"
    assert re.search(number, old)
    messages.write_text(re.sub(number, "PROTOCOL = 1000", old).replace("world_size: int", "workers_of_session: int"))
    return str(folder / "other")


@pytest.mark.parametrize(
    ("options", "variables", "texts", "both_end"),
    [
        SLOW([{}, {}], [{}, {SECRET_ENV: "another one than there"}], (f"another {SECRET_ENV}", SECRET_ENV), False),
        SLOW([{}, {}], [{}, {SECRET_ENV: None}], (f"another {SECRET_ENV}, or none", f"{SECRET_ENV} is not set"), False),
        ([{}, {}], [{SECRET_ENV: None}, {}], (SECRET_ENV, SECRET_ENV), True),
        ([{}, {"num_nodes": 3}], [{}, {}], ("Expected the same devices and num_nodes",) * 2, True),
        SLOW([{}, {"devices": 2}], [{}, {}], ("Expected the same devices and num_nodes",) * 2, False),
    ],
    ids=["another secret", "no secret on the second", "no secret on the first", "num_nodes", "devices"],
)
def test_both_machines_say_why(
    tmp_path: Path, machines: network.Network, options: Any, variables: Any, texts: tuple[str, str], both_end: bool
) -> None:
    nodes = [Node(tmp_path, machines, n, options[n], variables[n]) for n in (0, 1)]
    check(nodes, texts, both_end=both_end)


@pytest.mark.parametrize("secret", [SECRET, SLOW(None)], ids=["zmq", "rpc"])
def test_another_version(tmp_path: Path, machines: network.Network, secret: str | None) -> None:
    path = another_version(tmp_path)
    variables: list[Any] = [{SECRET_ENV: secret}, {SECRET_ENV: secret, "PYTHONPATH": path}]
    nodes = [Node(tmp_path, machines, n, {}, variables[n]) for n in (0, 1)]
    check(
        nodes,
        (r"Worker 1 cannot join: \S+ has lightning-asgd \S+ with protocol 1000", "with protocol 1000"),
        both_end=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("at", [(0, 1), (1,)], ids=["both", "the second"])
def test_a_name_that_does_not_resolve(tmp_path: Path, machines: network.Network, at: tuple[int, ...]) -> None:
    variables: list[Any] = [{"MASTER_ADDR": "nowhere.invalid"} if n in at else {} for n in (0, 1)]
    nodes = [Node(tmp_path, machines, n, {}, variables[n]) for n in (0, 1)]
    texts = "MASTER_ADDR.*nowhere.invalid|nowhere.invalid.*MASTER_ADDR"
    check(nodes, (texts if 0 in at else "", texts), both_end=0 in at)


HOLDERS = {
    "silent": "",
    "greets": "connection.sendall(b'SSH-2.0-other\\r\\n')",
    "answers": "connection.recv(100); connection.sendall(b'HTTP/1.0 400 Bad Request\\r\\n\\r\\n'); connection.close()",
}


@pytest.mark.parametrize("holder", ["greets", *map(SLOW, ["answers", "silent"])])
def test_a_port_that_another_program_has(tmp_path: Path, machines: network.Network, holder: str) -> None:
    program = (
        f"import socket\nlistener = socket.create_server(({machines.addresses[0]!r}, 29555))\nkept = []\n"
        f"print('up', flush=True)\nwhile True:\n    connection, _ = listener.accept()\n    kept.append(connection)\n"
        f"    try:\n        {HOLDERS[holder] or 'pass'}\n    except OSError:\n        pass\n"
    )
    held = subprocess.Popen(
        [*machines.prefix(0), sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert held.stdout is not None
        held.stdout.readline()
        nodes = [Node(tmp_path, machines, n, {}, {}) for n in (0, 1)]
        check(nodes, ("Cannot listen on", "(?i)another program"), both_end=True)
    finally:
        held.kill()
        held.wait()

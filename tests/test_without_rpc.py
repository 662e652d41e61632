"""Where ``torch.distributed.rpc`` cannot be imported, all but the transport of that name works.

A ``sitecustomize`` takes it from this test's processes. torch imports it itself, so that has to come first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.servers import ROOT

WITHOUT_RPC = """
import sys
import torch

for name in [name for name in sys.modules if name.startswith("torch.distributed.rpc")]:
    del sys.modules[name]
sys.modules["torch.distributed.rpc"] = None  # so that importing it fails
del torch.distributed.rpc
"""

PROGRAM = """
import pytest
import torch

try:
    import torch.distributed.rpc
    raise SystemExit("torch.distributed.rpc was imported")
except ImportError:
    pass

import lightning_asgd
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.calls.inprocess import InProcessTransport
from lightning_asgd.core.job.registry import kind_of, release
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.transports.zmq.transport import ZmqTransport
from tests.helpers.servers import SECRET, ServerProcess
from tests.transport.test_rpc import client_of, exchange_once

for transport in ("rpc", "zmq"):
    lightning_asgd.ASGDStrategy(transport=transport)
kind_of("zmq").check_available()
rpc = kind_of("rpc")
for use in (rpc.check_available, lambda: rpc.connect(["uv://127.0.0.1:1"], "lo"), lambda: rpc.serve(print, "", "lo")):
    with pytest.raises(ConfigurationError, match=r"^transport='rpc' .* without torch.distributed.rpc.*transport='zmq'"):
        use()
release()

server = ServerProcess(Rendezvous.host(), "server0", "zmq")  # loads its modules meanwhile
try:
    service = Service()
    assert exchange_once(client_of(InProcessTransport([service.handle]), "in this process")) == [[1.0, 1.0]]
    service.close()
    transport = ZmqTransport([server.address()], SECRET)
    assert exchange_once(client_of(transport, "elsewhere")) == [[1.0, 1.0]]
    transport.close()
finally:
    server.close()
"""


def test_all_but_the_transport_over_rpc_works(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_RPC)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), ROOT]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr

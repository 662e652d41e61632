"""Servers that are forks of the process that starts them: it has imported torch already, most of what a start costs.

Only where a fork is clean: on Linux, in a process that has no RPC agent. Elsewhere, and in ``tests/examples``, a server
is a new interpreter, as it is for users.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

SERVER = "lightning_asgd.core.server.process"
NAME = Path("/proc/self/comm")
Interpreter = subprocess.Popen


class Popen(Interpreter):  # type: ignore[type-arg]
    """Forks a server; any other program is started as always."""

    def __init__(self, args: Any, *others: Any, **options: Any) -> None:
        if not isinstance(args, list) or SERVER not in args or not can_fork():
            super().__init__(args, *others, **options)
            return
        commands, stdin = os.pipe()
        self._waitpid_lock = threading.Lock()
        self._child_created = True
        self.args, self.returncode, self.stdout, self.stderr = args, None, None, None
        self.pid = os.fork()
        if not self.pid:
            serve(args, commands, options["stdout"].fileno(), options["env"])
        os.close(commands)
        self.stdin = os.fdopen(stdin, "wb")


def can_fork() -> bool:
    agent = sys.modules.get("torch.distributed.rpc")
    return NAME.exists() and agent is not None and not agent._is_current_rpc_agent_set()


def serve(args: list[str], commands: int, output: int, env: dict[str, str]) -> None:
    """Be the server, as far as it can tell a new interpreter."""
    code = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        os.dup2(commands, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(env)
        sys.argv = sys.orig_argv = args
        for name in (None, "lightning_asgd"):
            logging.getLogger(name).handlers.clear()
        NAME.write_text("server_process")
        from lightning_asgd.core.server.process import run_server

        code = run_server(args[3:])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

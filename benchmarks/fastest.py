"""Synchronous SGD over the fastest m of n workers: m-synchronous SGD of Begunov and Tyurin (arXiv 2602.03802).

A step's gradients are those of the first m workers that have computed theirs. A process beside rank 0 holds the weights
and the optimizer. It applies the mean of the m gradients, and answers all workers with the new weights. A worker that
is late drops its gradient, without sending it, and goes on from the new weights.

The samples are divided as under DDP, and an epoch has as many updates as DDP's. So the batches of gradients that came
late are lost, and those of the steps that a slow worker has missed: it does not train them later in the epoch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

__all__ = ["Fastest", "Holder"]

NUMBER = struct.Struct("!q")


class Holder:
    """The weights and their optimizer, for one thread per worker.

    Args:
        parameters: first weights. They must be of 32 bits, and on the CPU.
        optimizer: torch's, over these.
        count: of the gradients that make a step.
    """

    def __init__(self, parameters: Iterable[Tensor], optimizer: Any, count: int) -> None:
        self.parameters, self.optimizer, self.count = list(parameters), optimizer, count
        self.step = 0  # updates so far
        self.weights = parameters_to_vector(self.parameters).detach()
        self._admitted = self._added = 0  # gradients of this step
        self._sum = torch.zeros_like(self.weights)
        self._changed = threading.Condition()

    def admits(self, step: int) -> bool:
        """Whether a worker that has computed its gradient of this step now is among the first."""
        with self._changed:
            if step != self.step or self._admitted == self.count:
                return False
            self._admitted += 1
            return True

    def add(self, gradient: Tensor) -> None:
        """Take an admitted gradient; the last one of a step makes the update."""
        with self._changed:
            self._sum += gradient
            self._added += 1
            if self._added == self.count:
                self._update()

    def after(self, step: int) -> tuple[int, Tensor]:
        """The newest weights and their step, as soon as this one has been made."""
        with self._changed:
            self._changed.wait_for(lambda: self.step > step)
            return self.step, self.weights

    def _update(self) -> None:
        mean = (self._sum / self.count).split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, mean, strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()
        self.weights = parameters_to_vector(self.parameters).detach()
        self._sum = torch.zeros_like(self.weights)
        self._admitted = self._added = 0
        self.step += 1
        self._changed.notify_all()

    def answer(self, link: socket.socket) -> None:
        """Serve a worker until it closes its link."""
        gradient = torch.empty_like(self.weights)
        with link:
            send(link, *self.after(-1))
            while (step := receive(link)) is not None:
                if self.admits(step):
                    send(link, step)  # of weights the number is higher
                    fill(link, gradient)
                    self.add(gradient)
                send(link, *self.after(step))


class Fastest(DDPStrategy):
    """DDP whose steps wait for the fastest ranks only.

    The optimizer that steps is rank 0's as it is when training begins: schedulers do not reach it. Buffers stay each
    rank's own.

    Args:
        count: of the ranks whose gradients make a step.
        **options: of DDPStrategy.
    """

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__(**options)
        self.count = count
        self.late = 0  # gradients of this rank that were dropped
        self.missed = 0  # steps that others made while this rank computed such a gradient
        self._held = 0  # the step of this rank's weights
        self._link: Any = None  # a socket, once training begins
        self._holder: int | None = None

    def configure_ddp(self) -> None:
        """Do not wrap the module: its gradients go to the holder."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if not 1 <= self.count <= self.world_size:
            raise ValueError(f"A step cannot wait for {self.count} of {self.world_size} ranks: give 1 to that number.")
        # Lightning tells all ranks before every step whether rank 0 got SIGTERM: no rank would be ahead of another.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self._parameters = [*self.lightning_module.parameters()]
        self._link = socket.create_connection(self.broadcast(self._hold() if self.is_global_zero else None))
        self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._take(receive(self._link))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._held > self.lightning_module.trainer.global_step:
            self.missed += 1
            return torch.zeros((), requires_grad=True)  # Lightning refuses None from a rank of several
        return super().training_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        step = self.lightning_module.trainer.global_step
        loss = closure()
        if self._held == step:
            self._offer(step)
        return loss

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._holder is not None:
            os.kill(self._holder, signal.SIGKILL)  # it may wait for gradients that will not come

    def teardown(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._holder is not None:
            os.waitpid(self._holder, 0)  # it ends when all ranks have closed their links
        super().teardown()

    def _offer(self, step: int) -> None:
        """Make the step with the others, or, if it is late, take what they have made."""
        send(self._link, step)
        newest = receive(self._link)
        if newest == step:
            self._link.sendall(parameters_to_vector([p.grad for p in self._parameters]).numpy().tobytes())
            newest = receive(self._link)
        else:
            self.late += 1
        self._take(newest)

    def _take(self, step: int | None) -> None:
        """The holder's weights, whose step has been read already."""
        if step is None:
            raise RuntimeError(f"Rank {self.global_rank} lost the process that holds the weights: see rank 0's output.")
        weights = torch.empty(sum(parameter.numel() for parameter in self._parameters))
        fill(self._link, weights)
        vector_to_parameters(weights, self._parameters)
        self._held = step

    def _hold(self) -> tuple[str, int]:
        """Fork the holder, which keeps this rank's module and optimizer as they are now; its address."""
        listener = socket.create_server((self.cluster_environment.main_address, 0))
        address = listener.getsockname()
        self._holder = os.fork()
        if self._holder == 0:
            try:
                serve(Holder(self._parameters, self.optimizers[0], self.count), listener, self.world_size)
            finally:
                os._exit(0)
        listener.close()
        return address


def serve(holder: Holder, listener: socket.socket, workers: int) -> None:
    """Accept this number of links, and answer each until its worker closes it, or rank 0 dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    threads = []
    for _ in range(workers):
        link, _ = listener.accept()
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threads.append(threading.Thread(target=holder.answer, args=(link,)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def send(link: socket.socket, step: int, weights: Tensor | None = None) -> None:
    """Send a step's number, and the weights that it has made."""
    link.sendall(NUMBER.pack(step) + (b"" if weights is None else weights.numpy().tobytes()))


def receive(link: socket.socket) -> int | None:
    """A step's number; None if the other side has closed the link."""
    number = link.recv(NUMBER.size, socket.MSG_WAITALL)
    return NUMBER.unpack(number)[0] if number else None


def fill(link: socket.socket, values: Tensor) -> None:
    """Receive a vector of known length."""
    link.recv_into(memoryview(values.numpy()).cast("B"), 0, socket.MSG_WAITALL)

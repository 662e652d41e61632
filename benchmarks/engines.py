"""Workers that other people's engines start and restart join a run and leave it: torchrun, Kubernetes, Kubeflow, SLURM.

    python benchmarks/engines.py                     # as root under Linux: about ten minutes
    python benchmarks/engines.py --only torchrun --transport rpc
    python benchmarks/engines.py --loop plain --only torchrun --only slurm    # AsyncSGD; --loop fabric: Fabric

The servers and the groups of workers are on machines of their own (network namespaces). Each process gets exactly the
environment that its engine sets, and the commands of the manifests in examples/kubernetes.

torchrun    two standalone groups of two. The agent of one is killed, and started again; then one of its workers.
rendezvous  the same two groups with one rendezvous: a worker is killed, all restart, and the fit continues.
kubernetes  `serve` as in the StatefulSet and workers as in the Deployment, 1 to 3 and back. `serve` gets SIGTERM, and
            continues from its volume at another address. Health checks meanwhile.
kubeflow    two Pods of the TrainJob, of which one is evicted and replaced.
slurm       two tasks of an array, and a job of two nodes: SIGUSR1 before the time limit has them requeued. A Trainer's
            process then ends with exit code 0, that of another loop with 138.

Training a sample adds 1 to that sample's parameter. At the end every sample must have been applied exactly once per
epoch, every exit code must be the expected one, and no process may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from common import CONSOLE, prepared
from network import Network, machines, move, name_hosts
from rich.markup import escape

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = str(ROOT / "benchmarks" / "engines_program.py")
MANIFESTS = ROOT / "examples" / "kubernetes"
BINARIES = Path(sys.executable).parent
SAMPLES = 2000  # of the program
PROBE_S = 0.6  # of CPU time, for a health check
PORT, RUN, SECRET = 29400, "digits", "known in these namespaces only"
SERVERS, FIRST, SECOND, THIRD = range(4)  # machines
LOOP = "trainer"  # which kind the program has
IN_A_POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
}


# ---------------------------------------------------------------------- processes on machines


@dataclass
class Stage:
    """The machines, and what runs there."""

    network: Network
    folder: Path
    transport: str
    processes: dict[str, Any] = field(default_factory=dict)

    def run(self, name: str, machine: int, command: Sequence[str], **environment: str) -> Any:
        """Start a command; its output is appended to a file of its name."""
        about = {
            "ENGINES_LOOP": LOOP,
            "ENGINES_NAME": name,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        if self.transport == "zmq":
            about["LIGHTNING_ASGD_SECRET"] = SECRET
        with (self.folder / f"{name}.log").open("a") as output:
            self.processes[name] = subprocess.Popen(
                [*self.network.prefix(machine), *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **about, "PATH": f"{self.folder}:{BINARIES}:{os.environ['PATH']}"},
            )
        return self.processes[name]

    def serve(self, *more: str) -> None:
        """Start servers as by hand, and wait for them."""
        address = self.network.addresses[SERVERS]
        about = [f"{address}:{PORT}/{RUN}", f"--transport={self.transport}"]
        self.run("serve", SERVERS, ["lightning-asgd", "serve", *about, *more])
        self.wait(lambda: 'run="' in self.said("serve"), 90, "the servers' start")

    def joins(self, host: str = "") -> dict[str, str]:
        """The variable that names the run."""
        address = host or self.network.addresses[SERVERS]
        return {"LIGHTNING_ASGD_RUN": f"{address}:{PORT}/{RUN}"}

    def said(self, name: str) -> str:
        """What a command has printed."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def last_output(self) -> str:
        """Of all commands."""
        return "\n".join(f"{file.name}: {file.read_text()[-2500:]}" for file in self.folder.glob("*.log"))

    def told(self, name: str = "*") -> list[dict[str, Any]]:
        """What the workers of a command have told, the latest last."""
        found = [json.loads(file.read_text()) for file in self.folder.glob(f"{name}-*.json")]
        return sorted((told for told in found if "first" in told), key=lambda told: told["first"])

    def living(self, name: str) -> list[dict[str, Any]]:
        """Those that train."""
        return [told for told in self.told(name) if not told.get("ended") and is_alive(told["pid"])]

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> float:
        """Wait for something; how long it took. Raises a ``RuntimeError`` if it does not happen in time."""
        begun = time.monotonic()
        while not condition():
            if time.monotonic() > begun + seconds:
                raise RuntimeError(f"No {what} within {seconds:g} s.\n{self.last_output()}")
            time.sleep(0.05)
        return time.monotonic() - begun

    def join(self, name: str, number: int, seconds: float = 120.0) -> float:
        """Wait until that many workers of a command train."""
        return self.wait(lambda: len(self.living(name)) == number, seconds, f"training of {number} workers of {name}")

    def train(self, seconds: float = 60.0) -> None:
        """Wait until every worker that lives has trained on."""
        before = {told["pid"]: told["batches"] for told in self.living("*")}

        def trained() -> bool:
            now = {told["pid"]: told["batches"] for told in self.told()}
            return all(now[pid] > batches for pid, batches in before.items())

        self.wait(trained, seconds, "training")

    def ends(self, name: str, seconds: float = 60.0) -> int:
        """Wait for a command's end; its exit code."""
        process = self.processes[name]
        self.wait(lambda: process.poll() is not None, seconds, f"end of {name}")
        return int(process.returncode)

    def finish(self, *names: str) -> tuple[list[str], str]:
        """Let training end with the next epoch but one, and these commands with it; what is wrong, and a sentence."""
        last = max(told["epoch"] for told in self.told()) + 1
        (self.folder / "last").write_text(str(last))
        self.wait(lambda: not self.living("*"), 240, "the end of training")
        codes = {name: self.ends(name) for name in names}
        ended = [told for told in self.told() if told.get("ended")]
        problems = [f"{told['seen']} in {told['epochs']} epochs" for told in ended if not is_exact(told)]
        problems += [unless(bool(ended), "no worker has ended"), unless(not any(codes.values()), f"exit codes {codes}")]
        problems += [f"left: {words}" for words in self.left()]
        problems += [self.last_output()] if any(problems) else []
        epochs = max((told["epochs"] for told in ended), default=0)
        return problems, f"exit codes {codes}; each of {SAMPLES} samples {epochs} times in {epochs} epochs"

    def left(self) -> list[str]:
        """Commands that are left on the machines, but for the servers' own, which are stopped here."""
        serving = self.processes.get("serve")
        if serving is not None and serving.poll() is None:
            serving.terminate()
            serving.wait(60)
        deadline = time.monotonic() + 10
        while pids := [pid for index in range(len(self.network.names)) for pid in self.network.processes(index)]:
            if time.monotonic() > deadline:
                return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100] for pid in pids]
            time.sleep(0.1)
        return []


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@contextlib.contextmanager
def stage(transport: str, number: int = 3) -> Iterator[Stage]:
    """Machines for one part, and their processes' end."""
    with tempfile.TemporaryDirectory() as folder, machines(number) as network:
        made = Stage(network, Path(folder), transport)
        try:
            yield made
        finally:
            for process in made.processes.values():
                if process.poll() is None:
                    process.kill()
                process.wait()


def is_exact(told: Mapping[str, Any]) -> bool:
    """Whether a worker has seen the end of its last epoch, with each sample once per epoch."""
    return bool(told["seen"] == [[float(told["epochs"]), SAMPLES]])


def verdict(part: str, problems: Sequence[str], text: str) -> bool:
    """Print how a part went."""
    found = [problem for problem in problems if problem]
    CONSOLE.print(f"[{'red' if found else 'green'}]{part}[/]: {escape(text)}", *map(escape, found), sep="\n  ")
    return not found


def unless(good: bool, text: str) -> str:
    """A problem, unless all is well."""
    return "" if good else text


# ---------------------------------------------------------------------- torchrun


def torchrun(transport: str) -> bool:
    """Two groups: what happens to one is nothing to the other."""
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=3", PROGRAM]
    with stage(transport) as on:
        on.serve()
        for name, machine in (("a", FIRST), ("b", SECOND)):
            on.run(name, machine, [*command, str(on.folder)], **on.joins())
        for name in "ab":
            on.join(name, 2, 180)
        others = {told["pid"] for told in on.living("a")}
        on.train()
        agent = on.processes["b"]
        agent.kill()
        left_s = on.wait(lambda: not on.living("b"), 30, "end of the killed agent's workers")
        agent.wait()
        on.train()
        on.run("b", SECOND, [*command, str(on.folder)], **on.joins())
        again_s = on.join("b", 2)
        os.kill(on.living("b")[0]["pid"], signal.SIGKILL)
        restarted_s = on.wait(
            lambda: [told["engine"]["TORCHELASTIC_RESTART_COUNT"] for told in on.living("b")] == ["1", "1"],
            120,
            "training of the restarted group",
        )
        undisturbed = {told["pid"] for told in on.living("a")} == others
        worlds = {(told["world"], told["engine"]["WORLD_SIZE"]) for told in on.told()}
        problems, end = on.finish("a", "b")
        problems += [unless(undisturbed, "the other group was restarted")]
        problems += [unless(worlds == {(1, "2")}, f"worlds {worlds}")]
    text = f"its workers ended {left_s:.1f} s after the agent was killed; the new agent's trained after {again_s:.1f} s"
    text += f"; a group whose worker was killed trained again after {restarted_s:.1f} s"
    return verdict("torchrun", problems, f"{text}; {end}")


def rendezvous(transport: str) -> bool:
    """One rendezvous: all restart, and continue from what the servers hold."""
    with stage(transport) as on:
        on.serve()
        where = f"--rdzv-endpoint={on.network.addresses[FIRST]}:29500"
        about = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=digits", where]
        for name, machine in (("a", FIRST), ("b", SECOND)):
            # By its host name alone a machine would not know in a namespace that the endpoint is its own.
            host = [f"--local-addr={on.network.addresses[machine]}", f"--rdzv-conf=is_host={int(machine == FIRST)}"]
            command = ["torchrun", *about, *host, "--max-restarts=3", PROGRAM, str(on.folder)]
            on.run(name, machine, command, **on.joins())
        for name in "ab":
            on.join(name, 2, 180)
        on.train()
        before = max(told["epoch"] for told in on.told())
        earlier = {told["pid"] for told in on.told()}
        os.kill(on.living("b")[0]["pid"], signal.SIGKILL)
        again = lambda: len({told["pid"] for told in on.living("*")} - earlier) == 4  # noqa: E731
        restarted_s = on.wait(again, 180, "training of all four again")
        resumed = min(told["epoch"] for told in on.living("*"))
        problems, end = on.finish("a", "b")
        problems += [unless(resumed >= before, f"all began at epoch {resumed}, after {before}")]
    text = f"a worker was killed, and all four trained again {restarted_s:.1f} s later, in epoch {resumed}"
    return verdict("rendezvous", problems, f"{text}; {end}")


# ---------------------------------------------------------------------- Kubernetes


def manifest(name: str, kind: str) -> Any:
    """An object of one of the manifests."""
    documents = yaml.safe_load_all((MANIFESTS / name).read_text())
    return next(document for document in documents if document["kind"] == kind)


def command_of(container: Mapping[str, Any], replaced: Mapping[str, str]) -> list[str]:
    """What a container runs, with parts replaced as Kubernetes and the image would."""
    words = [str(word) for word in (*container["command"], *container.get("args", ()))]
    for old, new in replaced.items():
        words = [word.replace(old, new) for word in words]
    return words


def plain_values(container: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a container that have a value."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


@dataclass
class Probe:
    """One health check: the exit code, what was printed, seconds, and seconds of CPU time."""

    code: int
    text: str
    took_s: float
    cpu_s: float


def probe(on: Stage, command: Sequence[str], address: str) -> Probe:
    """Run the probe of the manifest as the kubelet does."""
    begun = time.monotonic()
    environment = {**os.environ, "ADDRESS": address, "PATH": f"{BINARIES}:{os.environ['PATH']}"}
    if on.transport == "zmq":
        environment["LIGHTNING_ASGD_SECRET"] = SECRET
    words = [*on.network.prefix(SERVERS), *command]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    text = process.stdout.read().strip()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Probe(process.returncode, text, time.monotonic() - begun, used.ru_utime + used.ru_stime)


def kubernetes(transport: str) -> bool:
    """The plain objects."""
    pod = manifest("servers.yaml", "StatefulSet")["spec"]["template"]["spec"]
    worker = manifest("workers.yaml", "Deployment")["spec"]["template"]["spec"]["containers"][0]
    container, grace_s = pod["containers"][0], pod["terminationGracePeriodSeconds"]
    asked = container["readinessProbe"]["exec"]["command"]
    with stage(transport, 4) as on:
        volume = on.folder / "volume"
        volume.mkdir()

        def start(address: str) -> None:
            words = {"$(ADDRESS)": address, "/snapshots": str(volume)}
            command = command_of(container, words)
            command[command.index("--transport") + 1] = transport
            (on.folder / "serve.log").unlink(missing_ok=True)
            on.run("serve", SERVERS, command, **IN_A_POD, ADDRESS=address, HOSTNAME="digits-servers-0")

        def scale(name: str, machine: int) -> None:
            command = command_of(worker, {"train.py": PROGRAM, "python": sys.executable})
            on.run(name, machine, [*command, str(on.folder)], **IN_A_POD, **plain_values(worker), HOSTNAME=name)

        address = on.network.addresses[SERVERS]
        name_hosts(on.network, {})  # the Service has no Pod yet
        before = probe(on, asked, address)
        scale("w1", FIRST)
        start(address)
        name_hosts(on.network, {"digits": address})
        ready_s = on.wait(lambda: probe(on, asked, address).code == 0, 90, "readiness")
        on.join("w1", 1, 180)
        scale("w2", SECOND)
        scale("w3", THIRD)
        on.join("w2", 1, 180)
        on.join("w3", 1, 180)
        on.train()
        during = probe(on, asked, address)
        server = next(pid for pid in on.network.processes(SERVERS) if "server0" in words_of(pid))
        os.kill(server, signal.SIGSTOP)
        time.sleep(1.5)
        hung = probe(on, asked, address)
        os.kill(server, signal.SIGCONT)
        again_s = on.wait(lambda: probe(on, asked, address).code == 0, 30, "readiness again")
        for name in ("w2", "w3"):  # the Deployment is scaled down
            on.processes[name].terminate()
        codes = {name: on.ends(name, 60) for name in ("w2", "w3")}
        on.train()
        on.processes["serve"].terminate()
        stop_s = on.wait(lambda: on.processes["serve"].poll() is not None, grace_s, "end of serve within its grace")
        codes["serve"] = on.processes["serve"].returncode
        files = sorted(path.name for path in volume.iterdir())
        gone = probe(on, asked, address)
        address = address.rpartition(".")[0] + ".99"  # the new Pod's
        move(on.network, SERVERS, address)
        name_hosts(on.network, {"digits": address})
        begun = time.monotonic()
        start(address)
        on.train(120)
        resumed_s = time.monotonic() - begun
        restored = "continues from its snapshots" in on.said("serve")
        problems, end = on.finish("w1")
        told = on.said("w1").count("has left: it was ended by SIGTERM (process ")
        problems += [unless(told == 2, f"worker 1 was told {told} times that another one was ended by SIGTERM")]
        problems += [unless(restored, on.said("serve")), unless(files == ["server0.pt"], f"volume {files}")]
        problems += [unless(not any(codes.values()), f"exit codes {codes}")]
        probes = {"before": before, "during": during, "hung": hung, "gone": gone}
        wanted = {"before": 1, "during": 0, "hung": 1, "gone": 1}
        problems += [unless({n: p.code for n, p in probes.items()} == wanted, f"probes {probes}")]
        problems += [unless(during.cpu_s < PROBE_S, f"a health check takes {during.cpu_s:.2f} s of CPU time")]
    for name, each in probes.items():
        line = f"  {name}: exit code {each.code}, {each.took_s:.2f} s, {each.cpu_s:.2f} s of CPU time: {each.text}"
        CONSOLE.print(escape(line), style="dim")
    text = f"ready after {ready_s:.1f} s, and {again_s:.1f} s after a server that hung; serve ended {stop_s:.1f} s "
    text += f"after SIGTERM, and the worker trained {resumed_s:.1f} s after its start at another address; {codes}"
    return verdict("kubernetes", problems, f"{text}; {end}")


def words_of(pid: int) -> str:
    """A process's command."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def kubeflow(transport: str) -> bool:
    """Pods of a TrainJob: each is a torchrun of its own, whatever PET_NNODES says."""
    trainer = manifest("kubeflow.yaml", "TrainJob")["spec"]["trainer"]
    command = command_of(trainer, {"train.py": PROGRAM})
    job = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "digits-node-0-0.digits",
        "PET_MASTER_PORT": "29500",
    }
    with stage(transport) as on:
        on.serve()
        name_hosts(on.network, {"digits": on.network.addresses[SERVERS]})

        def start(name: str, index: int) -> None:
            about = {**IN_A_POD, **job, **plain_values(trainer)}
            ranks = {"PET_NODE_RANK": str(index), "JOB_COMPLETION_INDEX": str(index)}
            on.run(name, FIRST + index, [*command, str(on.folder)], **about, **ranks, HOSTNAME=f"digits-node-0-{index}")

        start("pod0", 0)
        start("pod1", 1)
        for name in ("pod0", "pod1"):
            on.join(name, 2, 180)
        others = {told["pid"] for told in on.living("pod1")}
        on.processes["pod0"].terminate()
        evicted = on.ends("pod0", 60)
        on.train()
        start("pod0", 0)
        again_s = on.join("pod0", 2)
        undisturbed = {told["pid"] for told in on.living("pod1")} == others
        problems, end = on.finish("pod0", "pod1")
        problems += [unless(undisturbed, "the other Pod was restarted")]
        problems += [unless(evicted != 0, "an evicted Pod has succeeded, so that the Job would not replace it")]
    text = f"a Pod that was evicted ended with exit code {evicted}; its replacement trained after {again_s:.1f} s"
    return verdict("kubeflow", problems, f"{text}; {end}")


# ---------------------------------------------------------------------- SLURM


def slurm(transport: str) -> bool:
    """Array tasks, and the tasks of a job on two nodes, which a stub of scontrol requeues."""
    with stage(transport) as on:
        on.serve()
        requests = on.folder / "requests"
        stub = on.folder / "scontrol"
        stub.write_text(f'#!/bin/sh\necho "$@" >> {requests}\n')
        stub.chmod(0o755)

        def start(name: str, job: str, task: int, tasks: int, **more: str) -> None:
            about = {
                "SLURM_JOB_ID": job,
                "SLURM_JOB_NAME": "digits-worker",
                "SLURM_NTASKS": str(tasks),
                "SLURM_NTASKS_PER_NODE": "1",
                "SLURM_NNODES": str(tasks),
                "SLURM_NODELIST": "node[1-2]" if tasks > 1 else "node1",
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": str(task),
                **more,
            }
            on.run(name, FIRST + task % 2, [sys.executable, PROGRAM, str(on.folder)], **about, **on.joins())

        array = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
        start("array", "80", 0, 1, **array)
        on.join("array", 1, 180)
        for task in (0, 1):
            start(f"node{task}", "90", task, 2)
        for task in (0, 1):
            on.join(f"node{task}", 1, 180)
        codes, left = {}, 0 if LOOP == "trainer" else 128 + signal.SIGUSR1
        for names in (["array"], ["node0", "node1"]):
            for name in names:
                on.processes[name].send_signal(signal.SIGUSR1)
            codes |= {name: on.ends(name, 60) for name in names}
            if "array" in names:  # SLURM starts it again
                start("array", "80", 0, 1, **array, SLURM_RESTART_COUNT="1")
                again_s = on.join("array", 1)
        asked = requests.read_text().splitlines() if requests.exists() else []
        start("node0", "90", 0, 1, SLURM_RESTART_COUNT="1")  # the range of nodes gives one this time
        on.join("node0", 1)
        counts = [told["engine"].get("SLURM_RESTART_COUNT") for told in on.living("*")]
        problems, end = on.finish("array", "node0")
        problems += [unless(asked == ["requeue 77_3", "requeue 90"], f"scontrol was asked for {asked}")]
        problems += [unless(set(codes.values()) == {left}, f"codes {codes}"), unless(counts == ["1", "1"], f"{counts}")]
    text = f"scontrol was asked for {asked}; a requeued task trained {again_s:.1f} s after its start; {codes}"
    return verdict("slurm", problems, f"{text}; {end}")


PARTS = {part.__name__: part for part in (torchrun, rendezvous, kubernetes, kubeflow, slurm)}


def main() -> int:
    global LOOP
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="the default is all")
    parser.add_argument("--transport", choices=("rpc", "zmq"), default="zmq")
    parser.add_argument("--loop", choices=("trainer", "plain", "fabric"), default=LOOP, help="the default is trainer")
    args = parser.parse_args()
    LOOP = args.loop
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]
    if shutil.which("torchrun", path=str(BINARIES)) is None:
        CONSOLE.print(f"[red]torchrun is missing in {BINARIES}.[/]")
        return 2
    with prepared(machines=True):
        verdicts = [PARTS[part](args.transport) for part in args.only or PARTS]
        return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What ``lightning-asgd doctor`` says about a machine: invented facts in, checks out."""

from __future__ import annotations

import errno
import socket
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_asgd.cli import doctor_command, machine_checks
from lightning_asgd.cli.command_line import main
from lightning_asgd.cli.machine_checks import NOTE, OK, PROBLEM, WARNING, Check
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.job import facts as job_facts
from lightning_asgd.core.job import registry
from lightning_asgd.core.job.rank_variables import RANK_VARIABLES
from lightning_asgd.core.protocol import PROTOCOL

REQUIRED = [
    "torch>=2.6",
    "pytorch-lightning!=2.6.2,!=2.6.3,>=2.5",
    "psutil>=5.9",
    *(f'{name}>={least}; extra == "x"' for name, least in {"pyzmq": 25, "wandb": 0.18, "rich": 13}.items()),
    'matplotlib>=3.8; extra == "report"',
]
GOOD = {"torch": "2.6.0+cpu", "psutil": "6.0", "pytorch-lightning": "2.6.6"}
EITHER = ("pytorch-lightning", "lightning")
MALICIOUS = ("2.6.2", "2.6.3")


def packages(**changes: str | None) -> dict[str, Check]:
    installed = {name: version for name, version in {**GOOD, **changes}.items() if version is not None}
    return {check.name: check for check in machine_checks.check_packages(installed, REQUIRED, EITHER, MALICIOUS)}


def test_what_is_needed_and_what_is_optional() -> None:
    found = packages(wandb="0.17.9")
    assert {name for name, check in found.items() if check.state != OK} == {"wandb"}
    assert found["torch"].text == "2.6.0+cpu, supported (>=2.6)"
    assert found["pyzmq"].text == 'not installed; pip install "pyzmq>=25" adds it'
    assert "lightning" not in found, "one of the two packages is enough"


@pytest.mark.parametrize(
    ("changes", "name", "text", "advice"),
    [
        ({"torch": "2.5.1"}, "torch", "2.5.1 is not supported. Expected >=2.6.", 'pip install "torch>=2.6"'),
        ({"torch": None}, "torch", "not installed", 'pip install "torch>=2.6"'),
        ({"pytorch-lightning": "2.4.0"}, "pytorch-lightning", "2.4.0 is not supported.", "pip install"),
        ({"pytorch-lightning": None}, "pytorch-lightning", "not installed", "pip install"),
        ({"lightning": "2.4.0"}, "lightning", "2.4.0 is not supported.", 'pip install "lightning!=2.6.2'),
        ({"lightning": "2.6.3"}, "lightning", "2.6.3 is a malicious release.", "replace the passwords"),
    ],
)
def test_packages_that_are_refused(changes: dict[str, Any], name: str, text: str, advice: str) -> None:
    check = packages(**changes)[name]
    assert check.state == PROBLEM
    assert text in check.text
    assert advice in check.advice


def test_the_system_and_python() -> None:
    assert machine_checks.check_system("Linux", "linux").state == OK
    assert machine_checks.check_system("Windows", "win32").state == PROBLEM
    assert machine_checks.check_python("3.9.1", ">=3.10").text == "3.9.1 is not supported. Expected >=3.10."


def test_limits_of_containers(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert machine_checks.container_limits(tmp_path, "") == (None, None)
    write("cpu.max", "max 100000\n")
    write("slice/cpu.max", "150000 100000\n")
    write("slice/memory.max", "4000000000\n")
    write("slice/job/memory.max", "max\n")
    assert machine_checks.container_limits(tmp_path, "0::/slice/job\n") == (1.5, 4e9)
    write("memory/memory.limit_in_bytes", "2000000000\n")  # the group's folder is not to be seen from a container
    write("cpu/cpu.cfs_quota_us", "-1\n")
    write("cpu/cpu.cfs_period_us", "100000\n")
    assert machine_checks.container_limits(tmp_path, "4:memory:/docker/1\n3:cpu:/docker/1\n") == (None, 2e9)


def test_the_machine() -> None:
    assert machine_checks.check_cores(8, 4, 1.5).text == "8, 4 for this process, 1.5 by the container's limit"
    assert machine_checks.check_memory(64e9, 32e9, 16e9).text.startswith("64 GB, 16 GB by the container's limit")
    assert machine_checks.check_memory(64e9, 32e9, 1e9).state == WARNING
    assert machine_checks.check_accelerator("cuda", ["H100", "H100"]).text == "2 cuda: H100, H100"
    assert machine_checks.check_accelerator("", []).state == OK
    mps = machine_checks.check_accelerator("mps", ["mps"])
    assert (mps.state, "lightning-asgd serve" in mps.advice) == (PROBLEM, True)
    assert [check.state for check in machine_checks.check_shared_memory(True, 1e9)] == [OK, OK]
    assert [check.state for check in machine_checks.check_shared_memory(False, 64e6)] == [WARNING, WARNING]
    assert machine_checks.check_shared_memory(True, None)[1].text == "is not there"
    assert [machine_checks.check_open_files(1024, hard).state for hard in (-1, 256, 4096)] == [OK, WARNING, OK]
    years = [machine_checks.check_clock(datetime(year, 1, 1, tzinfo=timezone.utc)) for year in (1970, 2030)]
    assert [check.state for check in years] == [WARNING, OK]


@pytest.mark.parametrize(
    ("given", "needed", "state", "text"),
    [
        (None, False, OK, "not set"),
        (None, True, PROBLEM, "not set: other machines cannot find node 0."),
        ("first", True, OK, "first is 10.0.0.1, this machine"),
        ("10.0.0.2", True, OK, "10.0.0.2, another machine"),
        ("localhost", True, PROBLEM, "localhost is 127.0.0.1, which no other machine can reach"),
        ("localhost", False, OK, "localhost is 127.0.0.1, on this machine only"),
        ("lost", True, PROBLEM, "lost cannot be resolved: unknown"),
    ],
)
def test_the_address_of_the_first_machine(given: str | None, needed: bool, state: str, text: str) -> None:
    def resolve(host: str) -> str:
        if host == "lost":
            raise OSError("unknown")
        return {"first": "10.0.0.1", "localhost": "127.0.0.1"}.get(host, host)

    check = machine_checks.check_master_address(given, {"10.0.0.1"}, resolve, needed=needed)
    assert (check.state, check.text) == (state, text)
    assert bool(check.advice) == (state == PROBLEM)


@pytest.mark.parametrize(
    ("error", "by_agent", "state", "text"),
    [
        (None, False, OK, "80 is free"),
        (errno.EACCES, False, PROBLEM, "this user may not listen on port 80: no."),
        (errno.EADDRINUSE, False, PROBLEM, "80 is taken by sshd, process 7."),
        (errno.EADDRINUSE, True, OK, "80 is taken by sshd, process 7; torchrun's agent is expected there"),
        (errno.EADDRNOTAVAIL, False, PROBLEM, "80 cannot be listened on: no."),
    ],
)
def test_the_port_of_the_first_machine(error: int | None, by_agent: bool, state: str, text: str) -> None:
    raised = None if error is None else OSError(error, "no")
    check = machine_checks.check_free_port(80, lambda _: raised, lambda _: "sshd, process 7", by_agent=by_agent)
    assert (check.state, check.text) == (state, text)


def test_interfaces() -> None:
    assert machine_checks.check_interfaces({}, []).state == PROBLEM
    found = machine_checks.check_interfaces({"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "ib0": []}, ["lo"])
    assert found.text == "lo 127.0.0.1; eth0 10.0.0.1 (down)"


def test_a_taken_port_and_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = doctor_command._bind("127.0.0.1", port)
        assert error is not None
        assert error.errno == errno.EADDRINUSE
        assert doctor_command._holder(port).endswith(f"process {psutil.Process().pid}")
    assert doctor_command._bind("127.0.0.1", 0) is None


def test_secrets_are_never_shown_and_values_only_if_asked_for() -> None:
    environment = {
        "RANK": "3",
        "LIGHTNING_ASGD_SECRET": "hidden",
        "LIGHTNING_ASGD_OWN_SECRET": "hidden",
        "SLURM_NNODES": "2",
    }
    shown = {check.name: check.text for check in machine_checks.settings(environment, values=True)}
    assert shown["ranks"] == "RANK=3"
    assert shown["SLURM"] == "SLURM_NNODES=2"
    assert shown["LIGHTNING_ASGD_*"] == "LIGHTNING_ASGD_OWN_SECRET (set) LIGHTNING_ASGD_SECRET (set)"
    names = {check.name: check.text for check in machine_checks.settings(environment, values=False)}
    assert (names["ranks"], names["SLURM"], names["torchrun"]) == ("RANK", "SLURM_NNODES", "none")
    by_hand = machine_checks.settings({"RANK": "3", "LOCAL_RANK": "0"}, values=True)[-1]
    assert by_hand.state == WARNING
    assert by_hand.advice.endswith("unset RANK LOCAL_RANK.")


@pytest.mark.parametrize(
    ("environment", "machines"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}, 4),
        ({"WORLD_SIZE": "8"}, 1),
        ({"SLURM_NNODES": "3"}, 3),
        ({"NODE_RANK": "1"}, 2),
        ({"NNODES": "1:4", "WORLD_SIZE": "x"}, 1),
    ],
)
def test_the_number_of_machines(environment: dict[str, str], machines: int) -> None:
    assert machine_checks.number_of_machines(environment) == machines


def test_an_error_is_split_into_what_is_and_what_to_do() -> None:
    error = ConfigurationError("nsync=0. Expected a number. Pass one.")
    assert machine_checks.refused("n", error) == Check("n", PROBLEM, "nsync=0.", "Expected a number. Pass one.")
    assert machine_checks.refused("n", ConfigurationError("No."), NOTE) == Check("n", NOTE, "No.", "")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT", SECRET_ENV, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_command(plain: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain.setenv("LIGHTNING_ASGD_SECRET", "known to all machines")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith(" ")] == [
        *("Versions", "Machine", "Devices", "Network", "Transport", "Environment"),
        "No problems for a job on one machine with transport='auto'",
    ]
    assert "LIGHTNING_ASGD_SECRET is long enough" in " ".join(shown.split())
    for text in ("pytorch-lightning", "compatible", "CPU cores", "be started", "zmq (LIGHTNING_ASGD_SECRET is set)"):
        assert text in shown
    assert "known to all" not in shown


def test_several_machines_with_zmq_and_no_secret(plain: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain.setattr(doctor_command, "_versions", lambda: iter(()))  # takes seconds
    assert main(["doctor", "--num-nodes", "2", "--transport", "zmq"]) == 1
    end = capsys.readouterr().out.partition("Problems for ")[2].split()
    said = " ".join(end)
    assert said.startswith("a job on 2 machines with transport='zmq' problem MASTER_ADDR: not set")
    assert "MASTER_PORT is not set. Expected MASTER_ADDR and MASTER_PORT to be the same on every machine" in said
    assert "LIGHTNING_ASGD_SECRET is not set. Expected the same secret" in said
    assert said.count("openssl rand") == 1


def test_how_to_make_a_secret_is_said_once(plain: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain.setattr(doctor_command, "_versions", lambda: iter(()))
    assert main(["doctor", "--num-nodes", "2"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("openssl rand") == 1
    assert "Expected the same secret of at least 16 characters on all machines. See above." in said


@pytest.mark.parametrize("secret", ["known to all machines", None], ids=["zmq", "rpc"])
def test_what_two_machines_disagree_about(
    plain: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], secret: str | None
) -> None:
    plain.setattr(doctor_command, "_versions", lambda: iter(()))
    if secret is not None:
        plain.setenv(SECRET_ENV, secret)
    host = registry.kind_of("rpc" if secret is None else "zmq").host_rendezvous
    with host("127.0.0.1", 0) as job:
        job_facts.publish_facts(job, num_nodes=3, workers=6)
        job.put(job_facts.FACTS_KEY, {**job.peek(job_facts.FACTS_KEY, dict), "protocol": 1, "torch": "0.1"})
        address = f"127.0.0.1:{job.address[1]}"
        assert main(["doctor", "--job", address, "--num-nodes", "2"]) == 1
        shown = capsys.readouterr().out
        about, end = shown.partition("Machine")[0], " ".join(shown.partition("Problems for ")[2].split())
        assert about.startswith("Job\n")
        assert "clock there" in about
        assert ("behind this one" in about or "ahead of this one" in about) is (secret is not None)
        assert f"protocol: {PROTOCOL} here, 1 there. Install the same version" in end
        assert "num_nodes: num_nodes=2 here, num_nodes=3 and 6 workers there. Pass the same" in end
        assert "0.1 there" in end
        plain.setenv(SECRET_ENV, "another one than there")
        begun = time.monotonic()
        assert main(["doctor", "--job", address]) == 1
        took, end = time.monotonic() - begun, " ".join(capsys.readouterr().out.partition("Problems for ")[2].split())
    assert "job: " in end
    assert SECRET_ENV in end
    assert took < 30, took
    assert main(["doctor", "--job", "nowhere"]) == 1
    assert "--job 'nowhere'. Expected" in capsys.readouterr().err


def test_lightning_without_a_name_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_asgd.core.lightning import name_check, private_names
    from lightning_asgd.core.lightning.class_trees import TREES

    def lacking(tree: Any, warn: Any) -> None:
        raise ConfigurationError("It lacks `x`. Install another.")

    monkeypatch.setattr(name_check, "check_tree", lacking)
    good = Check("pytorch-lightning", OK, "2.6.6")
    assert doctor_command._with_names(good, TREES[0]).state == PROBLEM
    monkeypatch.setattr(name_check, "check_tree", lambda tree, warn: warn("no bars"))
    assert doctor_command._with_names(good, TREES[0])[1:3] == (WARNING, "no bars")
    monkeypatch.setattr(private_names, "LATEST", "2.5.1")
    assert "is newer than 2.5.1, the latest that was tested" in doctor_command._with_names(good, TREES[0]).text
    monkeypatch.setitem(sys.modules, TREES[0].package, None)
    assert "cannot be imported" in doctor_command._with_names(good, TREES[0]).text


def test_a_broken_installation_is_described_too(plain: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain.setattr(doctor_command, "_versions", lambda: iter(()))
    plain.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "devices: cannot be examined further: ModuleNotFoundError" in shown
    assert "Environment" in shown

"""A shell may hold variables of another job, which say that this process is one of its workers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from pytorch_lightning import Trainer
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from lightning_asgd import ASGDStrategy
from lightning_asgd.core.foundation.environment import RUN_ENV, TRANSPORT_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError, LaunchError
from lightning_asgd.core.job import rank_variables
from lightning_asgd.core.job.rank_variables import RANK_VARIABLES
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.lightning.class_trees import TREES
from lightning_asgd.core.lightning.launchers import ScriptLauncher, surroundings_of
from lightning_asgd.loops.async_sgd import surroundings

OTHERS = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
NAMES = (*RANK_VARIABLES, *OTHERS, rank_variables.OWNER_ENV, RUN_ENV)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def check(monkeypatch: pytest.MonkeyPatch, devices: int = 2, environment: Any = None, **variables: str) -> None:
    """What a Trainer checks before it starts anything, with variables set."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = environment or LightningEnvironment()
    environment.set_world_size(devices)
    environment.set_global_rank(environment.node_rank() * devices + environment.local_rank())
    launcher = TREES[0].derive(ScriptLauncher, "ScriptLauncher")
    launcher(cast(Any, None), environment, devices, 1)._check(surroundings_of(environment, 1))


@pytest.mark.parametrize("more", [{}, {"RANK": "1", "WORLD_SIZE": "4"}])
def test_a_rank_without_a_place_to_meet_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, more: Any) -> None:
    found = ", ".join(f"{name}={value}" for name, value in {**more, "LOCAL_RANK": "1"}.items() if name == "RANK")
    with pytest.raises(LaunchError, match=rf"The environment has {found}.*LOCAL_RANK=1.* expects 2 processes"):
        check(monkeypatch, LOCAL_RANK="1", **more)


@pytest.mark.parametrize("name", ["NODE_RANK", "GROUP_RANK"])
def test_a_rank_beyond_the_workers_names_where_it_is_from(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"has rank 2, .* The environment has {name}=1: unset"):
        check(monkeypatch, **{name: "1"})


def test_processes_that_can_meet_are_told_what_they_are_taken_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "pytorch_lightning.utilities.rank_zero"):
        check(monkeypatch, LOCAL_RANK="0", MASTER_PORT="29500")
    said = "The environment has LOCAL_RANK=0, MASTER_PORT=29500, so Lightning starts no workers here. 2 have to join."
    assert said in caplog.messages


def test_a_shell_in_an_allocation_is_told_that_srun_starts_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "2")
    for name in ("PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    for step, said in ({"SLURM_STEP_ID": "0"}, []), ({}, ["SLURM_NTASKS=2 is set, but srun has not started"]):
        monkeypatch.delenv("SLURM_STEP_ID", raising=False)
        with caplog.at_level("INFO", "pytorch_lightning.utilities.rank_zero"):
            check(monkeypatch, environment=SLURMEnvironment(), **step)
        assert [message[:47] for message in caplog.messages] == said


@pytest.mark.parametrize("variables", [{}, {"LOCAL_RANK": "0"}, {"RANK": "1", "WORLD_SIZE": "4"}, {"MASTER_PORT": "1"}])
def test_what_starts_no_wait_is_no_error(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    check(monkeypatch, devices=1 if "LOCAL_RANK" in variables else 2, **variables)


class Given(LightningEnvironment):
    """An environment of another library's, which knows its own place to meet."""


def test_processes_that_meet_elsewhere_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, environment=Given(), LOCAL_RANK="1")
    check(monkeypatch, LOCAL_RANK="1", STANDALONE_PORT="29500")


def test_the_size_of_an_environments_own_world_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Given()
    environment.set_world_size(2)
    environment.set_global_rank(1)
    launcher = TREES[0].derive(ScriptLauncher, "ScriptLauncher")
    launcher(cast(Any, None), environment, 1, 1)._check(surroundings_of(environment, 1))


def test_torchrun_in_an_allocation_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO", "pytorch_lightning.utilities.rank_zero"):
        check(monkeypatch, environment=TorchElasticEnvironment(), SLURM_NTASKS="1")
    assert caplog.messages == []


def test_a_run_that_is_not_there_is_reported_with_the_variable_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_ENV, "127.0.0.1:9/run")
    with pytest.raises(LaunchError, match=f"`lightning-asgd serve` for 127.0.0.1:9, which {RUN_ENV} names"):
        Rendezvous.find_run("127.0.0.1", 9, 0.2)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "one"}, "The environment has RANK='one'. Expected a whole number of at least 0"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "has WORLD_SIZE='0'. Expected a whole number of at least 1"),
        ({"RANK": "0", "LOCAL_RANK": ""}, "has LOCAL_RANK=''. Expected"),
        ({"RANK": "1"}, "has RANK=1. Expected RANK below WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "has RANK=2, WORLD_SIZE=2. Expected RANK below WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "has WORLD_SIZE=4. Expected RANK below WORLD_SIZE"),
    ],
)
def test_a_plain_loop_names_the_variable_that_it_cannot_use(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=said):
        surroundings()


@pytest.mark.parametrize("name", ["NODE_RANK", "GROUP_RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["", "x", "1.5"])
def test_a_variable_that_lightning_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"The environment has {name}='{value}'. Expected a whole number"):
        Trainer(strategy=ASGDStrategy(), accelerator="cpu", devices=2, logger=False)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_LOCALID", "STANDALONE_PORT", "MASTER_PORT", "PL_GLOBAL_SEED"])
def test_a_variable_that_nothing_reads_may_hold_anything(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "tcp://10.0.0.1:23456")  # as Kubernetes sets for a service of that name
    Trainer(strategy=ASGDStrategy(), accelerator="cpu", devices=2, logger=False)
    if name != "WORLD_SIZE":
        assert surroundings().world_size == 1


def test_a_run_of_torchrun_without_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "its")
    with pytest.raises(ConfigurationError, match="has TORCHELASTIC_RUN_ID='its', but lacks LOCAL_RANK"):
        Trainer(strategy=ASGDStrategy(), accelerator="cpu", devices=2, logger=False)
    lightning = LightningEnvironment()  # which does not look at it
    Trainer(strategy=ASGDStrategy(), accelerator="cpu", devices=2, logger=False, plugins=[lightning])


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({RUN_ENV: "garbage"}, f"The environment has {RUN_ENV}='garbage'. Expected \"host:port/name\""),
        ({RUN_ENV: "127.0.0.1:29400"}, f"The environment has {RUN_ENV}='127.0.0.1:29400'. Expected \"host:port/name\""),
        ({TRANSPORT_ENV: "pigeons"}, f"The environment has {TRANSPORT_ENV}='pigeons'. Expected 'rpc'"),
    ],
)
def test_what_names_a_run_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in {RUN_ENV: "127.0.0.1:29400/run", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=said):
        ASGDStrategy()


@pytest.mark.parametrize("name", [rank_variables.OWNER_ENV, rank_variables.RENDEZVOUS_ENV])
@pytest.mark.parametrize("value", ["{", "[]", "{}", '{"address": null}'])
def test_notes_that_this_package_has_not_written_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setattr(rank_variables, "_is_helper", lambda: False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"The environment has {name}=.*has not written. Unset it"):
        rank_variables.detect()


def test_fewer_processes_than_the_trainers_workers_are_refused_before_anything_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(monkeypatch, LOCAL_RANK="0", WORLD_SIZE=" 2", MASTER_PORT="29500")
    check(monkeypatch, LOCAL_RANK="0", WORLD_SIZE="4", MASTER_PORT="29500")  # a Trainer on the first ranks only
    with pytest.raises(ConfigurationError, match=r"has LOCAL_RANK=0, WORLD_SIZE=1, .*but the Trainer has 2 workers"):
        check(monkeypatch, LOCAL_RANK="0", WORLD_SIZE="1", MASTER_PORT="29500")


def test_a_plain_loop_that_srun_starts_several_times_is_told_that_it_is_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}.items():  # salloc's shell
        monkeypatch.setenv(name, value)
    assert surroundings().world_size == 1
    assert not caplog.text
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert surroundings().world_size == 1
    assert "SLURM_STEP_NUM_TASKS=4 is set, but RANK is not: each process trains alone" in caplog.text


def test_a_plain_loop_in_a_trainers_worker_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with rank_variables.owning():
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert surroundings().world_size == 1

"""Manifests for Kubernetes, scripts for SLURM: their parts belong together, and the commands that they give exist."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_asgd.cli.command_line import COMMANDS
from lightning_asgd.core.job import supervisor
from lightning_asgd.elastic.health import health
from tests.helpers import pages
from tests.test_docs import check_command, commands

EXAMPLES = pages.ROOT / "examples"
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
SCRIPTS = sorted((EXAMPLES / "slurm").glob("*.sh"))
BY_KUBERNETES = {"JOB_COMPLETION_INDEX"}  # variables that it sets
OF_THE_SUBMITTER = {"SERVER"}


def documents(manifest: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest.read_text()))


def pods(manifest: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The labels and the spec of every Pod that a manifest makes."""
    for document in documents(manifest):
        name, spec = document["metadata"]["name"], document["spec"]
        if document["kind"] == "Pod":
            yield document["metadata"]["labels"], spec
        elif document["kind"] in ("Job", "Deployment", "StatefulSet"):
            given = spec["template"].get("metadata", {}).get("labels", {})
            yield ({"job-name": name} if document["kind"] == "Job" else {}) | given, spec["template"]["spec"]


def containers(manifest: Path) -> Iterator[dict[str, Any]]:
    """Every container with a command, of Pods and of TrainJobs."""
    for _, spec in pods(manifest):
        yield from (container for container in spec["containers"] if "command" in container)
    yield from (document["spec"]["trainer"] for document in documents(manifest) if document["kind"] == "TrainJob")


def check_arguments(words: list[str]) -> None:
    """Raise AssertionError unless the options of our commands and examples exist."""
    options = [word.lstrip("-").partition("=")[0] for word in words if word.startswith("--")]
    if words[0] == "lightning-asgd":
        known = {name.replace("_", "-") for name in inspect.signature(COMMANDS[words[1]]).parameters}
        assert set(options) <= known, words
    elif words[0] == "python" and words[1] != "train.py":
        text = (pages.ROOT / words[1]).read_text()
        assert all(f'"--{option}"' in text for option in options), words


def check_script(script: str) -> None:
    for words in commands(script):
        meant = words[1:] if words[0] == "exec" else words
        check_command(meant)
        check_arguments(meant[1:] if meant[0] == "srun" else meant)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=pages.name_of)
def test_containers_run_commands_that_exist_with_variables_that_are_set(manifest: Path) -> None:
    found = list(containers(manifest))
    assert found
    for container in found:
        words = [*container["command"], *container.get("args", ())]
        script = " ".join(words)
        if words[:2] == ["sh", "-c"]:
            check_script(words[2])
        else:
            check_command(words)
            check_arguments(words)
        used = set(re.findall(r"\$\(?([A-Z_]+)", script))
        assert used <= {variable["name"] for variable in container["env"]} | BY_KUBERNETES
        assert "LIGHTNING_ASGD_SECRET" in {variable["name"] for variable in container["env"]}


def test_probes_ask_the_servers_at_the_port_where_they_serve() -> None:
    ((_, spec),) = pods(EXAMPLES / "kubernetes" / "servers.yaml")
    (container,) = spec["containers"]
    port = container["args"][0].partition("/")[0].rpartition(":")[2]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]
        *shell, script = probe["exec"]["command"]
        assert shell == ["sh", "-c"]
        check_script(script)
        assert script == f'exec lightning-asgd health "$ADDRESS:{port}"'
        assert probe["timeoutSeconds"] > inspect.signature(health).parameters["timeout_s"].default + 1
    assert spec["terminationGracePeriodSeconds"] > supervisor._WRITE_S
    (mount,) = container["volumeMounts"]
    assert container["args"][container["args"].index("--snapshots") + 1] == mount["mountPath"]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=pages.name_of)
def test_manifests_are_valid(manifest: Path) -> None:
    """By the schemas of Kubernetes and the API of Kubeflow Trainer, where these packages are installed."""
    for document in documents(manifest):
        check_valid(document)


def check_valid(document: dict[str, Any]) -> None:
    if document["apiVersion"].startswith("trainer.kubeflow.org/"):
        models = pytest.importorskip("kubeflow_trainer_api.models")
        assert getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(document).to_dict() == document
        return
    schemas = pytest.importorskip("kubernetes_validate", reason="not installed: pip install 'kubernetes-validate'")
    schemas.validate(document, schemas.latest_version(), strict=True)


def test_a_mistake_in_a_manifest_is_noticed() -> None:
    pytest.importorskip("kubernetes_validate", reason="not installed: pip install 'kubernetes-validate'")
    service, _ = documents(EXAMPLES / "kubernetes" / "servers.yaml")
    service["spec"]["clusterIp"] = service["spec"].pop("clusterIP")
    with pytest.raises(importlib.import_module("kubernetes_validate").ValidationError):
        check_valid(service)


def test_a_mistake_in_a_training_runtime_is_noticed() -> None:
    pytest.importorskip("kubeflow_trainer_api")
    runtime, _ = documents(EXAMPLES / "kubernetes" / "kubeflow.yaml")
    runtime["spec"]["mlPolicy"]["numnodes"] = runtime["spec"]["mlPolicy"].pop("numNodes")
    with pytest.raises((AssertionError, ValueError)):
        check_valid(runtime)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=pages.name_of)
def test_services_and_deployments_select_pods_that_are_there(manifest: Path) -> None:
    labels = [labels for labels, _ in pods(manifest)]
    for document in documents(manifest):
        selector = document["spec"].get("selector")
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= each.items() for each in labels), document["metadata"]["name"]


def test_the_first_pod_of_the_job_is_found_by_the_name_that_all_are_told() -> None:
    service, job = documents(EXAMPLES / "kubernetes" / "job.yaml")
    ((_, spec),) = pods(EXAMPLES / "kubernetes" / "job.yaml")
    (container,) = spec["containers"]
    address = next(variable["value"] for variable in container["env"] if variable["name"] == "MASTER_ADDR")
    assert address == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert spec["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]


@pytest.mark.parametrize("script", SCRIPTS, ids=pages.name_of)
def test_scripts_for_slurm_give_commands_that_exist(script: Path) -> None:
    text = script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    check_script(text)
    assert set(re.findall(r"\$([A-Z_]+)", text)) <= OF_THE_SUBMITTER
    header = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert header
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in header)


@pytest.mark.parametrize("command", ["lightning-asgd serve --prt 1", "srun python examples/spot_worker.py --srever x"])
def test_an_argument_that_does_not_exist_is_noticed(command: str) -> None:
    with pytest.raises(AssertionError):
        check_script(command)


def test_the_pages_show_every_file() -> None:
    shown = re.findall(r"^```\{literalinclude\} (\S+)$", "".join(p.read_text() for p in pages.PAGES), re.MULTILINE)
    files = {(pages.DOCS / "tutorials" / path).resolve() for path in shown}
    assert set(MANIFESTS) | set(SCRIPTS) <= files

"""What the driver keeps of a run on a Ray cluster, and the storage, without a cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.ray import ASGDTrainer, get_checkpoint, report_metrics, run_members
from lightning_asgd.ray.actors import Board
from lightning_asgd.ray.reports import Storage


def filled(losses: list[float], keep: int | None, *score: str) -> tuple[Board, list[str]]:
    board, dropped = Board(keep, *(score or (None, "max")), []), []
    for loss in losses:
        dropped += board.add({"loss": loss}, board.next_checkpoint())
    return board, dropped


def test_all_checkpoints_are_kept_without_a_limit() -> None:
    board, dropped = filled([3, 2, 1], None)
    assert dropped == []
    assert [path for _, path in board.reports()] == [f"checkpoint_00000{n}" for n in range(3)]


def test_the_latest_checkpoints_are_kept_without_a_score() -> None:
    board, dropped = filled([3, 2, 1], 2)
    assert dropped == ["checkpoint_000000"]
    assert board.latest() == "checkpoint_000002"


def test_the_best_checkpoints_are_kept_and_always_the_latest() -> None:
    board, dropped = filled([1, 3, 2, 4], 2, "loss", "min")
    assert dropped == ["checkpoint_000001", "checkpoint_000002"]
    assert [path for _, path in board.reports() if path] == ["checkpoint_000000", "checkpoint_000003"]


def test_a_report_without_the_score_is_the_worst() -> None:
    board, _ = filled([1], 1, "accuracy", "max")
    board.add({"accuracy": 0.5}, board.next_checkpoint())
    assert board.add({"accuracy": 0.1}, board.next_checkpoint()) == ["checkpoint_000001"]


def test_metrics_need_no_checkpoint() -> None:
    board, _ = filled([1], 1)
    assert board.add({"loss": 0.5}, None) == []
    assert board.reports() == [({"loss": 1}, "checkpoint_000000"), ({"loss": 0.5}, None)]


def test_checkpoints_are_numbered_after_those_that_were_there(tmp_path: Path) -> None:
    storage = Storage.of(str(tmp_path), "run")
    assert storage.create() == []
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "checkpoint.ckpt").write_text("weights")
    storage.upload(str(tmp_path / "files"), "checkpoint_000007")
    (tmp_path / "run" / "checkpoint_of_mine").mkdir()
    (tmp_path / "run" / "checkpoint_000008").mkdir()  # its upload was interrupted
    board = Board(None, None, "max", storage.create())
    assert (board.latest(), board.next_checkpoint()) == ("checkpoint_000007", "checkpoint_000008")
    with storage.checkpoint("checkpoint_000007").as_directory() as folder:
        assert (Path(folder) / "checkpoint.ckpt").read_text() == "weights"
    storage.remove("checkpoint_000007")
    assert storage.create() == []


def test_storage_that_a_node_does_not_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"storage that all nodes share.*s3://"):
        Storage.of(str(tmp_path), "run").upload(str(tmp_path), "checkpoint_000000")


def test_a_worker_that_is_to_end_or_comes_after_the_end_does_not_train() -> None:
    board = Board(None, None, "max", [])
    assert not board.begin(0, ("node", 1, "a"))
    board.stop(0)
    assert board.is_stopping(0)
    assert board.begin(0, ("node", 2, "b"))
    assert not board.begin(1, ("node", 3, "c"))
    board.end()
    assert board.begin(1, ("other", 4, "d"))
    assert board.places() == {0: ("node", 2, "b"), 1: ("other", 4, "d")}


@pytest.mark.parametrize("function", [lambda: report_metrics({}), get_checkpoint])
def test_reports_outside_of_a_run_are_refused(function: object) -> None:
    with pytest.raises(ConfigurationError, match="Expected a training function of ASGDTrainer"):
        function()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("about", "error"),
    [
        ({"num_servers": 0}, "num_servers"),
        ({"transport": "tcp"}, "transport='tcp'"),
        ({"workers": 0}, "Expected at least one worker"),
        ({"max_restarts": -2}, "max_restarts"),
        ({"place_s": 0}, "place_s"),
    ],
)
def test_arguments_out_of_range_are_refused(about: dict[str, object], error: str) -> None:
    scaling = ScalingConfig(num_workers=about.pop("workers", 1))
    with pytest.raises(ConfigurationError, match=error):
        ASGDTrainer(lambda: None, scaling_config=scaling, **about)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({}, {"CPU": 1}),
        ({"use_gpu": True}, {"CPU": 1, "GPU": 1}),
        ({"use_gpu": True, "resources_per_worker": {"CPU": 4}}, {"CPU": 4, "GPU": 1}),
        ({"resources_per_worker": {"CPU": 0, "disk": 2}}, {"disk": 2}),
        ({"accelerator_type": "A100"}, {"CPU": 1, "accelerator_type:A100": 0.001}),
    ],
)
def test_a_worker_gets_what_ray_train_would_give_it(about: dict[str, Any], expected: dict[str, float]) -> None:
    trainer = ASGDTrainer(lambda: None, scaling_config=ScalingConfig(**about))
    assert trainer._plan.resources_per_worker == expected


def test_a_score_that_is_no_number_is_the_worst() -> None:
    _, dropped = filled([1.0, float("nan"), 2.0], 2, "loss", "min")
    assert dropped == ["checkpoint_000001"]


@pytest.mark.parametrize(
    ("scaling", "run", "name"),
    [
        ({"label_selector": {"zone": "a"}}, {}, "label_selector"),
        ({}, {"failure_config": FailureConfig(max_failures=3)}, "failure_config"),
    ],
)
def test_what_would_be_ignored_is_refused(scaling: dict[str, Any], run: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name}\) was given.*Expected none"):
        ASGDTrainer(lambda: None, scaling_config=ScalingConfig(**scaling), run_config=RunConfig(**run))


def test_a_server_that_does_not_answer_for_long_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times, answers = iter([0.0, 10.0, 31.0, 60.0, 600.0]), iter([["ref"], [], [], [], []])
    found = {"wait": lambda refs, timeout: (next(answers), []), "get": lambda ref: None}
    monkeypatch.setattr(run_members, "ray", SimpleNamespace(**found))
    monkeypatch.setattr(run_members, "time", SimpleNamespace(monotonic=lambda: next(times)))
    server = run_members.RunServer(3, SimpleNamespace(check=SimpleNamespace(remote=lambda: "ref")))
    for _ in range(5):
        server.check()
    assert [each.message[:40] for each in caplog.records] == ["Server 3 has not answered for 30 s. Ray "]

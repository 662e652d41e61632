"""What a fit says when it starts and when it ends."""

from __future__ import annotations

import pytest
import torch

from lightning_asgd import Advanced
from lightning_asgd.algorithms import ASGD, SparseLoCo
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.protocol import WorkerMetrics
from lightning_asgd.monitor.fit_summary import FitSummary
from lightning_asgd.programs.fit_messages import exchanges, rate_advice, start_line


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nsync": 10}, "nsync=10"),
        ({"nsync": "auto"}, "nsync=auto"),
        ({"nsync": "restarted", "algorithm": "local_sgd"}, "nsync=11, LocalSGD"),
        ({"nsync": 10, "advanced": Advanced(nfetch=4)}, "nfetch=4, npush=10"),
        ({"nsync": 5, "algorithm": "easgd"}, "nsync=5, EASGD"),
    ],
)
def test_the_period_and_an_algorithm_that_was_chosen(settings: dict[str, object], said: str) -> None:
    given = 11 if settings["nsync"] == "restarted" else 0
    assert exchanges(ExchangeConfig.create(**settings), given) == said  # type: ignore[arg-type]


def test_the_lines_at_the_start() -> None:
    what = ["nsync=10", "data shared dynamically"]
    assert start_line(2, 1, "rpc (one machine)", what, "logs/version_3") == (
        "A-SGD: 2 workers, 1 server, transport rpc (one machine).\n"
        "  nsync=10, data shared dynamically, logs in logs/version_3."
    )
    assert start_line(1, 2, "zmq (as given)", ["nsync=10"], None) == (
        "A-SGD: 1 worker, 2 servers, transport zmq (as given).\n  nsync=10."
    )


def figures(*speeds: float, seconds: float = 10.0) -> dict[int, WorkerMetrics]:
    """Metrics of workers that have trained at these speeds in samples per second."""
    return {
        worker: WorkerMetrics(
            at_s=seconds,
            samples=round(speed * seconds),
            pushes=4,
            staleness_sum=6.0,
            staleness_max=2 + worker,
            exchange_wait_s=0.5,
            data_wait_s=0.25,
        )
        for worker, speed in enumerate(speeds)
    }


def test_the_summary_of_two_workers() -> None:
    summary = FitSummary(2, 10.0, figures(1650.0, 454.0), ExchangeStats(), 0, 3.0, "my logs/version_3")
    assert str(summary).splitlines() == [
        "A-SGD: 2 workers trained for 10.0 s.",
        "  2,104 samples/s together. By worker: 1,650, 454.",
        "  Staleness: 1.5 on average, 3 at most. Waiting: 5.0%, between batches: 2.5%.",
        "  Report: lightning-asgd report 'my logs/version_3'",
    ]


def test_a_worker_that_was_lost_counts_for_what_it_has_trained() -> None:
    known = {**figures(100.0), 1: figures(0.0, 100.0, seconds=5.0)[1]}
    stats = ExchangeStats(lost_workers={1: "it raised KeyError\nTraceback\n..."}, servers_replaced=1)
    assert str(FitSummary(2, 10.0, known, stats, 0, 0.0, None)).splitlines() == [
        "A-SGD: 2 workers trained for 10.0 s.",
        "  150 samples/s together. By worker: 100, 100.",
        "  Staleness: 1.5 on average, 3 at most. Waiting: 6.7%, between batches: 3.3%.",
        "  1 lost server was replaced.",
        "  1 of 2 workers were lost during this fit:",
        "  worker 1: it raised KeyError",
    ]


def test_without_a_monitor_it_is_about_the_chief() -> None:
    stats = ExchangeStats(pushes=2, staleness_sum=3.0, staleness_max=2)
    assert str(FitSummary(2, 3725.0, {}, stats, 0, 75.0, None)).splitlines() == [
        "A-SGD: 2 workers trained for 1 h 2 min 5 s.",
        "  Worker 0: staleness 1.5 on average, 2 at most; waited for 1 min 15 s.",
    ]
    nothing = FitSummary(1, 0.0, {}, ExchangeStats(), 0, 0.0, None)
    assert str(nothing).splitlines()[1:] == ["  Worker 0: waited for 0.0 s."]


def test_a_worker_alone_and_one_that_has_trained_nothing() -> None:
    assert (
        str(FitSummary(1, 10.0, figures(6.4), ExchangeStats(), 0, 0.0, None)).splitlines()[1]
        == "  Speed: 6.4 samples/s."
    )
    nothing = FitSummary(2, 0.0, {0: WorkerMetrics(), 1: WorkerMetrics()}, ExchangeStats(), 0, 0.0, None)
    assert str(nothing) == "A-SGD: 2 workers trained for 0.0 s."


def test_the_summary_of_a_hundred_workers_fits_a_terminal() -> None:
    lost = {worker: f"it missed its heartbeats and has not rejoined ({worker * 100})" for worker in range(1, 60)}
    stats = ExchangeStats(lost_workers=lost, servers_replaced=2)
    known = figures(*(1000.0 + worker for worker in range(100)))
    lines = str(FitSummary(100, 10.0, known, stats, 0, 0.0, "lightning_logs/version_3")).splitlines()
    assert lines[1] == "  104,950 samples/s together. By worker: 1,000 (worker 0) to 1,099 (worker 99)."
    assert lines[3:7] == [
        "  2 lost servers were replaced.",
        "  59 of 100 workers were lost during this fit:",
        "  worker 1: it missed its heartbeats and has not rejoined (100)",
        "  worker 2: it missed its heartbeats and has not rejoined (200)",
    ]
    assert lines[7].startswith("  57 others, in trainer.strategy.stats.lost_workers: 3, 4, 5, ")
    assert lines[7].endswith("…")
    assert len(lines) == 9
    assert max(map(len, lines)) <= 80


def test_eight_workers_are_listed_if_there_is_room() -> None:
    assert "By worker: 10, 11, 12, 13, 14, 15, 16, 17." in str(
        FitSummary(8, 10.0, figures(*map(float, range(10, 18))), ExchangeStats(), 0, 0.0, None)
    )
    wide = FitSummary(8, 10.0, figures(*(100_000.0 + each for each in range(8))), ExchangeStats(), 0, 0.0, None)
    assert "By worker: 100,000 (worker 0) to 100,007 (worker 7)." in str(wide)


def test_many_workers_with_adam_are_told_which_rate_learns_as_fast_as_ddp() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    adam, plain = torch.optim.AdamW(parameters), torch.optim.SGD(parameters, lr=0.1)
    given = ExchangeConfig.create
    without, adamax = given(nsync=1, advanced=Advanced(gain=False)), torch.optim.Adamax(parameters)
    assert "9 workers with AdamW learn more slowly" in str(rate_advice(9, without, [plain, adam]))
    assert rate_advice(9, given(nsync=1), [adam, adamax]) is None
    assert "9 workers with Adamax learn more slowly" in str(rate_advice(9, without, [adamax, adam]))
    muon = type("Muon", (torch.optim.SGD,), {})(parameters, lr=0.1)  # torch has it since 2.9
    assert rate_advice(9, given(nsync=1), [muon, adam]) is None
    assert "9 workers with Muon learn more slowly" in str(rate_advice(9, without, [muon, adam]))
    assert "About sqrt(9) = 3.0 times the rate" in str(rate_advice(9, without, [adam]))
    assert "9 workers that exchange every 10 steps may learn" in str(rate_advice(9, given(nsync=10), [adam]))
    assert "9 workers that exchange every 10 steps may learn" in str(rate_advice(9, given(nsync=10), [plain]))
    sparse = given(nsync=10, algorithm="sparse_loco")
    assert "sqrt(9) = 3.0 for 9 workers, is meant for adaptive optimizers" in str(rate_advice(9, sparse, [plain]))
    for workers, config, optimizer in (
        (9, sparse, adam),
        (9, sparse, torch.optim.RMSprop(parameters)),
        (1, sparse, plain),
        (9, given(nsync=10, algorithm=SparseLoCo(lr=1.0)), plain),
        (4, given(nsync=10, advanced=Advanced(gain=False)), adam),
        (9, given(nsync=2), adam),
        (4, given(nsync=10), plain),
        (9, given(nsync=2), plain),
        (9, given(nsync="auto"), plain),
        (9, given(nsync=10, algorithm=ASGD("sum")), adam),
        (9, given(nsync=10, algorithm="easgd"), adam),
    ):
        assert rate_advice(workers, config, [optimizer]) is None

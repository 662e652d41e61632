"""Where the workers' time went, in sentences: shares, what they are per batch or epoch, and what changes them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_asgd.monitor.metric_log import Fit
from lightning_asgd.report.curves import STATES, totals

_SMALL = 0.05  # share of the time below which a state needs no explanation
_UNEVEN = 0.15  # difference of two workers' shares at sync points above which they are named


def explained(fit: Fit) -> list[str]:
    """Paragraphs: the shares of all workers' time, then every kind of waiting that took more than a twentieth."""
    workers = totals(fit)
    spent = {state: sum(float(getattr(each, name)) for each in workers.values()) for state, name in STATES.items()}
    alive = sum(each.at_s for each in workers.values())
    if alive <= 0:
        return []
    shares = {state: seconds / alive for state, seconds in spent.items()}
    rest = max(0.0, 1.0 - sum(shares.values()))
    named = [f"{share:.1%} {state}" for state, share in shares.items() if state != "computing"]
    said = [
        f"Of their time, the training threads spent {shares['computing']:.1%} computing, {', '.join(named)}, and "
        f"{rest:.1%} on validations, checkpoints and other callbacks. What took more than a twentieth "
        "of it, and why:"
    ]
    reasons = {"between batches": _between_batches, "waiting at sync points": _at_sync_points}
    reasons["waiting for servers"] = _for_servers
    causes = [reasons[state](fit, spent) for state in reasons if shares[state] >= _SMALL]
    if not causes:
        said[0] = f"{said[0].partition('. ')[0]}. No kind of waiting took more than {_SMALL:.0%}."
    return said + causes


def _between_batches(fit: Fit, spent: Mapping[str, float]) -> str:
    batches = max(1, sum(each.batches for each in totals(fit).values()))
    between, computing = (spent[state] / batches for state in ("between batches", "computing"))
    return (
        f"Between batches: {_time(between)} per batch, beside {_time(computing)} of computing. In that time a worker "
        "fetches its next batch, and the Trainer's loop does its own work: callbacks, loggers and the progress bar. It "
        "hardly depends on the size of a step, so the share is large where steps are short, and on a machine with "
        "fewer cores than processes. Larger batches make it smaller; more loader processes do too if loading is slow, "
        "which lightning-asgd stalls measures."
    )


def _at_sync_points(fit: Fit, spent: Mapping[str, float]) -> str:
    workers = totals(fit)
    epochs = sum(each.epoch for each in workers.values())
    often = f"{_time(spent['waiting at sync points'] / epochs)} per worker and epoch, " if epochs > 0 else ""
    shares = {worker: each.sync_wait_s / each.at_s for worker, each in workers.items() if each.at_s > 0}
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    text = (
        f"At sync points: {often}at validations and at the ends of epochs. There all workers exchange their last "
        "updates and wait for the slowest."
    )
    if shares[most] - shares[least] > _UNEVEN:
        text += f" Worker {most} waited most, {shares[most]:.0%} of its time, and worker {least} {shares[least]:.0%}."
        if fit.settings.get("data") == "split":
            text += " With data='split' every worker trains a fixed part; with data='leases' faster ones train more."
    return text + " Longer epochs and fewer validations make the share smaller."


def _for_servers(fit: Fit, spent: Mapping[str, float]) -> str:
    exchanges = max(1, sum(each.exchanges for each in totals(fit).values()))
    return (
        f"For servers: {_time(spent['waiting for servers'] / exchanges)} per exchange, where a reply had not arrived "
        "when training could not continue without it. A larger nsync or more servers make the share smaller; "
        "lightning-asgd plan computes both."
    )


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"

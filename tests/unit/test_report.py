from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_asgd.cli.command_line import main
from lightning_asgd.errors import ConfigurationError
from lightning_asgd.monitoring.metric_log import FILE, Entry, Fit, MetricLog, find_log, read
from lightning_asgd.protocol import WorkerMetrics
from lightning_asgd.report.curves import Curves
from lightning_asgd.report.page import write

SETTINGS = {"nsync": 10, "algorithm": "ASGD(scale='mean') <&>"}


def figures(at_s: float, speed: float = 100.0, began: float = 7.0, **changes: object) -> WorkerMetrics:
    """Of a worker that trains evenly: a tenth of its time it waits for servers, two tenths at sync points."""
    batches = round(at_s * speed / 10)
    values = WorkerMetrics(
        began=began, at_s=at_s, samples=10 * batches, batches=batches, losses=batches, loss_sum=2.0 * batches
    )
    times = {"train_s": 0.6 * at_s, "exchange_wait_s": 0.1 * at_s, "sync_wait_s": 0.2 * at_s}
    pushes = {"pushes": batches, "exchanges": batches, "staleness": {0: batches, 17: 1}, "bytes_pushed": 1000 * batches}
    return replace(values, **{**times, **pushes, **changes})


def fit_of(entries: list[Entry]) -> Fit:
    return Fit("2030-01-01 00:00:00", 2, dict(SETTINGS), entries, "done")


@pytest.fixture
def fit() -> Fit:
    return fit_of([Entry(t, int(t), (0, 1), {0: figures(t), 1: figures(t - 0.5, 300.0)}) for t in range(1, 41)])


def test_what_is_written_is_read(tmp_path: Path, fit: Fit) -> None:
    for end in ("ValueError: x", "done"):
        journal = MetricLog(tmp_path / "run", 2, SETTINGS)
        for entry in fit.entries:
            journal.add(entry)
        journal.end(end)
    first, last = read(find_log(tmp_path))
    assert (first.end, last.end) == ("ValueError: x", "done")
    assert last.entries == fit.entries
    assert (last.workers, last.settings) == (2, SETTINGS)


def test_what_happened_to_workers_is_on_the_page(tmp_path: Path, fit: Fit) -> None:
    journal = MetricLog(tmp_path / "run", 2, SETTINGS)
    journal.add(fit.entries[0])
    journal.event(2.25, "Worker 1 is gone: it raised KeyError. It said:\nTraceback <1>\nline 2")
    journal.end("done")
    found = read(find_log(tmp_path))[0]
    assert found.events == [(2.25, "Worker 1 is gone: it raised KeyError. It said:\nTraceback <1>\nline 2")]
    page = write(found, tmp_path / "page").read_text()
    assert "<dt>2.25 s</dt><dd>Worker 1 is gone: it raised KeyError. It said:" in page
    assert "<pre>Traceback &lt;1&gt;\nline 2</pre>" in page
    assert 'class="events"' not in write(fit, tmp_path / "other").read_text()


def test_a_job_that_was_killed_leaves_half_a_line_and_a_newer_version_more_words(tmp_path: Path, fit: Fit) -> None:
    journal = MetricLog(tmp_path, 2, SETTINGS)
    journal.add(fit.entries[0])
    text = journal.path.read_text().replace('"samples":', '"new":1,"samples":') + '{"kind":"new"}\n{"kind":"figures","a'
    journal.path.write_text(text)
    (read_again,) = read(journal.path)
    assert read_again.entries == fit.entries[:1]
    assert read_again.end == ""


def test_folders_without_logs_are_told_from_those_with_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing' does not exist: no asgd.jsonl\. Expected the folder"):
        find_log(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match=r"holds no asgd.jsonl\. Expected the folder of a run's logs"):
        find_log(tmp_path)
    for name in ("a", "b"):
        MetricLog(tmp_path / name, 1, {})
    with pytest.raises(ConfigurationError, match=r"holds the logs of 2 runs\. Expected one of .*a, .*b\."):
        find_log(tmp_path)
    with pytest.raises(ConfigurationError, match=r"holds no metrics\. Expected a fit of at least one batch"):
        read(find_log(tmp_path / "a"))
    (tmp_path / "a" / FILE).write_text('{"kind":"fit"}\n{}\n')
    with pytest.raises(ConfigurationError, match=r"Line 1 of .* cannot be read \(KeyError\('started'\)\)\. Expected"):
        read(tmp_path / "a" / FILE)


def test_curves_of_workers_that_train_evenly_are_flat(fit: Fit) -> None:
    curves = Curves(fit)
    inner = slice(2, -2)  # the second worker begins half a second later than is known of
    np.testing.assert_allclose(curves.rate("samples", [0])[inner], 100.0)
    np.testing.assert_allclose(curves.rate("samples")[inner], 400.0)
    shares = curves.shares(1)
    for state, share in (("computing", 0.6), ("waiting for servers", 0.1), ("waiting at sync points", 0.2)):
        np.testing.assert_allclose(shares[state][inner], share, err_msg=state)
    np.testing.assert_allclose(shares["waiting for data"], 0.0)
    for smooth in (False, True):
        seconds, samples, loss = curves.loss(smooth=smooth)
        np.testing.assert_allclose(loss, 2.0)
        assert np.all(np.diff(samples) > 0)
        assert 0 < seconds[0] < seconds[-1] < curves.edges[-1]


def test_a_worker_that_dies_trains_nothing_more_and_one_that_begins_anew_is_added_to_what_it_was() -> None:
    entries = []
    for t in range(1, 31):
        one = figures(min(t, 10)) if t <= 20 else figures(t - 20, began=8.0)
        entries.append(Entry(t, t, (0, 1), {0: figures(t), 1: one}))
    curves = Curves(fit_of(entries))
    rate = curves.rate("samples", [1])
    np.testing.assert_allclose(rate[:9], 100.0)
    np.testing.assert_allclose(rate[11:19], 0.0, atol=1e-9)
    np.testing.assert_allclose(rate[21:], 100.0)
    assert curves.total("samples", [1])[-1] == 2000


def test_the_smoothed_loss_is_the_mean_of_a_window_around() -> None:
    sums = np.cumsum([float(t % 2) * 10 for t in range(120)])
    entries = [
        Entry(t + 1.0, t, (0,), {0: WorkerMetrics(at_s=t + 1.0, samples=8 * (t + 1), losses=t + 1, loss_sum=sums[t])})
        for t in range(120)
    ]
    curves = Curves(fit_of(entries))
    _, _, raw = curves.loss(smooth=False)
    _, _, smooth = curves.loss(smooth=True)
    assert sorted(set(raw.round(6))) == [0.0, 10.0]
    np.testing.assert_allclose(smooth[5:-5], 5.0, atol=0.6)  # nine parts: four of the one and five of the other


def test_the_command_writes_a_page_that_needs_nothing_else(
    tmp_path: Path, fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = MetricLog(tmp_path / "run", 2, SETTINGS)
    for entry in fit.entries:
        journal.add(entry)
    assert main(["report", str(tmp_path)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == tmp_path / "run" / "report" / "report.html"
    html = page.read_text()
    assert not re.findall(r"(?:src|href)=\"(?!data:)|<script|url\(|@import", html)
    assert len(re.findall(r'src="data:image/png;base64,', html)) == 6
    assert len(list(page.parent.glob("*.png"))) == 6
    assert "ASGD(scale=&#x27;mean&#x27;) &lt;&amp;&gt;" in html
    assert "it has not ended, or was killed" in html
    (row,) = re.findall(r"<tr><td>all</td><td>([\d,]+)</td>", html)
    assert row == "400"
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "report.html").is_file()


def test_the_command_tells_of_a_folder_without_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "ConfigurationError" in capsys.readouterr().err


@pytest.mark.parametrize("number", [1, 20])
def test_many_workers_few_figures_and_no_loss(tmp_path: Path, number: int) -> None:
    everyone = {w: figures(0.1, loss_sum=0.0, losses=0) for w in range(number)}
    page = write(fit_of([Entry(0.1, 1, tuple(everyone), everyone)]), tmp_path)
    html = page.read_text()
    assert "No training loss was recorded" in html
    assert len(re.findall("<td>worker ", html)) == number


# ---------------------------------------------------------------------- at a URL


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    """fsspec's file system in memory, empty."""
    fs = MemoryFileSystem()
    yield fs
    fs.rm("/", recursive=True)


def test_at_a_url_what_is_written_is_read(
    fit: Fit, memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for end in ("ValueError: x", "done"):  # the second follows in the same file
        journal = MetricLog("memory://logs/run", 2, SETTINGS)
        for entry in fit.entries:
            journal.add(entry)
        journal.end(end)
    for place in ("memory://logs/run", "memory://logs/run/", "memory://logs", f"memory://logs/run/{FILE}"):
        first, last = read(find_log(place))
        assert (first.end, last.end) == ("ValueError: x", "done")
        assert last.entries == fit.entries
    MetricLog("memory://logs/other", 1, {})
    with pytest.raises(ConfigurationError, match=r"2 runs\. Expected one of memory://.*/other, memory://.*/run\."):
        find_log("memory://logs")
    with pytest.raises(ConfigurationError, match=r"'memory://nothing' does not exist: no asgd.jsonl"):
        find_log("memory://nothing")
    with pytest.raises(ConfigurationError, match=r"'nosuchstore://x' cannot be read .* a URL that fsspec knows"):
        find_log("nosuchstore://x")
    assert list(tmp_path.iterdir()) == []
    assert main(["report", "memory://logs/run"]) in (None, 0)
    assert (tmp_path / "report").is_dir()


def test_at_a_url_the_file_is_written_now_and_then_as_a_whole(
    fit: Fit, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[int] = []
    pipe = MemoryFileSystem.pipe_file

    def count(self: MemoryFileSystem, path: str, value: bytes, **about: object) -> None:
        uploads.append(value.count(b"\n"))
        pipe(self, path, value, **about)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", count)
    clock = Clock()
    monkeypatch.setattr("lightning_asgd.monitoring.metric_log.time", clock)
    journal = MetricLog("memory://logs/run", 2, SETTINGS)
    for entry in fit.entries[:10]:
        clock.now += 25.0
        journal.add(entry)
    journal.end("done")
    assert uploads == [1, 4, 7, 10, 12]


class Clock:
    now = 100.0
    strftime = staticmethod(time.strftime)

    def monotonic(self) -> float:
        return self.now


class Denied(MemoryFileSystem):
    """One that may not be written to."""

    protocol = "denied"

    def pipe_file(self, *args: object, **kwargs: object) -> None:
        raise PermissionError("read only")


@pytest.mark.parametrize(
    ("url", "cause"),
    [("denied://logs", "PermissionError: read only"), ("nosuchstore://logs", "ValueError: Protocol not")],
)
def test_training_goes_on_without_a_place_for_the_file_and_one_warning_says_so(
    fit: Fit, url: str, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    fsspec.register_implementation("denied", Denied, clobber=True)
    journal = MetricLog(url, 2, SETTINGS)
    for entry in fit.entries:
        journal.add(entry)
    journal.end("done")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"The workers' metrics cannot be written to {url}/asgd.jsonl ({cause}")

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_asgd.cli.command_line import main
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.protocol import WorkerMetrics
from lightning_asgd.monitor.metric_log import FILE, Entry, Fit, MetricLog, find_log, read
from lightning_asgd.report.curves import Curves, faults, places, totals
from lightning_asgd.report.page import _facts, _period, explained, write
from lightning_asgd.report.picture_style import DARK, PAPER

SETTINGS = {"nsync": 10, "algorithm": "ASGD(scale='mean') <&>"}
HOSTILE = "<script>alert('$a_b')</script>"
ABOUT = {
    "model": "DigitsCNN",
    "parameters": 51_234,
    "trainable": 51_000,
    "places": {0: ("east", "cuda:0"), 1: ("west", "cuda:1")},
    "versions": {"lightning-asgd": "0.1.0", "torch": "2.9"},
}


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


def even_fit() -> Fit:
    return fit_of([Entry(t, int(t), (0, 1), {0: figures(t), 1: figures(t - 0.5, 300.0)}) for t in range(1, 41)])


@pytest.fixture
def fit() -> Fit:
    return even_fit()


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


def written(folder: Path, fit: Fit, about: dict[str, object] | None = None, end: str = "done") -> Fit:
    """A fit as it is read from a file with every kind of record."""
    journal = MetricLog(folder, 2, {**SETTINGS, "nfetch": 10, "npush": 10, "num_servers": 2, "transport": "zmq"}, about)
    for number, entry in enumerate(fit.entries):
        journal.add(entry)
        if number % 10 == 9:
            journal.validation(
                entry.at_s, {"val_acc": 0.5 + 0.01 * number, HOSTILE: float("nan") if number < 10 else 1}
            )
    if about is not None:
        journal.event(
            2.25, f"Worker 1 is lost: it raised KeyError; the others continue. Its last output:\n{HOSTILE}\nline 2"
        )
        journal.event(8.5, "Process 7 on north replaces process 6 on west as worker 1 (it raised KeyError).")
        journal.event(9.0, "A server was lost and restored from the workers' copies.")
    journal.end(end)
    return read(journal.path)[-1]


class Checked(HTMLParser):
    """Notes what is wrong with a page: tags without an end, names that are used twice, anything that is fetched."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []
        assert len(self.names) == len(set(self.names))
        assert not self.tags & {"script", "link", "img", "iframe", "object", "image", "foreignobject"}
        assert not re.findall(r"url\((?!#)|@import", html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("src", "href") or (value or "").startswith("#")
            assert name != "id" or value
            self.names += [value or ""] if name == "id" else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.open and self.open[-1] == "style" else f"{data} "


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a fit with every kind of record; for several tests, since drawing takes a second or two."""
    folder = tmp_path_factory.mktemp("report")
    return write(written(folder / "run", even_fit(), ABOUT), folder / "page")


def test_the_page_says_what_was_trained_and_what_happened(page: Path) -> None:
    html = page.read_text()
    text = " ".join(Checked(html).text.split())
    assert "<title>DigitsCNN, trained with A-SGD, " in html
    for said in (
        "51,234, of which 234 are frozen",
        "2 workers on 2 machines (cuda:0, cuda:1)",
        "every 10 steps",
        "transport zmq",
        "lightning-asgd 0.1.0, torch 2.9",
        "finished",
        "val_acc",
        "1 2.2 s Worker 1 is lost: it raised KeyError; the others continue. Its last output:",
        "2 8.5 s Process 7 on north replaces process 6 on west as worker 1",
        "3 9.0 s A server was lost and restored from the workers' copies.",
        "worker lost , worker replaced , server replaced",
    ):
        assert said in text, said
    assert "<pre>&lt;script&gt;alert(&#x27;$a_b&#x27;)&lt;/script&gt;\nline 2</pre>" in html
    (row,) = re.findall(r"<tr><td>1</td><td>north</td><td>cuda:1</td>(.*?)</tr>", html)
    assert row.endswith("<td>1</td><td>1</td>")  # lost, replaced; nobody joined
    assert sorted(each.name for each in page.parent.glob("validation-*")) == [
        "validation-1.png",
        "validation-2.png",
    ]


def test_the_page_is_light_and_dark_and_its_pictures_follow(page: Path) -> None:
    html = page.read_text()
    light, dark = html.split("@media screen and (prefers-color-scheme: dark)")
    assert PAPER.keys() == DARK.keys()
    for name in PAPER:
        assert f"--{name}: #" in light
        assert f"--{name}: {DARK[name]};" in dark
    assert "@media print" in html
    pictures = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(pictures) == 8
    for picture in pictures:
        assert "var(--blue)" in picture or "var(--calm)" in picture
        assert not re.findall(r"(?:fill|stroke): #", picture)
        assert "DejaVu" not in picture


def test_hostile_names_are_text(tmp_path: Path, fit: Fit) -> None:
    hostile = {**ABOUT, "model": HOSTILE, "versions": {HOSTILE: HOSTILE}, "places": {0: (HOSTILE, HOSTILE)}}
    page = write(
        written(tmp_path / "run", fit, hostile, end=f"ValueError: {HOSTILE}"), tmp_path / "page", about=HOSTILE
    )
    assert Checked(page.read_text()).text.count(HOSTILE) >= 6


def test_the_log_of_an_earlier_version_gives_a_page(tmp_path: Path, fit: Fit) -> None:
    written(tmp_path, fit)
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    old = [{key: value for key, value in line.items() if key != "about"} for line in lines]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in old if line["kind"] != "validation"))
    (found,) = read(tmp_path / FILE)
    html = write(found, tmp_path / "page").read_text()
    assert "<title>Training with A-SGD, " in html
    assert "The log has no validation metrics: an earlier version" in Checked(html).text
    assert 'class="events"' not in html


def test_events_of_the_server_are_told_apart_and_say_where_workers_are(fit: Fit) -> None:
    texts = {
        "Worker 2 (north, process 12, cuda:1) has joined.": ("joined", 2),
        "Worker 1 has rejoined.": ("joined", 1),
        "Worker 1 has left: it raised KeyError (process 3 on west).": ("lost", 1),
        "Worker 1 has left.": ("other", 1),
        "Worker 1 is lost: its process ended with exit code 1; the others continue without it.": ("lost", 1),
        "Worker 1 sent no heartbeat for 10 s; the others continue without it. It may rejoin.": ("lost", 1),
        "Worker 0 is lost. Worker 1 logs and writes the checkpoints from now on.": ("other", 0),
        "Server 1 continues from its snapshot, version 12.": ("server", None),
    }
    fit.events = [(float(at), text) for at, text in enumerate(texts)]
    assert [(each.kind, each.worker) for each in faults(fit)] == list(texts.values())
    assert places(fit) == {2: ("north", "cuda:1")}


def test_waiting_is_explained_by_what_it_is_per_batch_and_epoch(fit: Fit) -> None:
    fit.settings["data"] = "split"
    fit.entries[-1].figures.update(
        {0: figures(40.0, epoch=4.0, data_wait_s=4.0), 1: figures(40.0, epoch=4.0, data_wait_s=4.0, sync_wait_s=20.0)}
    )
    shares, batches, sync, servers = explained(fit)
    assert "60.0% computing, 10.0% waiting for servers, 35.0% waiting at sync points, 10.0% between batches" in shares
    assert batches.startswith("Between batches: 10 ms per batch, beside 60 ms of computing.")
    assert sync.startswith("At sync points: 3.5 s per worker and epoch, ")
    assert "Worker 1 waited most, 50% of its time, and worker 0 20%. With data='split'" in sync
    assert servers.startswith("For servers: 10 ms per exchange")
    quick = {0: figures(10.0, exchange_wait_s=0.0, sync_wait_s=0.1)}
    (only,) = explained(fit_of([Entry(10.0, 1, (0,), quick)]))
    assert only.endswith("No kind of waiting took more than 5%.")


def test_a_job_that_was_killed_leaves_half_a_line_and_a_newer_version_more_words(tmp_path: Path, fit: Fit) -> None:
    journal = MetricLog(tmp_path, 2, SETTINGS)
    journal.add(fit.entries[0])
    text = journal.path.read_text().replace('"samples":', '"new":1,"samples":') + '{"kind":"new"}\n{"kind":"figures","a'
    journal.path.write_text(text)
    (read_again,) = read(journal.path)
    assert read_again.entries == fit.entries[:1]
    assert read_again.end == ""


def test_a_job_that_was_killed_and_one_that_follows_it_in_the_same_file(tmp_path: Path, fit: Fit) -> None:
    killed = MetricLog(tmp_path, 2, SETTINGS)
    killed.add(fit.entries[0])
    with killed.path.open("a") as file:
        file.write('{"kind":"figures","a')
    again = MetricLog(tmp_path, 2, SETTINGS)
    again.add(fit.entries[0])
    again.end("done")
    first, last = read(killed.path)
    assert first.entries == last.entries == fit.entries[:1]
    assert (first.end, last.end) == ("", "done")


def test_training_continues_where_the_disk_is_full(tmp_path: Path, fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    journal = MetricLog(tmp_path, 2, SETTINGS)
    journal.path.unlink()
    journal.path.symlink_to("/dev/full")
    for entry in fit.entries:
        journal.add(entry)
    journal.end("done")
    (said,) = caplog.messages
    assert "No space left on device" in said
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"binary' cannot be read \(UnicodeDecodeError"):
        read(tmp_path / "binary")


def test_samples_are_divided_by_the_time_of_the_worker_that_has_trained_longest(tmp_path: Path) -> None:
    entries = [Entry(10.0, 1, (0, 1), {0: figures(100.0), 1: figures(10.0)})]  # the chief has joined later
    facts = _facts(fit_of(entries))
    assert f"<dd>{entries[0].figures[0].samples / 100 * 1.1:,.0f}</dd>" in facts
    assert _period({"nsync": 10, "nfetch": 5, "npush": 5}) == "every 5 steps"
    assert _period({"nsync": 10}) == "every 10 steps"


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
    np.testing.assert_allclose(shares["between batches"], 0.0)
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
    whole = totals(fit_of(entries))
    assert (whole[0], whole[1].samples, whole[1].at_s) == (entries[-1].figures[0], 2000, 20.0)
    assert whole[1].staleness == {0: 200, 17: 2}


def test_a_living_worker_whose_last_report_is_older_does_not_seem_gone() -> None:
    entries = [Entry(t, t, (0, 1), {0: figures(t), 1: figures(min(t, 38))}) for t in range(1, 41)]
    curves = Curves(fit_of(entries))
    assert curves.edges[-1] == 38
    np.testing.assert_allclose(curves.rate("samples", [1]), 100.0)
    gone = [replace(entry, living=(0,)) for entry in entries]
    assert Curves(fit_of(gone)).edges[-1] == 40


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
    page = Path(capsys.readouterr().out.strip().removeprefix("Report: "))
    assert page == tmp_path / "run" / "report" / "report.html"
    html = page.read_text()
    Checked(html)
    assert html.count("<svg") == len(list(page.parent.glob("*.png"))) == 6
    assert "ASGD(scale=&#x27;mean&#x27;) &lt;&amp;&gt;" in html
    assert "the fit has not ended, or was killed" in html
    (row,) = re.findall(r"<tr><td>all</td><td></td><td></td><td>([\d,]+)</td>", html)
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
    assert len(re.findall(r"<tr><td>\d+</td>", html)) == 3 * number
    Checked(html)


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
    monkeypatch.setattr("lightning_asgd.monitor.metric_log.time", clock)
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

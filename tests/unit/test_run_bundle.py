"""A run's logs in one file for a bug report."""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_asgd.cli import doctor_command
from lightning_asgd.cli.command_line import main
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.report import bundle as run_bundle
from lightning_asgd.report.bundle import events_in_order, redacted

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("WANDB_API_KEY=abc123 x", "WANDB_API_KEY=<redacted> x"),
        ('{"api_key": "abc 1", "n": 2}', '{"api_key": "<redacted>", "n": 2}'),
        ("{'password':'a,b'}", "{'password':'<redacted>'}"),
        (r'"said \"token\": \"abc\" twice"', r'"said \"token\": \"<redacted>\" twice"'),
        ("token=\nnext: b", "token=\nnext: b"),
        ("db_password: a\nnext: b", "db_password: <redacted>\nnext: b"),
        ("DJANGO_SECRET_KEY: 'a b'\nSECRET_KEY=a,b", "DJANGO_SECRET_KEY: '<redacted>'\nSECRET_KEY=<redacted>"),
        ("  password: correct horse, battery\nn: 1", "  password: <redacted>\nn: 1"),
        ("private_key=a passphrase: b", "private_key=<redacted> passphrase: <redacted>"),
        ("train.py --hub-token abc --lr 0.1 --token --x", "train.py --hub-token <redacted> --lr 0.1 --token --x"),
        ("--password 'a' ['--token', 'abc', 1]", "--password '<redacted>' ['--token', '<redacted>', 1]"),
        ("SECRET_KEY_BASE=a", "SECRET_KEY_BASE=<redacted>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nab/c=\n-----END RSA PRIVATE KEY-----\nn: 1", "<redacted>\nn: 1"),
        ("max_tokens: 5, tokenizer: gpt2", "max_tokens: 5, tokenizer: gpt2"),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer <redacted>"),
        ("s3://user:pass@host/x", "s3://<redacted>@host/x"),
        ("login hf_abcdefghijklmnop", "login <redacted>"),
        (f"secret {HEX} here", "secret <redacted> here"),
        ("from jane.doe+x@mail.example.org.", "from <e-mail>."),
        ("/home/jane/run and /Users/jane/run", "~/run and ~/run"),
        ("/root/x /rootfs", "~/x /rootfs"),
        ("said hidden-value twice: hidden-value", "said <MY_TOKEN> twice: <MY_TOKEN>"),
        ("LIGHTNING_ASGD_SECRET is not set on 10.0.0.1", "LIGHTNING_ASGD_SECRET is not set on 10.0.0.1"),
        ("weights@epoch 3, 12:30:00, server 0", "weights@epoch 3, 12:30:00, server 0"),
    ],
)
def test_what_is_replaced(text: str, expected: str) -> None:
    environment = {"MY_TOKEN": "hidden-value", "SHORT_KEY": "on", "SHELL": "weights"}
    assert redacted(text, environment, "/root") == expected


@pytest.mark.timeout(20)
def test_long_lines_take_no_longer() -> None:
    text = "data:image/png;base64," + "iVBORw0KGgo+abc/" * 200_000
    begun = time.monotonic()
    assert redacted(text, {}, "/") == text
    assert time.monotonic() - begun < 10


def test_events_of_all_logs_are_in_the_order_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    metrics = [
        {"kind": "fit", "started": "2026-03-01 10:00:00", "workers": 2, "settings": {}},
        {"kind": "figures", "at_s": 9.0},
        {"kind": "event", "at_s": 2.5, "text": "Worker 1 was lost\nTraceback"},
        {"kind": "figures", "at_s": 9.0},
        {"kind": "end", "how": "finished"},
    ]
    texts = {
        "asgd.jsonl": "\n".join(map(json.dumps, metrics)) + '\n{"kind": "ev',
        "one.log": "before\n2026-03-01 10:00:02,250 ERROR it failed\nTraceback\n  ValueError\n[W301 10:00:04 c] odd\n",
        "two.err": "[W0301 10:00:01.123456 b.cpp] early\nnothing\n2026-13-01 10:00:00 no such month\n",
        "zone.txt": "2026-03-01T12:00:03.75+02:00 INFO elsewhere\n2026-03-01T10:00:08Z z\n",
        "page.html": "2026-03-01 10:00:00 is no log",
    }
    assert [*events_in_order(texts, dict.fromkeys(texts, 2026))][1:] == [
        "2026-03-01 10:00:00.000  asgd.jsonl: a fit begins with 2 workers",
        "2026-03-01 10:00:01.123  two.err: [W0301 10:00:01.123456 b.cpp] early\n    nothing\n"
        "    2026-13-01 10:00:00 no such month",
        "2026-03-01 10:00:02.250  one.log: 2026-03-01 10:00:02,250 ERROR it failed\n    Traceback\n      ValueError\n"
        "    [W301 10:00:04 c] odd",
        "2026-03-01 10:00:02.500  asgd.jsonl: Worker 1 was lost\n    Traceback",
        "2026-03-01 10:00:03.750  zone.txt: 2026-03-01T12:00:03.75+02:00 INFO elsewhere",
        "2026-03-01 10:00:08.000  zone.txt: 2026-03-01T10:00:08Z z",
        "2026-03-01 10:00:09.000  asgd.jsonl: the fit ends: finished",
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_command, "examine", lambda *about, values: iter(["Versions", f"values: {values}"]))
    monkeypatch.setenv("MY_SECRET", "hidden-value")
    run = tmp_path / "logs" / "version_0"
    (run / "checkpoints").mkdir(parents=True)
    (run / "asgd.jsonl").write_text('{"kind":"fit","started":"2026-03-01 10:00:00","workers":2,"settings":{}}\n')
    (run / "metrics.csv").write_text("step,loss\n0,1\n")
    (run / "hparams.yaml").write_text("note: hidden-value\n")
    (run / "checkpoints" / "last.ckpt").write_bytes(b"weights")
    (tmp_path / "logs" / "worker1.log").write_text("2026-03-01 10:00:01 hello\n")
    (tmp_path / "logs" / "link.log").symlink_to("/etc/hostname")
    return tmp_path / "logs"


def packed(file: Path) -> dict[str, str]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "logs", "--bundle", "bug.zip"]) == 0
    found = packed(Path("bug.zip"))
    logs = {f"version_0/{name}" for name in ("asgd.jsonl", "metrics.csv", "hparams.yaml")}
    assert set(found) == {*logs, "worker1.log", "events.txt", "doctor.txt"}
    assert found["version_0/hparams.yaml"] == "note: <MY_SECRET>\n"
    assert found["doctor.txt"] == "Versions\nvalues: False\n"
    assert found["events.txt"].splitlines()[1:] == [
        "2026-03-01 10:00:00.000  version_0/asgd.jsonl: a fit begins with 2 workers",
        "2026-03-01 10:00:01.000  worker1.log: 2026-03-01 10:00:01 hello",
    ]
    said = capsys.readouterr().out
    for text in (
        "bug.zip (",
        "worker1.log",
        "No report page: ",
        "holds no metrics",
        "Not packed, of other kinds (checkpoints, pictures, ...): 1",
    ):
        assert text in said
    assert "Host names and addresses are in the file" in said


def test_large_files_are_named_and_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_bundle, "_LARGEST", 100)
    (folder / "big.log").write_text("x" * 101)
    assert main(["report", "logs", "--bundle"]) == 0
    assert "Not packed: big.log, 101 B (at most 100 B" in capsys.readouterr().out
    (made,) = Path().glob("asgd-bundle-*.zip")
    assert "big.log" not in packed(made)


def test_a_file_that_cannot_be_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = Path.read_text

    def refuse(path: Path, **about: str) -> str:
        if path.name == "worker1.log":
            raise PermissionError(13, "Permission denied")
        return read(path, **about)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert main(["report", "logs", "--bundle", "a.zip"]) == 0
    assert "Not packed: worker1.log: Permission denied" in capsys.readouterr().out
    assert "worker1.log" not in packed(Path("a.zip"))


def test_a_page_is_packed(folder: Path) -> None:
    def write_page() -> None:
        (folder / "version_0" / "report").mkdir()
        (folder / "version_0" / "report" / "report.html").write_text("<p>page</p>")

    run_bundle.pack("logs", Path("a.zip"), write_page)
    assert packed(Path("a.zip"))["version_0/report/report.html"] == "<p>page</p>"


def no_folder() -> list[str]:
    return ["logs/none"]


def several_runs() -> list[str]:
    os.makedirs("logs/version_1")
    Path("logs/version_1/asgd.jsonl").write_text("")
    return ["logs"]


def taken() -> list[str]:
    Path("a.zip").write_text("mine")
    return ["logs", "a.zip"]


def no_place() -> list[str]:
    return ["logs", "none/a.zip"]


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (no_folder, "'logs/none' is not a folder on this machine"),
        (several_runs, "'logs' holds the logs of 2 runs"),
        (taken, "'a.zip' is there already. Expected the name of a new file."),
        (no_place, "'none/a.zip' cannot be written: .*Expected a path that you can write to"),
    ],
)
def test_what_cannot_be_packed(folder: Path, prepare: Callable[[], list[str]], text: str) -> None:
    run_dir, *file = prepare()

    def write_page() -> None:
        if prepare is several_runs:
            raise ConfigurationError("'logs' holds the logs of 2 runs")

    with pytest.raises(ConfigurationError, match=text):
        run_bundle.pack(run_dir, Path(file[0]) if file else None, write_page)


def test_a_page_elsewhere_is_not_in_a_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "logs", "--bundle", "--out", "there"]) == 1
    assert "--out there was given with bundle, which writes" in capsys.readouterr().err

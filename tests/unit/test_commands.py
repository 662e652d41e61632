"""What people type after ``lightning-asgd``, and what they are told."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_asgd.cli.command_line import COMMANDS, main
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.elastic import serve_command
from tests.helpers.ports import free_port
from tests.helpers.servers import SECRET


@pytest.mark.parametrize(
    "words", ["nowhere --watch", "--watch nowhere --every-n-seconds 1", "nowhere", "nowhere --every_n_seconds=1"]
)
def test_options_are_understood_in_any_place_and_with_hyphens_or_underscores(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *shlex.split(words)]) == 1
    assert 'Expected "host:port/name"' in capsys.readouterr().err  # so the words were understood


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("serve --num-servers 2", "the following arguments are required: run"),
        ("serve h:1/y --num-servers x", "argument --num-servers: invalid int value: 'x'"),
        ("serve 127.0.0.1:29400/y --transport smoke", "argument --transport: invalid choice: 'smoke'"),
        (
            "plan --link-gbit-s 1 --batch-sizes few",
            "--batch-sizes: invalid list of whole numbers value: 'few'",
        ),
        ("serv", "invalid choice: 'serv'"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_mistakes_in_options_are_named_as_they_were_typed(
    words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_errors_of_the_library_name_options(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = "--link-gbit-s 1 --parameters 1e6 --step-s 1 --batch-size 3"
    assert main(["plan", "--nsync", "0", *shlex.split(numbers)]) == 1
    assert "--nsync 0. Expected a whole number of at least 1, such as --nsync 10." in capsys.readouterr().err


NUMBERS = "plan --link-gbit-s 1 --parameters 1e6 --step-s 1 --batch-size 3 --simulate 0"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (f"{NUMBERS} --link-gbit-s 0", "--link-gbit-s 0.0. Expected a number above 0."),
        (f"{NUMBERS} --worker-link-gbit-s nan", "--worker-link-gbit-s nan. Expected a number above 0."),
        (f"{NUMBERS} --parameters inf", "--parameters inf. Expected a finite number above 0."),
        (f"{NUMBERS} --bytes-per-parameter 0", "--bytes-per-parameter 0. Expected a number above 0."),
        (f"{NUMBERS} --batch-size -4", "--batch-size -4. Expected a number above 0."),
        (f"{NUMBERS} --simulate -1", "--simulate -1. Expected a whole number of at least 0"),
        (f"{NUMBERS} --batch-sizes 8", "--batch-sizes were given without a module to measure."),
        (f"{NUMBERS} --module m:Net", "--parameters, --step-s, --batch-size and --module were given."),
        (f"{NUMBERS} --picture FILE/x.png", "--picture 'FILE/x.png': "),
        (f"{NUMBERS} --picture x.smoke", "--picture 'x.smoke': Format 'smoke' is not supported"),
        ("plan --link-gbit-s 1 --module m:Net --batch-sizes 8,0", "--batch-sizes 0. Expected a whole number"),
        ("serve 0.0.0.0:0/a", "run '0.0.0.0:0/a'. Expected the address at which workers reach this machine"),
        ("serve 127.0.0.1:0/a --snapshots FILE", "--snapshots 'FILE' cannot be written to: "),
        ("serve 127.0.0.1:0/a --join here", "--join 'here'. Expected \"host:port\" of one host"),
        ("serve 127.0.0.1:TAKEN/a", "Give another port, or an address of this machine."),
        ("serve 127.0.0.1:0/a --join h:1/b", "Expected the address at which workers reach this machine"),
        ("serve 127.0.0.1:0/a'b'c,d", 'Expected "host:port/name"'),
        ("serve 192.0.2.77:0/a", "Give another port, or an address of this machine."),
        (
            "serve 127.0.0.1:0",
            "run '127.0.0.1:0'. Expected the address at which workers reach this machine, a port and",
        ),
        ("status 127.0.0.1:70000", "run '127.0.0.1:70000'. Expected \"host:port/name\""),
        ("status 127.0.0.1:1 --every-n-seconds nan", "--every-n-seconds nan. Expected a number of seconds"),
        ("stalls --module script.py:needs", "script.py:needs cannot be called without arguments: missing"),
        ("stalls --module script.py:number", "script.py:number cannot be called without arguments: 3 is not"),
        ("stalls --module script.py:loader --steps 0", "--steps 0. Expected a whole number of at least 1"),
        ("stalls --module script.py:loader --warm-up -1", "--warm-up -1. Expected a whole number of at least 0"),
        ("stalls --module script.py:loader --repeats 0", "--repeats 0. Expected a whole number of at least 1"),
        ("stalls --module script.py:loader --files none", "--files 'none' does not exist."),
        ("stalls --module script.py:loader", "Cannot measure the data stalls of int"),
    ],
)
def test_wrong_values_are_named_as_options(
    words: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(serve_command, "_signals", list)  # they are pytest's
    (tmp_path / "FILE").write_text("")
    (tmp_path / "script.py").write_text("number = 3\ndef needs(x): pass\ndef loader(): return None, 3\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(shlex.split(words.replace("TAKEN", str(taken.getsockname()[1])))) == 1
    said = capsys.readouterr().err
    assert text in said
    assert "MASTER_" not in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("join", [[], ["--join=127.0.0.1:1"]])
def test_a_signal_stops_serve_before_its_servers_have_started(
    join: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_command, "_signals", lambda: [signal.SIGTERM])
    begun = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main(["serve", "127.0.0.1:0/r", "--transport=rpc", *join])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "Stopped before the servers had started.\n"
    assert time.monotonic() - begun < 30


def test_serve_works_for_a_service_manager_that_closes_its_standard_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, call = free_port(), "import sys; from lightning_asgd.cli.command_line import main; sys.exit(main())"
    monkeypatch.setenv(SECRET_ENV, SECRET)
    words = [sys.executable, "-c", call, "serve", f"127.0.0.1:{port}/r", f"--snapshots={tmp_path}"]
    served = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words])
    try:
        deadline = time.monotonic() + 60
        while main(["health", f"127.0.0.1:{port}"]):
            assert served.poll() is None
            assert time.monotonic() < deadline
        served.terminate()
        assert served.wait(30) == 0
    finally:
        served.kill()
        served.wait()


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_into_80_columns_and_shows_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*([command] if command else []), "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert f"  lightning-asgd {command}" in shown
    assert "``" not in shown, "help is for people, not for Sphinx"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("lightning-asgd 0.")


def test_tables_fit_into_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = "--parameters 25.6e6 --step-s 0.25 --batch-size 32 --link-gbit-s 10 --workers 16 --simulate 5"
    assert main(["plan", *shlex.split(numbers)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.startswith("  kept")], "no cell is broken into two lines"


@pytest.mark.parametrize(
    "entry",
    [
        {"transport": "rpc"},
        {"transport": ["rpc"], "servers": ["server/0"]},
        {"transport": "smoke", "servers": ["server/0"]},
        {"transport": "rpc", "servers": []},
        {"transport": "rpc", "servers": "server/0"},
        {"transport": "rpc", "servers": [7]},
        {"transport": "rpc", "servers": ["server/without a port"]},
        {"transport": "rpc", "servers": ["server/that is no text"]},
    ],
    ids=str,
)
def test_entries_of_a_foreign_program_are_one_line_and_a_failure(
    entry: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_ENV, raising=False)
    foreign = Rendezvous.host()
    foreign.put("run", "r")
    foreign.put("session/r", entry)
    foreign.put("server/without a port", {"address": "nowhere"})
    foreign.put("server/that is no text", {"address": {"x": 70000}})
    assert main(["status", "{}:{}".format(*foreign.address)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Expected" in said

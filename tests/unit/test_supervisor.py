"""What a process adds to the error where a server of its own has died."""

from __future__ import annotations

import pytest

from lightning_asgd import supervisor
from lightning_asgd.errors import ServerLostError
from lightning_asgd.supervisor import with_last_words


class Overseer:
    """A supervisor, as far as errors are concerned."""

    def __init__(self, obituary: str | None) -> None:
        self._obituary = obituary

    def obituary(self) -> str | None:
        return self._obituary


@pytest.mark.parametrize(("words", "text"), [("Server 0 ended.", "No answer.\nServer 0 ended."), (None, "No answer.")])
def test_a_dead_servers_words_are_added_once(monkeypatch: pytest.MonkeyPatch, words: str | None, text: str) -> None:
    monkeypatch.setattr(supervisor, "_current", Overseer(words))
    with pytest.raises(ServerLostError) as caught, with_last_words(), with_last_words():
        raise ServerLostError("No answer.")
    assert str(caught.value) == text


def test_other_errors_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_current", Overseer("Server 0 ended."))
    with pytest.raises(ValueError, match=r"^of the program$"), with_last_words():
        raise ValueError("of the program")

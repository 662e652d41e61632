"""Programs that share a loader, as processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asgd.caches import shared_loader
from lightning_asgd.caches.batch_board import Program, read_batch, write_batch
from lightning_asgd.caches.cache import CachedDataset
from lightning_asgd.caches.named_memory import name_of
from lightning_asgd.caches.shared_loader import SharedLoader
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError

SAMPLES, BATCH = 60, 4
FORK = multiprocessing.get_context("fork")


class Augmented:
    """Samples with a random number each; it notes which were made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        with (self.folder / "made").open("ab") as file:
            file.write(bytes([index]))
        return index, torch.rand(3)

    def made(self) -> Counter[int]:
        return Counter((self.folder / "made").read_bytes())


def train(folder: Path, name: str, programs: int, epochs: int, slow_s: float, sends: Any) -> None:
    """A program: notes its batches, and reports each."""
    loader = SharedLoader(Augmented(folder), programs, batch_size=BATCH, shuffle=True, patience_s=20.0)
    seen = []
    for _ in range(epochs):
        for batch in loader:
            seen.append(batch)
            sends.send(len(seen))
            time.sleep(slow_s)
    torch.save(seen, folder / name)
    loader.close()


def started(folder: Path, programs: int, epochs: int, slow_s: float = 0.0) -> list[tuple[Any, Any]]:
    processes = []
    for number in range(programs):
        receives, sends = FORK.Pipe(duplex=False)
        process = FORK.Process(target=train, args=(folder, f"{number}.pt", programs, epochs, slow_s, sends))
        process.start()
        sends.close()
        processes.append((process, receives))
    return processes


def end(process: Any, receives: Any) -> None:
    """Let a program end; it must not wait to be heard."""
    try:
        while receives.poll(30):
            receives.recv()
    except EOFError:
        pass
    process.join(30)
    assert process.exitcode == 0


def test_programs_train_on_the_same_batches_which_are_made_once(tmp_path: Path) -> None:
    for process, receives in started(tmp_path, 3, epochs=2):
        end(process, receives)
    first, *others = (torch.load(tmp_path / f"{n}.pt") for n in range(3))
    assert len(first) == 2 * SAMPLES // BATCH
    for other in others:
        for (mine, numbers), (theirs, same) in zip(first, other, strict=True):
            assert torch.equal(mine, theirs)
            assert torch.equal(numbers, same)
    halves = [torch.cat([mine for mine, _ in half]).tolist() for half in (first[:15], first[15:])]
    assert halves[0] != halves[1]
    assert sorted(halves[0]) == sorted(halves[1]) == list(range(SAMPLES))
    assert Augmented(tmp_path).made() == Counter([*range(SAMPLES)] * 2)


def test_a_program_that_is_killed_is_not_waited_for(tmp_path: Path) -> None:
    (killed, heard), *others = started(tmp_path, 3, epochs=2, slow_s=0.01)
    assert heard.recv() == 1
    killed.kill()
    for process, receives in others:
        end(process, receives)
    killed.join()
    for number in (1, 2):
        seen = torch.load(tmp_path / f"{number}.pt")
        assert Counter(torch.cat([mine for mine, _ in seen]).tolist()) == Counter([*range(SAMPLES)] * 2)


@pytest.mark.parametrize("batches", [0, 3, 15])
@pytest.mark.parametrize("closes", [False, True])
def test_a_program_that_stops_anywhere_begins_the_next_epoch(tmp_path: Path, batches: int, closes: bool) -> None:
    loader = SharedLoader(Augmented(tmp_path), 1, batch_size=BATCH)
    epoch = iter(loader)
    for _ in range(batches):
        next(epoch)
    if closes:
        epoch.close()
    assert [mine.tolist() for mine, _ in loader] == [list(range(i, i + BATCH)) for i in range(0, SAMPLES, BATCH)]
    del epoch  # too late to matter
    assert len(list(loader)) == 15


def test_augmentation_is_new_in_every_epoch(tmp_path: Path) -> None:
    loader = SharedLoader(Augmented(tmp_path), 1, batch_size=SAMPLES)
    (one,), (other,) = (list(loader) for _ in range(2))
    assert torch.equal(one[0], other[0])
    assert not torch.equal(one[1], other[1])


def test_programs_that_end_their_epochs_early_stay_together(tmp_path: Path) -> None:
    mine, theirs = (SharedLoader(Augmented(tmp_path), 2, batch_size=BATCH, shuffle=True, seed=n) for n in (0, 0))
    theirs._me = Program(7, os.getpid(), mine._me.started)  # as if it were another process
    seen: list[list[int]] = []

    def begin(loader: SharedLoader) -> list[list[int]]:
        return [numbers.tolist() for (numbers, _), _ in zip(loader, range(9), strict=False)]

    for _ in range(6):
        with ThreadPoolExecutor(2) as threads:
            one, other = threads.map(begin, (mine, theirs))
        assert one == other
        seen.append(one[0])
    assert len({tuple(each) for each in seen}) > 1


def test_a_loader_that_is_gone_leaves_the_others_nothing_wrong(tmp_path: Path) -> None:
    """Its process lives on, and opens other files under the same numbers."""
    mine = SharedLoader(Augmented(tmp_path), 1, batch_size=BATCH, patience_s=0.1)
    theirs = SharedLoader(Augmented(tmp_path), 1, batch_size=BATCH)
    theirs._me = Program(7, os.getpid(), mine._me.started)
    with theirs._memory.locked():
        theirs._board.join(theirs._me)  # so that batches are kept for it
    for _ in zip(range(10), mine, strict=False):
        pass
    mine.close()
    others = [os.memfd_create("others") for _ in range(20)]
    for file in others:
        os.ftruncate(file, 10_000)
    assert [n.tolist() for n, _ in theirs] == [list(range(i, i + BATCH)) for i in range(0, SAMPLES, BATCH)]
    for file in others:
        os.close(file)


def test_a_program_that_closes_keeps_its_batches_until_the_others_have_them(tmp_path: Path) -> None:
    mine, theirs = (SharedLoader(Augmented(tmp_path), 2, batch_size=BATCH) for _ in range(2))
    theirs._me = Program(7, os.getpid(), mine._me.started)
    with theirs._memory.locked():
        theirs._board.join(theirs._me)
    first = list(mine)
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(mine.close)
        second = list(theirs)
        closing.result(30)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))
    assert Augmented(tmp_path).made() == Counter(range(SAMPLES))


def test_the_last_program_of_several_does_not_wait_for_the_others_in_every_epoch(tmp_path: Path) -> None:
    mine, theirs = (SharedLoader(Augmented(tmp_path), 2, batch_size=BATCH) for _ in range(2))
    theirs._me = Program(7, os.getpid(), mine._me.started)
    with theirs._memory.locked():
        theirs._board.join(theirs._me)
    assert len(list(mine)) == 15
    theirs.close()
    begun = time.monotonic()
    assert len(list(mine)) == 15
    assert time.monotonic() < begun + 30  # the patience is a minute


def test_a_forked_process_is_a_program_of_its_own(tmp_path: Path) -> None:
    loader = SharedLoader(Augmented(tmp_path), 1, batch_size=BATCH)
    assert len(list(loader)) == 15
    process = FORK.Process(target=lambda: os._exit(len(list(loader))))
    process.start()
    process.join(30)
    assert process.exitcode == 15


def test_two_iterators_at_a_time_are_refused(tmp_path: Path) -> None:
    loader = SharedLoader(Augmented(tmp_path), 1, batch_size=BATCH)
    epoch = iter(loader)
    next(epoch)
    list(loader)
    with pytest.raises(ASGDError, match="one iterator at a time"):
        next(epoch)


def test_a_program_that_stops_before_its_first_batch_is_not_waited_for(tmp_path: Path) -> None:
    loader = SharedLoader(Augmented(tmp_path), 2, batch_size=BATCH, patience_s=30)

    def begin() -> None:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        next(iter(loader))

    with pytest.raises(KeyboardInterrupt):
        begin()
    assert len(list(SharedLoader(Augmented(tmp_path), 1, batch_size=BATCH))) == 15


def test_nothing_is_left_open(tmp_path: Path) -> None:
    def files() -> set[str]:
        gc.collect()
        return {name for name in links("/proc/self/fd") if "lightning-asgd" in name}

    def links(folder: str) -> Iterator[str]:
        for name in os.listdir(folder):
            with suppress(OSError):
                yield os.readlink(f"{folder}/{name}")

    before = files()
    loader = SharedLoader(Augmented(tmp_path), 1, batch_size=BATCH)
    for _ in range(2):
        assert len(list(loader)) == len(loader) == 15
        assert files() > before
    del loader
    assert files() == before


class Broken(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ArithmeticError("sample 5 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("processes", [0, 1])
def test_what_the_data_set_raises_reaches_the_program(tmp_path: Path, processes: int) -> None:
    loader = SharedLoader(Broken(tmp_path), 1, batch_size=BATCH, num_workers=processes)
    with pytest.raises(ArithmeticError, match="sample 5 is broken"):
        list(loader)


def test_programs_that_are_not_there_are_waited_for_no_longer_than_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(list(SharedLoader(Augmented(tmp_path), 2, batch_size=30, patience_s=0.1))) == 2
    assert "1 of 2 programs have found each other after 0.1 s" in caplog.text


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(6).reshape(2, 3),
        {"x": torch.rand(3, 0), "y": [torch.tensor(1.5), "text"]},
        (torch.ones(2, dtype=torch.bfloat16), torch.eye(3)[:, 1], torch.eye(3).to_sparse(), None),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
)
def test_a_batch_is_read_as_it_was_written(batch: Any) -> None:
    descriptor, nbytes = write_batch(batch, (3, 4))
    found = read_batch(os.getpid(), descriptor, nbytes, (3, 4))
    with pytest.raises(LookupError, match="has another batch there"):
        read_batch(os.getpid(), descriptor, nbytes, (3, 5))
    os.close(descriptor)
    assert repr(found) == repr(batch)
    for value in torch.utils._pytree.tree_leaves(found):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
            value.add_(1)  # it belongs to its reader
    with pytest.raises(LookupError):
        read_batch(os.getpid(), descriptor, nbytes, (3, 4))


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    for match, arguments, options in (
        ("programs=0", (0,), {}),
        ("batch_size=0", (1,), {"batch_size": 0}),
        ("at least a batch of 61", (1,), {"batch_size": 61, "drop_last": True}),
        ("was given sampler. Expected num_workers", (1,), {"sampler": [1]}),
    ):
        with pytest.raises(ConfigurationError, match=match):
            SharedLoader(Augmented(tmp_path), *arguments, **options)
    with pytest.raises(ConfigurationError, match=r"generator. Expected a map-style"):
        SharedLoader((i for i in range(3)), 1)
    with pytest.raises(ConfigurationError, match=r"list or its collate_fn cannot be pickled: .* or a name"):
        SharedLoader([lambda: 0], 1)
    assert len(SharedLoader([lambda: 0], 1, name="functions")) == 1


class Collator:
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, samples: list[Any]) -> Any:
        return samples[: self.length]

    def first(self, samples: list[Any]) -> Any:
        return samples[: self.length]


def _of(length: int) -> list[Any]:
    """What may make batches, each with a length."""
    return [
        Collator(length),
        Collator(length).first,
        partial(torch.utils.data.default_collate, length=length),
        lambda samples: samples[:length],
        lambda samples, length=length: samples[:length],
        (lambda samples: torch.stack(samples)) if length == 1 else (lambda samples: torch.cat(samples)),
    ]


@pytest.mark.parametrize("kind", range(6))
def test_programs_whose_batches_are_made_in_other_ways_do_not_share_them(kind: int) -> None:
    one, same, other = (name_of(shared_loader._identity(_of(length)[kind])) for length in (1, 1, 2))
    assert one == same != other
    plain = [name_of(shared_loader._identity(each)) for each in (torch.utils.data.default_collate, list, len)]
    assert len(set(plain)) == 3


@pytest.mark.parametrize("name", ["", "data"])
def test_programs_in_two_folders_share_a_loader_of_a_relative_path_only_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found_by = set()
    for fold in ("fold1", "fold2"):
        (tmp_path / fold / "data").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / fold)
        for collate in (list, Collator(threading.Lock())) if name else (list,):  # the second cannot be pickled
            found_by.add(shared_loader._name_of(Augmented(Path("data")), collate, name, (1, False, False, 0)))
    assert len(found_by) == 2, "one for each folder, or for each of the two ways to make a batch"


def test_a_cached_data_set_has_the_same_name_in_every_process() -> None:
    first = CachedDataset(list(range(9)), 1_000)
    assert not first.cache.found
    other = CachedDataset(list(range(9)), 1_000)
    other._compares = True  # as if another process had made its cache
    assert name_of(first) == name_of(other)

"""Served tables: servers, workers and files in this process, in a scripted order."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Embedding

from lightning_asgd.core.calls.inprocess import InProcessTransport
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError, ProtocolError, SnapshotError
from lightning_asgd.core.protocol import Join, Leave
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.tables.served import row_files
from lightning_asgd.tables.served.client import RowCache, TableClient
from lightning_asgd.tables.served.clients import TableClients
from lightning_asgd.tables.served.embedding import ServedEmbedding
from lightning_asgd.tables.served.messages import FetchRows, PushRows, TableSpec
from lightning_asgd.tables.served.row_store import RowStore, first_values, read_rows

ROWS, WIDTH = 30, 4


def spec(folder: Path, **changes: Any) -> TableSpec:
    about = {"rows": ROWS, "width": WIDTH, "optimizer": "sgd", "init_std": 1.0, "seed": 3, **changes}
    return TableSpec(str(folder), **{"name": str(folder), **about})


class Servers:
    """Servers with one session, which all of its workers have joined."""

    def __init__(self, servers: int = 1, workers: int = 1) -> None:
        self.services = [Service(lambda: 0.0) for _ in range(servers)]
        self.transport = InProcessTransport([each.handle for each in self.services])
        self.workers = workers
        for server in range(servers):
            for worker in range(workers):
                self.transport.call(server, Join("test", worker, workers), 1.0).wait()

    def client(self, table: TableSpec, worker: int = 0, *, cache_rows: int = 8, max_age: int = 1) -> TableClient:
        connection = Connection(self.transport, "test", worker, self.workers, timeout_s=10.0)
        return TableClient(table, lambda: connection, cache_rows, max_age, lambda: 1.0)

    def close(self) -> None:
        for each in self.services:
            each.close()


# ---------------------------------------------------------------------- files


def test_rows_begin_with_values_that_follow_from_the_seed(tmp_path: Path) -> None:
    table = spec(tmp_path / "t", rows=100_000, width=5)
    first = first_values(torch.arange(100_000), table)
    assert first.shape == (100_000, 5)
    assert abs(float(first.mean())) < 0.01
    assert abs(float(first.std()) - 1) < 0.01
    assert abs(float(torch.corrcoef(first.T).fill_diagonal_(0).abs().max())) < 0.02
    torch.testing.assert_close(first_values(torch.tensor([7, 99_999]), table), first[[7, 99_999]], rtol=0, atol=0)
    other = spec(tmp_path / "t", rows=100_000, width=5, seed=4)
    assert not bool((first_values(torch.arange(10), other) == first[:10]).any())


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "row_adagrad", "adam"])
@pytest.mark.parametrize("servers", [1, 3])
def test_rows_learn_as_with_an_optimizer_of_torch(tmp_path: Path, optimizer: str, servers: int) -> None:
    table = spec(tmp_path / "t", optimizer=optimizer)
    stores = [RowStore(table, server, servers) for server in range(servers)]
    weight = torch.nn.Parameter(first_values(torch.arange(ROWS), table))
    own = {
        "sgd": lambda: torch.optim.SGD([weight], lr=0.1),
        "adagrad": lambda: torch.optim.Adagrad([weight], lr=0.1),
        "row_adagrad": lambda: None,
        "adam": lambda: torch.optim.SparseAdam([weight], lr=0.1),
    }[optimizer]()
    sums = torch.zeros(ROWS, 1)
    generator = torch.Generator().manual_seed(0)
    for seq in range(1, 6):
        rows = (
            torch.arange(ROWS) if optimizer == "adam" else torch.randperm(ROWS, generator=generator)[:9].sort().values
        )
        gradients = torch.randn(len(rows), WIDTH, generator=generator)
        for server, store in enumerate(stores):
            mine = rows % servers == server
            store.push(rows[mine] // servers, gradients[mine], 0.1, 1, seq)
        if own is None:
            sums[rows] += gradients.square().mean(1, keepdim=True)
            weight.data[rows] -= 0.1 * gradients / (sums[rows].sqrt() + 1e-10)
        else:
            weight.grad = torch.sparse_coo_tensor(rows[None], gradients, weight.shape)
            own.step()
    torch.testing.assert_close(
        read_rows(tmp_path / "t", torch.arange(ROWS), table), weight.detach(), rtol=1e-6, atol=1e-6
    )
    for store in stores:
        store.close()


class Killed(BaseException):
    """A process ends here."""


@pytest.mark.parametrize("when", range(7))
def test_a_process_that_ends_at_any_moment_of_a_push_leaves_all_of_it_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    table = spec(tmp_path / "t", init_std=0.0)
    store, one = RowStore(table, 0, 1), torch.ones(3, WIDTH)
    store.push(torch.tensor([1, 2, 3]), -one, 1.0, 5, 1)
    left = iter(range(when, -1, -1))
    write = os.pwrite

    def step() -> None:
        if next(left) == 0:
            raise Killed

    def some(fd: int, data: Any, at: int) -> int:
        step()
        return write(fd, bytes(data)[: max(1, len(data) // 2)], at)

    monkeypatch.setattr(row_files.os, "pwrite", some)
    apply = row_files.RowFiles._apply

    def half(self: Any, numbers: Tensor, records: Tensor, *about: int) -> None:
        self.records[numbers[:1]] = records[:1]
        raise Killed

    monkeypatch.setattr(row_files.RowFiles, "_apply", half)
    with pytest.raises(Killed):
        store.push(torch.tensor([2, 3, 4]), -one, 1.0, 5, 2)
    monkeypatch.undo()
    assert row_files.RowFiles._apply is apply
    store._files.close()
    again = RowStore(table, 0, 1)
    before = again.read(torch.arange(ROWS)).values[:, 0].tolist()[:6]
    assert before in ([0, 1, 1, 1, 0, 0], [0, 1, 2, 2, 1, 0])
    again.push(torch.tensor([2, 3, 4]), -one, 1.0, 5, 2)  # it was not acknowledged, so its worker sends it again
    assert again.read(torch.arange(ROWS)).values[:, 0].tolist()[:6] == [0, 1, 2, 2, 1, 0]
    again.close()


def test_a_folder_belongs_to_one_table_and_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "_LOCKED_S", 0.0)
    store = RowStore(spec(tmp_path / "t"), 0, 2)
    with pytest.raises(ConfigurationError, match="in use by process"):
        RowStore(spec(tmp_path / "t"), 0, 2)
    RowStore(spec(tmp_path / "t"), 1, 2).close()
    store.close()
    with pytest.raises(ConfigurationError, match=r"width=4.* Expected width=5"):
        RowStore(spec(tmp_path / "t", width=5), 0, 2)
    with pytest.raises(ConfigurationError, match=r"servers=2.* Expected servers=3"):
        RowStore(spec(tmp_path / "t"), 0, 3)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="holds other files"):
        RowStore(spec(tmp_path / "other"), 0, 1)
    assert [each.name for each in (tmp_path / "other").iterdir()] == ["notes.txt"]
    (tmp_path / "t" / "rows-1-of-2.table").unlink()
    with pytest.raises(ConfigurationError, match="does not exist on this machine"):
        read_rows(tmp_path / "t", torch.tensor([1]), spec(tmp_path / "t"))


def test_a_copy_is_restored(tmp_path: Path) -> None:
    store, all_rows = RowStore(spec(tmp_path / "t"), 0, 1), torch.arange(ROWS)
    store.push(torch.tensor([4]), torch.ones(1, WIDTH), 1.0, 1, 1)
    saved = store.read(all_rows).values
    store.save(str(tmp_path / "copy"))
    store.push(torch.tensor([4, 5]), torch.ones(2, WIDTH), 1.0, 1, 2)
    store.load(str(tmp_path / "copy"))
    assert torch.equal(store.read(all_rows).values, saved)
    store.push(torch.tensor([5]), torch.ones(1, WIDTH), 1.0, 2, 1)
    changed = store.read(all_rows).values
    store.close()
    assert torch.equal(read_rows(tmp_path / "t", all_rows, spec(tmp_path / "t")), changed)
    assert torch.equal(read_rows(tmp_path / "copy", all_rows, spec(tmp_path / "t")), saved)
    again = RowStore(spec(tmp_path / "t"), 0, 1)
    RowStore(spec(tmp_path / "third", seed=9), 0, 1).close()
    with pytest.raises(ConfigurationError, match=r"seed=9.* Expected seed=3"):
        again.load(str(tmp_path / "third"))
    again.close()


@pytest.mark.parametrize("end", ["table", "clients", "journal", "json"])
@pytest.mark.parametrize("copied", [False, True], ids=["table", "copy"])
def test_a_flipped_bit_is_never_read_as_another_row(tmp_path: Path, end: str, copied: bool) -> None:
    """Each of 200 places in a file: it is harmless, or named."""
    folder, all_rows, chance = tmp_path / "t", torch.arange(ROWS), random.Random(3)
    store = RowStore(spec(folder, optimizer="adagrad"), 0, 1)
    for seq in range(1, 4):
        store.push(torch.arange(seq, ROWS, 2), torch.ones(len(range(seq, ROWS, 2)), WIDTH), 1.0, 1, seq)
    values = store.read(all_rows).values
    if copied:
        store.save(str(tmp_path / "copy"))
        folder = tmp_path / "copy"
    store.close()
    path = next(folder.glob(f"*.{end}"), None)
    if path is None:
        assert (end, copied) == ("journal", True)
        return
    whole = path.read_bytes()
    used, named = max(at for at, byte in enumerate(whole) if byte) + 20, []
    for _ in range(200):
        flipped, at = bytearray(whole), chance.randrange(min(used, len(whole)))
        flipped[at] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        try:
            again = RowStore(spec(folder, optimizer="adagrad"), 0, 1)
            try:
                assert torch.equal(again.read(all_rows).values, values)
                assert again.push(torch.tensor([1]), torch.ones(1, WIDTH), 1.0, 1, 3).updates == 3  # it was taken
            finally:
                again.close()
        except ASGDError as error:
            named.append(str(error))
        path.write_bytes(whole)
    assert named or end == "journal"
    assert all(str(folder) in each for each in named)


def test_other_users_read_neither_tables_nor_copies(tmp_path: Path) -> None:
    store = RowStore(spec(tmp_path / "t"), 0, 1)
    store.push(torch.tensor([4]), torch.ones(1, WIDTH), 1.0, 1, 1)
    store.save(str(tmp_path / "copy"))
    store.close()
    files = [each for folder in ("t", "copy") for each in (tmp_path / folder).iterdir()]
    assert len(files) == 8
    assert {each.stat().st_mode & 0o777 for each in files} == {0o600}


def test_rows_that_are_read_while_a_server_writes_them_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, row = RowStore(spec(tmp_path / "t"), 0, 1), torch.tensor([4])
    store.push(row, torch.ones(1, WIDTH), 1.0, 1, 1)
    before, check = row_files._check_sums, []

    def half_written(rows: Tensor, path: Path) -> Tensor:
        check.append(rows.clone())
        rows[0, 1] += len(check) == 1
        return before(rows, path)

    monkeypatch.setattr(row_files, "_check_sums", half_written)
    assert torch.equal(read_rows(tmp_path / "t", row, spec(tmp_path / "t")), first_values(row, store.table) - 1)
    assert len(check) == 2
    store.close()


@pytest.mark.parametrize("end", ["table", "clients"])
def test_a_damaged_table_is_restored_as_its_error_says(tmp_path: Path, end: str) -> None:
    def read(folder: Path) -> Tensor:
        with contextlib.closing(RowStore(spec(folder), 0, 1)) as store:
            return store.read(row).values

    store, row = RowStore(spec(tmp_path / "t"), 0, 1), torch.tensor([4])
    store.push(row, torch.ones(1, WIDTH), 1.0, 1, 1)
    store.push(row + 1, torch.ones(1, WIDTH), 1.0, 1, 2)  # the journal's, which is applied again
    store.save(str(tmp_path / "copy"))
    store.save(str(tmp_path / "damaged"))
    store.close()
    for folder in ("t", "damaged"):
        path = tmp_path / folder / f"rows-0-of-1.{end}"
        content = bytearray(path.read_bytes())
        content[next(at for at, byte in enumerate(content) if byte)] ^= 4
        path.write_bytes(content)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(SnapshotError, match=r"is damaged: 1 of .* rows .* empty the folder"):
            read(tmp_path / "t")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    shutil.rmtree(tmp_path / "t")
    store = RowStore(spec(tmp_path / "t"), 0, 1)
    if end == "table":
        store.load(str(tmp_path / "damaged"))
    with pytest.raises(SnapshotError, match="is damaged"):
        store.read(row) if end == "table" else store.load(str(tmp_path / "damaged"))
    store.load(str(tmp_path / "copy"))
    assert torch.equal(store.read(row).values, first_values(row, store.table) - 1)
    assert store.push(row, torch.ones(1, WIDTH), 1.0, 1, 1).updates == 2  # it was taken
    store.close()


def test_flips_that_a_sum_would_not_show_are_seen(tmp_path: Path) -> None:
    store, row = RowStore(spec(tmp_path / "t"), 0, 1), torch.tensor([4])
    store.push(row, torch.ones(1, WIDTH), 1.0, 1, 1)
    store._files._records[4, 1:3] *= -1  # both signs
    with pytest.raises(SnapshotError, match="is damaged"):
        store.read(row)
    store.close()


def test_a_copy_that_was_not_finished_is_not_taken_for_a_table(tmp_path: Path) -> None:
    store = RowStore(spec(tmp_path / "t"), 0, 1)
    store.push(torch.tensor([4]), torch.ones(1, WIDTH), 1.0, 1, 1)
    store.close()
    for name in ("rows-0-of-1.table", "rows-0-of-1.clients"):
        whole = (tmp_path / "t" / name).read_bytes()
        (tmp_path / "t" / name).write_bytes(whole[:-10])
        with pytest.raises(ConfigurationError, match=rf"{name} has {len(whole) - 10} bytes. Expected {len(whole)}"):
            RowStore(spec(tmp_path / "t"), 0, 1)
        (tmp_path / "t" / name).unlink()
        with pytest.raises(ConfigurationError, match=f"{name} is missing. A copy was not finished"):
            RowStore(spec(tmp_path / "t"), 0, 1)
        (tmp_path / "t" / name).write_bytes(whole)
    RowStore(spec(tmp_path / "t"), 0, 1).close()


# ---------------------------------------------------------------------- the cache


def test_a_copy_that_is_put_in_the_place_of_the_files_gets_no_later_push(tmp_path: Path) -> None:
    store, row = RowStore(spec(tmp_path / "t", init_std=0.0), 0, 1), torch.tensor([2])
    store.push(row, -torch.ones(1, WIDTH), 1.0, 5, 1)
    store.save(str(tmp_path / "copy"))
    for seq in (2, 3):
        store.push(row, -torch.ones(1, WIDTH), 1.0, 5, seq)
    store.close()
    for each in (tmp_path / "copy").iterdir():
        shutil.copy(each, tmp_path / "t")
    again = RowStore(spec(tmp_path / "t", init_std=0.0), 0, 1)
    assert float(again.read(row).values[0, 0]) == 1
    assert again.push(row, -torch.ones(1, WIDTH), 1.0, 5, 2).updates == 2
    again.close()


@given(st.lists(st.tuples(st.sampled_from(["put", "read", "refresh", "clear"]), st.sets(st.integers(0, 12)))))
def test_the_cache_holds_the_latest_values_of_what_was_used_last(script: list[tuple[str, set[int]]]) -> None:
    cache, known = RowCache(6, 2, max_age=3), dict[int, tuple[float, int]]()
    for step, (what, rows) in enumerate(script):
        numbers = torch.tensor(sorted(rows), dtype=torch.int64)
        values = torch.full((len(rows), 2), float(step))
        here, out = {int(n) for n in cache._numbers}, torch.full((len(rows), 2), -1.0)
        if what == "put":
            cache.put(numbers, values, step)
            known.update((n, (float(step), step)) for n in rows)
            held = {int(n) for n in cache._numbers}
            assert len(held) == len(cache) == min(6, len(here | rows))
            assert held >= rows or len(rows) > 6
        elif what == "refresh":
            cache.refresh(numbers, values, step)
            known.update((n, (float(step), step)) for n in rows & here)
        elif what == "clear":
            cache.clear()
            assert len(cache) == 0
        else:
            stale = {int(n) for n in cache.missing(numbers, step)}
            missing, ages = cache.read(numbers, step, out)
            assert missing.tolist() == sorted(stale)
            assert ages == sum(step - known[n][1] for n in rows - stale)
            assert {n for n, v in zip(sorted(rows), out[:, 0].tolist(), strict=True) if v >= 0} == rows & here
            assert stale == {n for n in rows if n not in here or step - known[n][1] >= 3}
            assert all(out[i, 0] == known[n][0] for i, n in enumerate(sorted(rows)) if n in here)


# ---------------------------------------------------------------------- workers and servers


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    steps=st.lists(st.tuples(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=12), st.booleans()), max_size=8),
    servers=st.integers(1, 3),
    cache_rows=st.sampled_from([1, 4, 100]),
)
def test_one_worker_trains_as_with_a_table_of_its_own(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[list[int], bool]],
    servers: int,
    cache_rows: int,
) -> None:
    """Whatever is fetched ahead, and however few rows are kept, it never reads a row without its own updates."""
    folder = tmp_path_factory.mktemp("served")
    cluster = Servers(servers)
    served = ServedEmbedding(ROWS, WIDTH, folder=folder / "t", optimizer="adagrad", lr=0.5, cache_rows=cache_rows)
    served.attach(cluster.client(served.table, cache_rows=cache_rows, max_age=5))
    dense = Embedding(ROWS, WIDTH)
    dense.weight.data = first_values(torch.arange(ROWS), served.table)
    own = torch.optim.Adagrad(dense.parameters(), lr=0.5)
    for number, (indices, ahead) in enumerate(steps):
        if ahead and number + 1 < len(steps):
            served.prefetch(torch.tensor(steps[number + 1][0]))
        batch = torch.tensor(indices)
        for module in (served, dense):
            (module(batch).square().sum() + module(batch[:1]).sum()).backward()  # twice in a step
        own.step()
        own.zero_grad()
        served.step()
    rows = torch.arange(ROWS)
    with torch.no_grad():
        torch.testing.assert_close(served(rows), dense(rows), rtol=1e-6, atol=1e-6)
        cluster.close()
        served.attach(None)
        torch.testing.assert_close(served(rows), dense(rows), rtol=1e-6, atol=1e-6)


def test_each_push_counts_once(tmp_path: Path) -> None:
    cluster, table = Servers(1, workers=2), spec(tmp_path / "t", init_std=0.0)
    about = ("test", 0, table, 0, 1)
    push = PushRows(*about, torch.tensor([3]), -torch.ones(1, WIDTH), 1.0, 77, 1)
    for _ in range(3):
        assert cluster.transport.call(0, push, 1.0).wait().values[0, 0] == 1
    cluster.close()
    again = Servers(1, workers=2)
    assert again.transport.call(0, push, 1.0).wait().values[0, 0] == 1
    assert again.transport.call(0, copy.replace(push, seq=2) if hasattr(copy, "replace") else push, 1.0).wait()
    again.close()


def test_a_worker_that_left_pushes_no_more(tmp_path: Path) -> None:
    cluster, table = Servers(1, workers=2), spec(tmp_path / "t", init_std=0.0)
    cluster.transport.call(0, Leave("test", 1, "gone", final=True), 1.0).wait()
    push = PushRows("test", 1, table, 0, 1, torch.tensor([3]), -torch.ones(1, WIDTH), 1.0, 77, 1)
    assert cluster.transport.call(0, push, 1.0).wait().error == "WorkerLostError"
    assert cluster.transport.call(0, FetchRows("test", 0, table, 0, 1, torch.tensor([3])), 1.0).wait().values.sum() == 0
    other = FetchRows("other", 0, table, 0, 1, torch.tensor([3]))
    assert "not the current one" in cluster.transport.call(0, other, 1.0).wait().message
    cluster.close()


@pytest.mark.parametrize(
    ("numbers", "gradients", "what"),
    [
        (torch.tensor([ROWS]), torch.ones(1, WIDTH), "ascending whole numbers from 0"),
        (torch.tensor([-1]), torch.ones(1, WIDTH), "ascending whole numbers from 0"),
        (torch.tensor([1.0]), torch.ones(1, WIDTH), "ascending whole numbers from 0"),
        (torch.tensor([2, 1]), torch.ones(2, WIDTH), "ascending whole"),
        (torch.tensor([1, 1]), torch.ones(2, WIDTH), "ascending whole"),
        (torch.tensor([1]), torch.ones(2, WIDTH), "Expected shape"),
        (torch.tensor([1]), torch.ones(1, WIDTH, dtype=torch.float64), "float64"),
    ],
)
def test_what_cannot_be_rows_is_refused(tmp_path: Path, numbers: Tensor, gradients: Tensor, what: str) -> None:
    store = RowStore(spec(tmp_path / "t"), 0, 1)
    with pytest.raises(ProtocolError, match=what):
        store.push(numbers, gradients, 1.0, 1, 1)
    store.close()


def test_gradients_that_are_not_finite_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Servers()
    client = cluster.client(spec(tmp_path / "t"))
    before = client.read(torch.tensor([1, 2]))
    client.step(torch.tensor([1, 2]), torch.full((2, WIDTH), float("nan")), 1.0)
    assert torch.equal(client.read(torch.tensor([1, 2])), before)
    assert client.stats.rejected == 1
    assert "NaN or infinity" in caplog.text
    client.step(torch.tensor([1, 2]), torch.ones(2, WIDTH), 1.0)
    assert torch.equal(client.read(torch.tensor([1, 2])), before - 1)
    cluster.close()


def test_rows_of_other_workers_arrive_when_they_are_old(tmp_path: Path) -> None:
    cluster, table = Servers(1, workers=2), spec(tmp_path / "t", init_std=0.0)
    mine, other = (cluster.client(table, worker, max_age=3) for worker in (0, 1))
    row = torch.tensor([5])
    assert float(mine.read(row)[0, 0]) == 0
    other.step(row, -torch.ones(1, WIDTH), 1.0)
    other.settle()
    seen = []
    for _ in range(4):
        seen.append(float(mine.read(row)[0, 0]))
        mine.step(torch.empty(0, dtype=torch.int64), torch.empty(0), 1.0)
    assert seen == [0, 0, 0, 1]
    assert (mine.stats.read, mine.stats.fetched, mine.stats.ages) == (5, 2, 3)
    mine.forget()
    other.step(row, -torch.ones(1, WIDTH), 1.0)
    other.settle()
    assert float(mine.read(row)[0, 0]) == 2
    cluster.close()


def test_workers_with_a_table_in_different_folders_are_told(tmp_path: Path) -> None:
    """Each worker runs the script, which may make a temporary folder."""
    cluster = Servers(1, workers=2)
    cluster.client(spec(tmp_path / "one", name="users")).read(torch.tensor([1]))
    cluster.client(spec(tmp_path / "other", name="items"), 1).read(torch.tensor([1]))
    with pytest.raises(ConfigurationError, match="Expected one folder for all workers"):
        cluster.client(spec(tmp_path / "two", name="users"), 1).read(torch.tensor([1]))
    cluster.transport.call(0, Leave("test", 1, "done"), 1.0).wait()
    cluster.client(spec(tmp_path / "two", name="users")).read(torch.tensor([1]))
    cluster.close()


def test_workers_with_different_tables_in_a_folder_are_told(tmp_path: Path) -> None:
    cluster = Servers(1, workers=2)
    cluster.client(spec(tmp_path / "t")).read(torch.tensor([1]))
    with pytest.raises(ConfigurationError, match="a folder for each table"):
        cluster.client(spec(tmp_path / "t", seed=8), 1).read(torch.tensor([1]))
    cluster.close()


def test_files_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cluster = Servers()
    with pytest.raises(SnapshotError, match=r"The files of .*file/t.* cannot be used: .*Expected a folder"):
        cluster.client(spec(tmp_path / "file" / "t")).read(torch.tensor([1]))
    cluster.close()


def test_files_that_were_removed_are_noticed(tmp_path: Path) -> None:
    """While a worker trains, by the number of pushes; else the next message makes a new table."""
    cluster, table, row = Servers(), spec(tmp_path / "t", init_std=0.0), torch.tensor([5])
    client = cluster.client(table)
    client.step(row, -torch.ones(1, WIDTH), 1.0)
    client.settle()
    shutil.rmtree(tmp_path / "t")
    assert float(cluster.client(table).read(row)[0, 0]) == 0
    client.forget()
    with pytest.raises(ASGDError, match=r"holds 0 pushes\. Expected at least 1"):
        client.read(row)
    client.note_replaced()
    assert float(client.read(row)[0, 0]) == 0
    cluster.close()


def test_a_copy_of_a_part_that_was_lost_is_noticed(tmp_path: Path) -> None:
    servers = Servers(2)
    client = servers.client(spec(tmp_path / "t"))
    client.step(torch.arange(4), torch.ones(4, WIDTH), 1.0)
    client.settle()
    client.save(str(tmp_path / "copy"))
    shutil.rmtree(tmp_path / "t")  # as on another machine, on which a server was started in the place of a lost one
    with pytest.raises(ASGDError, match=r"holds 0 pushes\. Expected at least 1"):
        client.save(str(tmp_path / "another"))
    servers.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_the_output_and_not_the_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    servers = Servers()
    table = ServedEmbedding(ROWS, WIDTH, folder=tmp_path / "t", optimizer="sgd", lr=1.0, init_std=0.0)
    table.attach(servers.client(table.table))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for _ in range(2):  # two lookups in a step
            found = table(torch.tensor([1, 2, 1]))
            assert found.dtype is dtype
            found.sum().backward()
        table.step()
        assert table(torch.tensor([1])).tolist() == [[-4.0] * WIDTH]
        table.attach(None)
        assert table(torch.tensor([2])).tolist() == [[-2.0] * WIDTH]
    finally:
        torch.set_default_dtype(before)
        servers.close()


def test_another_process_may_have_the_files_once_a_worker_has_left(tmp_path: Path) -> None:
    cluster, table, row = Servers(1, workers=2), spec(tmp_path / "t", init_std=0.0), torch.tensor([5])
    client = cluster.client(table)
    client.step(row, -torch.ones(1, WIDTH), 1.0)
    client.settle()
    cluster.transport.call(0, Leave("test", 1, "done"), 1.0).wait()
    again = RowStore(table, 0, 1)
    again.close()
    assert float(client.read(row)[0, 0]) == 1
    cluster.close()


def test_workers_load_a_copy_together(tmp_path: Path) -> None:
    cluster, table, row = Servers(2, workers=2), spec(tmp_path / "t", init_std=0.0), torch.tensor([5])
    mine, other = cluster.client(table), cluster.client(table, 1)
    mine.step(row, -torch.ones(1, WIDTH), 1.0)
    mine.save(str(tmp_path / "copy"))
    other.step(row, -torch.ones(1, WIDTH), 1.0)
    assert float(other.read(row)[0, 0]) == 2
    other.note_replaced()
    mine.load(str(tmp_path / "copy"))
    assert [float(client.read(row)[0, 0]) for client in (mine, other)] == [1, 1]
    with pytest.raises(ConfigurationError, match="copied to itself"):
        mine.save(table.folder)
    with pytest.raises(ProtocolError, match="Expected an absolute path"):
        mine.save("copy")
    cluster.close()


# ---------------------------------------------------------------------- the module


def test_gradients_are_pushed_as_those_of_parameters_are_used(tmp_path: Path) -> None:
    """Also in evaluation mode; those that ``zero_grad()`` removes are not, and those of several passes add up."""
    cluster = Servers()
    module = torch.nn.Module()
    module.table = ServedEmbedding(ROWS, WIDTH, folder=tmp_path / "t", optimizer="sgd", lr=1.0, init_std=0.0).eval()
    module.weight = torch.nn.Parameter(torch.zeros(1))
    connection = Connection(cluster.transport, "test", 0, 1, timeout_s=10.0)
    clients, optimizer = TableClients(module, lambda: connection, lambda: 1.0), torch.optim.SGD([module.weight], lr=1.0)
    clients.attach()
    clients.watch([optimizer])

    def backward(*rows: int) -> None:
        (module.weight.sum() - module.table(torch.tensor(rows)).sum()).backward()

    backward(1)
    optimizer.zero_grad()
    backward(2, 3)
    backward(3, 3)
    optimizer.step()
    optimizer.step()
    backward(4)
    clients.discard()
    optimizer.step()
    for _ in range(20):
        backward(0)
        assert len(module.table._gradients) < 8
    module.table.lr = torch.tensor(0.5)
    optimizer.step()
    with torch.no_grad():
        assert module.table(torch.arange(5))[:, 0].tolist() == [10, 0, 1, 3, 0]
    module.table.lr = -1
    with pytest.raises(ConfigurationError, match=r"lr of the served table in .*=-1"):
        optimizer.step()
    clients.close()
    assert "zero_grad" not in vars(optimizer)
    with pytest.raises(ConfigurationError, match="outside of a fit"):
        backward(1)
    twice = torch.nn.ModuleList([module.table, copy.deepcopy(module.table)])
    with pytest.raises(ConfigurationError, match="Expected one for each table"):
        TableClients(twice, lambda: connection, lambda: 1.0)
    cluster.close()


def test_outside_of_a_fit_rows_are_read_and_not_trained(tmp_path: Path) -> None:
    store = RowStore(spec(tmp_path / "t"), 0, 1)
    store.push(torch.tensor([2]), torch.ones(1, WIDTH), 1.0, 1, 1)
    served = ServedEmbedding(ROWS, WIDTH, folder=tmp_path / "t", optimizer="sgd", seed=3)
    assert torch.equal(served(torch.tensor([[2, 1]]))[0].flip(0), store.read(torch.tensor([1, 2])).values)
    with pytest.raises(ConfigurationError, match="outside of a fit"):
        served(torch.tensor([2])).sum().backward()
    with pytest.raises(IndexError, match="Expected 0 to 29"):
        served(torch.tensor([ROWS]))
    with pytest.raises(TypeError, match=r"Row numbers of torch\.float32 .* Expected torch\.int64"):
        served(torch.tensor([1.0]))
    store.close()
    assert copy.deepcopy(served)(torch.tensor([2])).shape == (1, WIDTH)
    assert list(served.parameters()) == []
    assert served.state_dict() == {}


@pytest.mark.parametrize(
    "wrong", [{"optimizer": "lion"}, {"lr": -1.0}, {"init_std": float("inf")}, {"cache_rows": 0}, {"max_age": 0}]
)
def test_wrong_arguments_are_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        ServedEmbedding(ROWS, WIDTH, folder=tmp_path, **wrong)

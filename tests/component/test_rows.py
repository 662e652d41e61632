"""Tables of which only rows are exchanged: workers and servers in this process, in a scripted order."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd import Advanced
from lightning_asgd.algorithms import ASGD, DiLoCo, Downpour, LocalSGD, ScaleByStaleness, SoftSync
from lightning_asgd.core.algorithms.base import Algorithm, Push
from lightning_asgd.core.foundation.errors import ConfigurationError, ProtocolError
from lightning_asgd.core.foundation.layout import Role, build_layout, dense
from lightning_asgd.core.protocol import Exchange, Rows
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.setup import tables_of
from lightning_asgd.core.worker.synchronizer import run
from lightning_asgd.tables.rows.server import RowRules
from tests.helpers.cluster import Cluster

ROWS, WIDTH = 40, 3


def module(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "table": torch.nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator)),
        "other": torch.nn.Parameter(torch.randn(2, WIDTH, generator=generator)),
        "dense": torch.randn(5, generator=generator),
    }


def move(parameters: dict[str, torch.Tensor], rows: list[int], amount: float, *, told: bool = True) -> None:
    """Train some rows; the hooks of their gradients are called only if ``told``."""
    table = parameters["table"]
    with torch.no_grad():
        table[rows] += amount
        parameters["dense"] += amount
    if told:
        index = torch.tensor(rows, dtype=torch.int64)
        table.grad = None
        torch.nn.functional.embedding(index, table, sparse=True).sum().backward()


def step(exchanger: Exchanger, parameters: dict[str, torch.Tensor], rows: list[int], amount: float, **how: Any) -> None:
    run(exchanger.advance())
    move(parameters, rows, amount, **how)
    exchanger.count_step()


SETTINGS = {"nsync": 1, "advanced": Advanced(overlap=False), "algorithm": ASGD("sum")}


def rarely(nfetch: int) -> dict[str, Any]:
    """Settings with few fetches."""
    return {**SETTINGS, "advanced": Advanced(overlap=False, nfetch=nfetch)}


@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, ROWS - 1), max_size=8), st.booleans()), max_size=12),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["sum", "mean"]),
)
def test_rows_are_exchanged_as_whole_tables_are(
    script: list[tuple[int, list[int], bool]], servers: int, shared: bool, scale: str
) -> None:
    """To the bit, whatever the order; also what moves without a gradient, once all has been compared."""
    found = []
    for tables in ((), ("table", "other")):
        cluster = Cluster(servers, workers=2)
        modules = [module(), module()]
        settings = {**SETTINGS, "algorithm": ASGD(scale)}
        workers = [cluster.enter(rank, modules[rank], shared=shared, tables=tables, **settings) for rank in range(2)]
        for turn, (rank, rows, told) in enumerate(script):
            step(workers[rank], modules[rank], sorted({*rows}), float(turn + 1), told=told)
        for worker in workers:
            run(worker.flush())
        for worker in workers:
            run(worker.fetch())
        found.append(modules)
        for worker in workers:
            worker.close()
        cluster.close()
    for plain, by_rows in zip(*found, strict=True):
        for name in plain:
            torch.testing.assert_close(plain[name], by_rows[name], rtol=1e-5, atol=1e-5)
    assert all(torch.equal(found[1][0][name], found[1][1][name]) for name in found[1][0])


@pytest.mark.parametrize("shared", [False, True])
def test_bytes_are_in_proportion_to_rows(shared: bool) -> None:
    cluster, parameters = Cluster(2, workers=1), module()
    worker = cluster.enter(0, parameters, shared=shared, tables=("table", "other"), **SETTINGS)
    record = []
    for rows in ([], [3], [3, 4, 20, 39], [*range(ROWS)]):
        step(worker, parameters, rows, 1.0)
        run(worker.advance())
        run(worker.channels[0].finish())
        record.append(worker.stats.records[-1])
    whole = 4 * (ROWS + 2) * WIDTH  # with the other table
    rest = 4 * 5
    sizes = [each.bytes_pushed - rest for each in record]
    assert sizes[0] == 0
    assert sizes[1] == 4 * WIDTH + 4
    assert sizes[2] == 4 * (4 * WIDTH + 4)
    assert sizes[3] == whole
    assert [each.bytes_fetched - rest for each in record] == sizes


def test_a_row_that_a_worker_lacks_is_answered_once() -> None:
    cluster, modules = Cluster(1, workers=2), [module(), module()]
    mine, theirs = (cluster.enter(rank, modules[rank], tables=("table",), **SETTINGS) for rank in range(2))
    step(mine, modules[0], [1, 2], 1.0)
    run(mine.advance())
    step(theirs, modules[1], [5], 1.0)
    run(theirs.advance())
    assert theirs.channels[0].log.in_flight is None
    assert torch.equal(modules[1]["table"][[1, 2]], modules[0]["table"][[1, 2]])
    step(theirs, modules[1], [6], 1.0)
    run(theirs.advance())
    assert theirs.stats.records[-1].bytes_fetched - theirs.stats.records[-1].bytes_pushed == 0


def test_rows_that_move_without_a_gradient_are_found_within_an_interval() -> None:
    cluster, parameters = Cluster(1, workers=1), module()
    worker = cluster.enter(0, parameters, tables=("table",), **SETTINGS)
    step(worker, parameters, [7], 1.0, told=False)
    step(worker, parameters, [8], 1.0)
    run(worker.advance())
    weights = cluster.services[0].session.shards[0].weights[-1].view(ROWS, WIDTH)  # type: ignore[union-attr]
    assert torch.equal(weights, parameters["table"])


@pytest.mark.parametrize("shared", [False, True])
def test_tables_that_a_program_sets_reach_all_workers_whole(shared: bool) -> None:
    cluster, modules = Cluster(2, workers=2), [module(), module()]
    workers = [cluster.enter(r, modules[r], shared=shared, tables=("table", "other"), **SETTINGS) for r in range(2)]
    for rank, worker in enumerate(workers):
        step(worker, modules[rank], [rank], 1.0)
        run(worker.flush())
    for worker in workers:
        run(worker.fetch())
        assert worker.changed() == []
    with torch.no_grad():
        modules[0]["table"].mul_(-2.0)
    assert [worker.changed() for worker in workers] == [["table"], []]
    expected, weights = modules[0]["table"].clone(), [worker.weights() for worker in workers]
    for worker, mine in zip(workers, weights, strict=True):
        worker.replace(mine, sends=worker is workers[0])
    for worker in workers:
        run(worker.fetch())
    assert torch.equal(modules[0]["table"], expected)
    step(workers[0], modules[0], [7], 1.0)
    for worker in workers:
        run(worker.flush())
        run(worker.fetch())
    expected[7] += 1.0
    for parameters in modules:
        assert torch.equal(parameters["table"], expected)


def trained(cluster: Cluster) -> torch.Tensor:
    """The table on the only server."""
    session = cluster.services[0].session
    assert session is not None
    return session.shards[0].weights[-1].view(-1, WIDTH)


def tall() -> dict[str, torch.Tensor]:
    """A table that no single push compares."""
    return {"table": torch.nn.Parameter(torch.zeros(5000, WIDTH)), "dense": torch.zeros(3)}


def test_a_gradient_may_come_before_an_answer_and_its_step_after_it() -> None:
    """As with accumulated gradients: an answer that is merged in between must not make the rows forgotten."""
    cluster, parameters = Cluster(1, workers=1), tall()
    worker = cluster.enter(0, parameters, tables=("table",), **{**SETTINGS, "advanced": Advanced(overlap=True)})
    step(worker, parameters, [0], 1.0)
    run(worker.advance())
    torch.nn.functional.embedding(torch.tensor([4000]), parameters["table"], sparse=True).sum().backward()
    run(worker.advance())
    with torch.no_grad():
        parameters["table"][4000] += 1.0
    worker.count_step()
    run(worker.advance())
    run(worker.channels[0].finish())
    assert trained(cluster)[4000].tolist() == [1.0] * WIDTH


def test_all_is_compared_before_a_sync_point_also_if_the_last_step_was_pushed() -> None:
    cluster, parameters = Cluster(1, workers=1), tall()
    worker = cluster.enter(0, parameters, tables=("table",), **SETTINGS)
    step(worker, parameters, [4000], 1.0, told=False)
    run(worker.advance())
    run(worker.flush())
    run(worker.fetch())
    assert trained(cluster)[4000].tolist() == parameters["table"][4000].tolist() == [1.0] * WIDTH


def test_a_parameter_that_is_replaced_is_compared_on_every_server() -> None:
    cluster, parameters = Cluster(2, workers=1), tall()
    worker = cluster.enter(0, parameters, tables=("table",), **SETTINGS)
    step(worker, parameters, [0], 1.0)
    run(worker.advance())
    parameters["table"] = torch.nn.Parameter(parameters["table"].detach().clone())
    container, _ = worker.channels[0].replica._places[0]
    container["table"] = parameters["table"]
    step(worker, parameters, [10, 4900], 1.0, told=False)
    run(worker.advance())
    for service, row in zip(cluster.services, (10, 2400), strict=True):
        assert service.session is not None
        assert service.session.shards[0].weights[-1].view(-1, WIDTH)[row].tolist() == [1.0] * WIDTH


def test_pushes_without_a_fetch_are_remembered_once() -> None:
    cluster, parameters = Cluster(1, workers=1), module()
    worker = cluster.enter(0, parameters, tables=("table",), **rarely(100))
    replica = worker.channels[0].replica
    for _ in range(20):
        step(worker, parameters, [1, 2, 3], 1.0)
    assert replica.rows is not None
    assert sum(len(rows) for span in replica.rows._each() for rows, _ in span.packed) == 3


@pytest.mark.parametrize("code", ["int8", "topk", "bf16"])
@pytest.mark.parametrize("names", [("table", "dense"), ("table",)])
def test_tables_beside_a_code(code: str, names: tuple[str, ...]) -> None:
    cluster, parameters = Cluster(2, workers=1), {name: value for name, value in module().items() if name in names}
    worker = cluster.enter(0, parameters, tables=("table",), **SETTINGS, compression=code)
    before = parameters["table"].detach().clone()
    for rows in ([1], [2, 39]):
        with torch.no_grad():
            parameters["table"][rows] += 1
        worker.count_step()
        run(worker.advance())
    run(worker.flush())
    run(worker.fetch())
    before[[1, 2, 39]] += 1
    assert torch.equal(parameters["table"], before)


@pytest.mark.parametrize("rows", [(Rows(), Rows()), (Rows(at="x/" + "9" * 5000),), (Rows(at="x/1"), Rows(), Rows())])
def test_a_request_for_rows_that_cannot_be_leaves_the_others_served(rows: tuple[Rows, ...]) -> None:
    cluster, parameters = Cluster(1, workers=1), module()
    worker = cluster.enter(0, parameters, tables=("table",), **SETTINGS)
    client = worker.client
    message = Exchange(*client.connection.sender, 1, 0, push=False, fetch=True, rows=rows)
    with contextlib.suppress(ProtocolError):
        client.connection.ask(0, message)
    step(worker, parameters, [3], 1.0)
    run(worker.advance())
    assert torch.equal(trained(cluster), parameters["table"])


def test_an_empty_part_of_a_table_has_its_type() -> None:
    cluster, parameters = Cluster(3, workers=1), {"table": torch.nn.Parameter(torch.ones(1, 4, dtype=torch.bfloat16))}
    worker = cluster.enter(0, parameters, tables=("table",), **SETTINGS)
    assert {worker.channels[0].replica.fetched(server)[-1].dtype for server in range(3)} == {torch.bfloat16}


def test_a_step_of_servers_moves_no_row_without_a_gradient() -> None:
    rules = RowRules(Downpour("adam", lr=0.1), torch.zeros(4), 2)
    rules.push_rows(Rows(torch.ones(4)), Push(), 1.0, lambda part: None)
    before = rules.weights.clone()
    rules.push_rows(Rows(torch.tensor([1.0, 1.0, 0.0, 0.0])), Push(), 1.0, lambda part: None)
    assert torch.equal(rules.weights[2:], before[2:])
    assert not torch.equal(rules.weights[:2], before[:2])


def test_a_push_that_is_refused_leaves_the_worker_with_the_servers_rows() -> None:
    cluster, parameters = Cluster(1, workers=1), module()
    worker = cluster.enter(0, parameters, tables=("table",), **SETTINGS)
    before = parameters["table"].detach().clone()
    with torch.no_grad():
        parameters["table"][20] = torch.nan  # no gradient tells
    step(worker, parameters, [4], float("nan"))
    run(worker.advance())
    assert cluster.counts("refused") == [1]
    assert torch.equal(parameters["table"], before)
    step(worker, parameters, [4], 1.0)
    run(worker.advance())
    assert torch.equal(cluster.services[0].session.shards[0].weights[-1].view(ROWS, WIDTH)[4], before[4] + 1)  # type: ignore[union-attr]


def test_what_a_worker_fetched_last_is_known_after_pushes() -> None:
    cluster, parameters = Cluster(2, workers=1), module()
    worker = cluster.enter(0, parameters, tables=("table",), **rarely(3))
    replica = worker.channels[0].replica
    before = parameters["table"].detach().clone()
    for rows in ([1, 30], [2, 30]):
        step(worker, parameters, rows, 1.0)
    run(worker.advance())
    known = torch.cat([replica.fetched(server)[-1] for server in range(2)]).view(ROWS, WIDTH)
    assert torch.equal(known, before)


def test_a_push_that_was_lost_is_taken_back() -> None:
    cluster, parameters = Cluster(1, workers=1), module()
    worker = cluster.enter(0, parameters, tables=("table",), **SETTINGS)
    replica = worker.channels[0].replica
    before = parameters["table"].detach().clone()
    move(parameters, [3], 1.0)
    replica.pack()  # and never sent
    run(worker.fetch())
    assert torch.equal(parameters["table"], before)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_servers_optimize_the_rows_of_a_push(name: str) -> None:
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
    expected = torch.nn.Parameter(torch.ones(6, 2))
    optimizer = kinds[name]([expected], lr=0.1)
    weights = torch.ones(12)
    rules = RowRules(Downpour(name, lr=0.1, options={"eps": 1e-10} if name == "adagrad" else {}), weights, 2)
    for rows in ([0, 3], [3, 5], [1]):
        gradient = torch.randn(len(rows), 2, generator=torch.Generator().manual_seed(len(rows)))
        expected.grad = torch.sparse_coo_tensor(torch.tensor([rows]), gradient, (6, 2))
        optimizer.step()
        pushed = Rows(gradient.view(-1), torch.tensor(rows, dtype=torch.int32))
        rules.push_rows(pushed, Push(lr=0.1), 1.0, lambda part: None)
    torch.testing.assert_close(weights.view(6, 2), expected.detach())


@pytest.mark.parametrize(
    ("algorithm", "by_rows"),
    [
        (ASGD(), True),
        (ASGD(transforms=[ScaleByStaleness()]), True),
        (ASGD(transforms=[SoftSync(2)]), True),
        (LocalSGD(), True),
        (DiLoCo(), False),
        (Downpour(), True),
        (Downpour("adagrad"), True),
        (Downpour("adam"), True),
        (Downpour("adadelta"), False),
        (Downpour("sgd", options={"momentum": 0.9}), False),
        (Downpour("sgd", options={"weight_decay": 0.1}), False),
    ],
)
def test_which_rules_take_rows(algorithm: Algorithm, by_rows: bool) -> None:
    assert algorithm.by_rows is by_rows


def test_aggregated_rows() -> None:
    weights = torch.zeros(80)
    rules = RowRules(LocalSGD(), weights, 2)
    at = rules.at
    for rows, value in (([0, 1], 2.0), ([1, 3], 4.0)):
        pushed = Rows(torch.full((2 * len(rows),), value), torch.tensor(rows, dtype=torch.int32))
        rules.push_rows(pushed, Push(live=2), 1.0, lambda part: None)
    assert not weights.any()
    rules.apply_gathered(2.0, Push(live=2, count=2), lambda part: None)
    assert weights.view(40, 2)[:4, 0].tolist() == [1.0, 3.0, 0.0, 2.0]
    assert weights.sum() == 12
    assert rules.lacking(at).numbers.tolist() == [0, 1, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "rows",
    [
        Rows(torch.ones(3)),
        Rows(torch.ones(2), torch.tensor([4], dtype=torch.int32)),
        Rows(torch.ones(2), torch.tensor([-1], dtype=torch.int32)),
        Rows(torch.ones(4), torch.tensor([1, 1], dtype=torch.int32)),
        Rows(torch.ones(4), torch.tensor([2, 1], dtype=torch.int32)),
        Rows(torch.ones(2), torch.tensor([1])),
        Rows(torch.ones(2, dtype=torch.float64), torch.tensor([1], dtype=torch.int32)),
        Rows(torch.ones(1, 2), torch.tensor([1], dtype=torch.int32)),
        Rows(torch.ones(2), torch.tensor([[1]], dtype=torch.int32)),
    ],
)
def test_what_are_no_rows_is_refused(rows: Rows) -> None:
    with pytest.raises(ProtocolError, match="Worker 3 pushed"):
        RowRules(ASGD(), torch.zeros(8), 2).check(rows, 3)


def test_an_unknown_moment_is_answered_with_all_rows() -> None:
    rules, other = (RowRules(ASGD(), torch.zeros(8), 2) for _ in range(2))
    assert rules.lacking(rules.at).numbers.tolist() == []  # type: ignore[union-attr]
    for at in ("", other.at, rules.at + "0x", "x"):
        assert rules.lacking(at).numbers is None
    at = rules.at
    rules.replaced()
    assert rules.lacking(at).numbers is None


def test_the_tables_of_a_module() -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    net = torch.nn.ModuleDict(
        {
            "a": embedding,
            "tied": embedding,
            "bag": torch.nn.EmbeddingBag(4, 2, sparse=True),
            "dense": torch.nn.Embedding(5, 2),
            "linear": torch.nn.Linear(2, 2),
        }
    )
    assert set(tables_of(net)) == {"a.weight", "bag.weight"}


def test_servers_hold_whole_rows() -> None:
    layout = build_layout([("a", torch.zeros(5, 3)), ("w", torch.zeros(7)), ("b", torch.zeros(4, 3))], 2, ["a", "b"])
    assert [(g.role, g.numel, g.width) for g in layout.groups] == [(Role.PARAMETER, 7, 1), (Role.ROWS, 27, 3)]
    assert [layout.bounds(server, 1) for server in range(2)] == [(0, 12), (12, 27)]
    assert dense(layout.shard(0)) == ((Role.PARAMETER, "float32", 3),)
    with pytest.raises(ConfigurationError):
        build_layout([("a", torch.zeros(1, 1))], 2, ["a"])


@pytest.mark.parametrize("algorithm", [ASGD(), LocalSGD()], ids=["at once", "in rounds"])
def test_small_updates_of_rows_of_16_bits_add_up(algorithm: Any) -> None:
    rules, push = RowRules(algorithm, torch.ones(4, dtype=torch.bfloat16), 2), Push(live=4, count=1)
    pushed = Rows(torch.full((2,), 2.0**-7, dtype=torch.bfloat16), torch.tensor([1], dtype=torch.int32))
    for _ in range(4):
        rules.push_rows(pushed, push, 1.0, lambda part: None)
        rules.apply_gathered(1.0, push, lambda part: None)
    assert rules.weights.tolist() == [1.0, 1.0, 1 + 2.0**-7, 1 + 2.0**-7]
    rules.weights.fill_(2.0)
    rules.replaced()
    found = rules.lacking("").values
    assert found is not None
    assert found.tolist() == rules.exact.tolist() == [2.0] * 4

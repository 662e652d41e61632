from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd.core.foundation.errors import ConfigurationError, LayoutMismatchError
from lightning_asgd.core.foundation.layout import Layout, Role, build_layout, dtype_from_name, dtype_name
from lightning_asgd.core.worker.setup import fragments_of

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool]

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def some_tensors(dtypes: list[torch.dtype]) -> st.SearchStrategy[list[torch.Tensor]]:
    return st.lists(st.builds(lambda s, d: torch.zeros(s, dtype=d), shapes, st.sampled_from(dtypes)), max_size=6)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, list[tuple[str, torch.Tensor]]]:
    parameters = [torch.zeros(draw(st.integers(1, 40))), *draw(some_tensors(FLOATS))]
    trainable = sum(t.numel() for t in parameters)
    named = [(f"p{i}", t) for i, t in enumerate(parameters)]
    layout = build_layout(named, draw(st.integers(1, min(trainable, 9))))
    return layout, [(n, t) for n, t in named if t.numel()]


@given(layouts(), st.none() | st.integers(1, 7))
def test_pieces_cover_every_scalar_once_on_both_sides(
    case: tuple[Layout, list[tuple[str, torch.Tensor]]], chunk: int | None
) -> None:
    layout, tensors = case
    in_tensors = [[0] * t.numel() for _, t in tensors]
    on_servers = [[[0] * n for _, _, n in layout.shard(s)] for s in range(layout.num_servers)]
    for p in layout.pieces(chunk):
        assert p.length >= 1
        assert chunk is None or p.length <= chunk
        assert p.group == layout.tensors[p.tensor].group
        assert 0 <= p.start <= p.start + p.length <= len(in_tensors[p.tensor])
        assert 0 <= p.offset <= p.offset + p.length <= len(on_servers[p.server][p.group])
        for i in range(p.length):
            in_tensors[p.tensor][p.start + i] += 1
            on_servers[p.server][p.group][p.offset + i] += 1
    assert all(n == 1 for counts in in_tensors for n in counts)
    assert all(n == 1 for server in on_servers for group in server for n in group)


@given(layouts())
def test_servers_hold_equal_shares_of_every_group(case: tuple[Layout, list[tuple[str, torch.Tensor]]]) -> None:
    layout, tensors = case
    for g, group in enumerate(layout.groups):
        sizes = [layout.shard(s)[g][2] for s in range(layout.num_servers)]
        assert sum(sizes) == group.numel
        assert max(sizes) - min(sizes) <= 1
        assert {layout.shard(s)[g][:2] for s in range(layout.num_servers)} == {(group.role, group.dtype)}
        bounds = [layout.bounds(s, g) for s in range(layout.num_servers)]
        assert bounds[0][0] == 0
        assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
        assert bounds[-1][1] == group.numel
    assert layout.nbytes == sum(t.numel() * t.element_size() for _, t in tensors)


@given(layouts())
def test_tensors_keep_their_order_and_lie_in_the_group_of_their_dtype(
    case: tuple[Layout, list[tuple[str, torch.Tensor]]],
) -> None:
    layout, tensors = case
    assert [t.name for t in layout.tensors] == [name for name, _ in tensors]
    used = [0] * len(layout.groups)
    for spec, (_, tensor) in zip(layout.tensors, tensors, strict=True):
        group = layout.groups[spec.group]
        assert group.role is Role.PARAMETER
        assert group.dtype == dtype_name(tensor.dtype)
        assert spec.shape == tuple(tensor.shape)
        assert (spec.offset, spec.numel) == (used[spec.group], math.prod(tensor.shape))
        used[spec.group] += spec.numel
    assert len({g.dtype for g in layout.groups}) == len(layout.groups)


@given(layouts())
def test_pieces_are_as_long_as_they_can_be(case: tuple[Layout, list[tuple[str, torch.Tensor]]]) -> None:
    layout, _ = case
    pieces = list(layout.pieces())
    assert len({(p.tensor, p.server) for p in pieces}) == len(pieces)


def test_workers_with_the_same_module_compute_the_same_layout() -> None:
    first, second = (build_layout(torch.nn.Linear(3, 2).named_parameters(), 2) for _ in range(2))
    assert first == second
    first.check_same(second.describe(), "worker 1", "worker 0")


def layout_of(**tensors: torch.Tensor) -> Layout:
    return build_layout(tensors.items(), 1)


def test_the_first_tensor_that_differs_is_named() -> None:
    mine = layout_of(a=torch.zeros(2), b=torch.zeros(3, 4), c=torch.zeros(1))
    theirs = layout_of(a=torch.zeros(2), b=torch.zeros(4, 3), c=torch.zeros(2))
    with pytest.raises(LayoutMismatchError) as caught:
        mine.check_same(theirs.describe(), "worker 1", "worker 0")
    text = str(caught.value)
    assert "worker 1 has 'b' of shape (3, 4) and dtype float32 where worker 0 has 'b' of shape (4, 3)" in text
    assert "'c'" not in text
    assert "Build the same module on every worker" in text


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(2, dtype=torch.float64)},
        {"z": torch.zeros(2)},
    ],
)
def test_dtypes_and_names_are_compared(other: dict[str, torch.Tensor]) -> None:
    with pytest.raises(LayoutMismatchError, match=r"worker 1 has 'a' of shape \(2,\) and dtype float32 where worker 0"):
        layout_of(a=torch.zeros(2)).check_same(layout_of(**other).describe(), "worker 1", "worker 0")


def test_roles_are_compared() -> None:
    parameters = [("a", torch.zeros(2)), ("b", torch.zeros(2, 3))]
    with pytest.raises(LayoutMismatchError, match="'b'"):
        build_layout(parameters, 1).check_same(
            build_layout(parameters, 1, tables=["b"]).describe(), "worker 1", "worker 0"
        )


def test_the_tensor_that_one_side_lacks_is_named() -> None:
    small, large = layout_of(a=torch.zeros(2)), layout_of(a=torch.zeros(2), head=torch.zeros(5))
    with pytest.raises(LayoutMismatchError, match=r"worker 0 has 'head' of shape \(5,\).*, which worker 1 lacks"):
        small.check_same(large.describe(), "worker 1", "worker 0")
    with pytest.raises(LayoutMismatchError, match=r"worker 1 has 'head' of shape \(5,\).*, which worker 0 lacks"):
        large.check_same(small.describe(), "worker 1", "worker 0")


@pytest.mark.parametrize("parameters", [[], [("empty", torch.zeros(0))]])
def test_a_module_without_trainable_parameters_is_refused(parameters: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(ConfigurationError, match=r"no trainable parameter.*Expected at least one.*unfreeze"):
        build_layout(parameters, 1)


def test_a_sparse_tensor_is_refused_by_name() -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(
        ConfigurationError, match=r"'embedding' has layout torch.sparse_coo.*Expected a dense.*to_dense"
    ):
        build_layout([("embedding", sparse)], 1)


def test_more_servers_than_scalars_are_refused() -> None:
    tensors = [("a", torch.zeros(2)), ("b", torch.zeros(3))]
    assert build_layout(tensors, 5).num_servers == 5
    with pytest.raises(
        ConfigurationError, match=r"num_servers=6 is more than .* 5 trainable scalars.*Lower num_servers"
    ):
        build_layout(tensors, 6)


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
def test_dtype_names_go_both_ways(dtype: torch.dtype) -> None:
    assert dtype_from_name(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["float31", "zeros", "nn", ""])
def test_an_unknown_dtype_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Unknown dtype '{name}'. Expected a torch dtype"):
        dtype_from_name(name)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), number=st.integers(1, 6))
def test_fragments_are_of_nearly_equal_sizes_and_hold_every_parameter_once(sizes: list[int], number: int) -> None:
    parameters = {f"p{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    fragments = fragments_of(parameters, number, 1)
    assert len(fragments) == min(number, len(sizes))
    dealt = [[name for name, *_ in fragment.describe()] for fragment in fragments]
    assert sorted(name for names in dealt for name in names) == sorted(parameters)
    assert all(names == sorted(names, key=list(parameters).index) != [] for names in dealt)
    filled = [sum(len(parameters[name]) for name in names) for names in dealt]
    assert max(filled) - min(filled) <= max(sizes)


def test_no_fragment_of_a_transformer_is_much_larger_than_another_one() -> None:
    block = {"norm": (64,), "qkv.weight": (192, 64), "qkv.bias": (192,), "proj.weight": (64, 64), "proj.bias": (64,)}
    block |= {"fc1.weight": (256, 64), "fc1.bias": (256,), "fc2.weight": (64, 256), "fc2.bias": (64,)}
    parameters = {f"{i}.{name}": torch.zeros(shape) for i in range(6) for name, shape in block.items()}
    sizes = [fragment.nbytes for fragment in fragments_of(parameters, 4, 1)]
    assert max(sizes) < 1.1 * min(sizes)

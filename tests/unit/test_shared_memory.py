from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.calls.shared_memory import SharedBlock, attach, create, host_identity
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.protocol import SharedRef

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")

GROUPS = (
    (Role.PARAMETER, "float32", 5),
    (Role.PARAMETER, "bfloat16", 3),
    (Role.PARAMETER, "float64", 0),
    (Role.PARAMETER, "complex64", 2),
)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def made() -> SharedBlock:
    block = create(GROUPS)
    assert block is not None
    return block


def in_child(function: Callable[[], Any]) -> Any:
    """What a function returns in a forked process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(data)


def test_a_block_holds_one_tensor_per_group() -> None:
    block = made()
    assert [(str(t.dtype), t.numel()) for t in block.tensors] == [(f"torch.{d}", n) for _, d, n in GROUPS]
    assert all(t.data_ptr() % 64 == 0 for t in block.tensors)
    for index, t in enumerate(block.tensors):
        t.fill_(index)
    assert [t.tolist() for t in block.tensors] == [[0.0] * 5, [1.0] * 3, [], [3 + 0j] * 2]
    block.close()


def test_a_reference_that_spells_a_path_is_not_followed() -> None:
    block = made()
    for wrong in (
        dataclasses.replace(block.ref, pid="self"),  # type: ignore[arg-type]
        dataclasses.replace(block.ref, fd=f"../fd/{block.ref.fd}"),  # type: ignore[arg-type]
    ):
        assert attach(wrong, GROUPS) is None
    block.close()


def test_both_sides_see_what_the_other_writes() -> None:
    block = made()
    other = attach(block.ref, GROUPS)
    assert other is not None
    block.tensors[0].copy_(torch.arange(5.0))
    assert other.tensors[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    other.tensors[3].fill_(7)
    assert block.tensors[3].tolist() == [7, 7]
    other.close()
    block.close()


def test_another_process_sees_the_block() -> None:
    block = made()
    block.tensors[0].copy_(torch.arange(5.0))
    parent_only = block.ref

    def child() -> list[float]:
        other = attach(parent_only, GROUPS)
        assert other is not None
        seen: list[float] = other.tensors[0].tolist()
        other.tensors[3].fill_(9)
        return seen

    assert in_child(child) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert block.tensors[3].tolist() == [9, 9]
    block.close()


def test_a_block_of_a_process_that_is_gone_is_not_found() -> None:
    ref = in_child(lambda: made().ref)
    assert isinstance(ref, SharedRef)
    assert attach(ref, GROUPS) is None


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": bytes(16)},
        {"host": "elsewhere/1/2"},
        {"host": ""},
        {"nbytes": 1},
        {"fd": 9999},
        {"pid": 2**30},
    ],
)
def test_a_reference_that_does_not_fit_gives_nothing_and_leaks_nothing(change: dict[str, Any]) -> None:
    block = made()
    before = open_files()
    assert attach(dataclasses.replace(block.ref, **change), GROUPS) is None
    assert open_files() == before
    block.close()


def test_a_block_laid_out_for_other_groups_is_not_taken() -> None:
    block = made()
    assert attach(block.ref, ((Role.PARAMETER, "float32", 1000),)) is None
    block.close()


def test_a_file_descriptor_that_became_another_file_is_not_taken(tmp_path: Any) -> None:
    block = made()
    with open(tmp_path / "other", "wb") as file:
        file.truncate(block.ref.nbytes)
        assert attach(dataclasses.replace(block.ref, fd=file.fileno()), GROUPS) is None
        file.truncate(block.ref.nbytes // 2)
        assert attach(dataclasses.replace(block.ref, fd=file.fileno()), GROUPS) is None
    block.close()


def test_nothing_is_left_open_once_blocks_are_closed_and_forgotten() -> None:
    before = open_files()
    block = made()
    other = attach(block.ref, GROUPS)
    assert other is not None
    assert open_files() > before
    block.close()
    other.close()
    other.close()  # may be called again
    del block, other
    assert open_files() == before


def test_closing_alone_gives_the_memory_back() -> None:
    before = open_files()
    block = made()
    block.close()
    assert block.tensors == ()
    assert open_files() == before


def test_memory_stays_while_a_tensor_refers_to_it() -> None:
    block = made()
    tensor = block.tensors[0].fill_(3)
    block.close()
    assert tensor.tolist() == [3.0] * 5


def test_a_block_has_no_name_on_disk() -> None:
    block = made()
    assert "memfd" in os.readlink(f"/proc/self/fd/{block.ref.fd}")
    block.close()


def test_references_survive_pickling() -> None:
    block = made()
    assert pickle.loads(pickle.dumps(block.ref)) == block.ref
    block.close()


def test_identity_is_the_same_in_processes_of_one_machine() -> None:
    assert host_identity()
    assert in_child(host_identity) == host_identity()


def test_a_system_without_anonymous_files_sends_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert create(GROUPS) is None


def test_a_system_without_identity_sends_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "host_identity", lambda: "")
    assert create(GROUPS) is None


def test_a_failed_creation_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(fd: int, length: int) -> None:
        raise OSError("no memory left")

    before = open_files()
    monkeypatch.setattr(os, "ftruncate", no_memory)
    assert create(GROUPS) is None
    assert open_files() == before


def mapped_kilobytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssShmem"))


def test_unmapping_gives_the_pages_back_and_keeps_what_they_hold() -> None:
    groups = ((Role.PARAMETER, "float32", 4 << 20),)
    block = create(groups)
    assert block is not None
    before = mapped_kilobytes()
    block.tensors[0].fill_(1.5)
    assert mapped_kilobytes() >= before + (15 << 10)
    block.unmap()
    assert mapped_kilobytes() <= before + (1 << 10)
    assert block.tensors[0].eq(1.5).all()
    block.close()
    block.unmap()  # nothing is left to unmap

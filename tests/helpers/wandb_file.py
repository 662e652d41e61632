"""Reads what Weights & Biases writes offline: its own records, in the frames of LevelDB's log format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK = 7, 1 << 15  # bytes of the file's and of each frame's header; no frame crosses a block


def records(file: Path) -> Iterator[Any]:
    """The ``Record`` messages of a run's ``.wandb`` file."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), _HEADER, []
    assert data[:4] == b":W&B"
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            return
        at += _HEADER
        parts.append(data[at : at + length])
        at += length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def contents(file: Path) -> dict[str, dict[str, Any]]:
    """What a run's history, summary and config hold, by key; the latest value of each."""
    found: dict[str, dict[str, Any]] = {"history": {}, "summary": {}, "config": {}}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind in found:
            items = record.history.item if kind == "history" else getattr(record, kind).update
            for item in items:
                *path, last = item.nested_key or [item.key]
                place = found[kind]
                for step in path:
                    place = place.setdefault(step, {})
                place[last] = json.loads(item.value_json)
    return found

"""The features, by what they add to the core: paths of modules, each of which is imported when it is first needed.

The core imports no feature. It asks this file, and so do pickles of messages.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["FINDERS", "FIT", "MESSAGES", "SERVER", "STORES", "SYNCHRONIZERS", "TRANSPORTS", "load", "sendable"]

MESSAGES = {
    "compression": ("LinkProbe", "LinkProbed"),
    "elastic": ("Status", "StatusRequest", "WorkerStatus"),
    "islands": ("ExchangePart", "InitPart", "Part"),
    "layerwise": ("LayerGradient",),
    "recovery": ("ReplayDone", "ReplicaState", "StateReport"),
    "sampling": ("Samples",),
    "tables.served": ("FetchRows", "LoadTable", "PushRows", "SaveTable", "ServedRows", "TableRequest", "TableSpec"),
}
"""The messages of each feature, in its ``messages.py``."""

SERVER = {
    "Attach": "elastic.server:Admissions",
    "ExchangePart": "islands.server:Islands",
    "FetchRows": "tables.served.server:ServedTables",
    "InitPart": "islands.server:Islands",
    "LayerGradient": "layerwise.server:LayerMeans",
    "LinkProbe": "compression.server:LinkProbes",
    "LoadTable": "tables.served.server:ServedTables",
    "PushRows": "tables.served.server:ServedTables",
    "ReplayDone": "recovery.server:Recovery",
    "Samples": "sampling.server:PosteriorSamples",
    "SaveTable": "tables.served.server:ServedTables",
    "StateReport": "recovery.server:Recovery",
    "StatusRequest": "elastic.server:StatusReports",
}
"""The part of a server that handles a message: a :class:`~lightning_asgd.core.server.feature.ServerFeature`."""

FIT = {
    "programs.weight_changes:ChangesBetweenBatches": "",
    "programs.weight_changes:UnseenSteps": "",
    "caches.partitioned_caches:PartitionedCaches": "caches.cache",
    "tables.served.look_ahead:LookAhead": "tables.served.embedding",
    "programs.callback_modules:CallbackModules": "",
    "engines.signals:DeferredRequeueing": "",
}
"""What takes part in a worker's fit, a :class:`~lightning_asgd.core.worker.feature.WorkerFeature`; and the module
without which a program cannot need it."""

SYNCHRONIZERS = {
    "layers": "layerwise.worker:connect",
    "none": "hogwild.shared_weights:connect",
}
"""How workers share weights, by what their algorithm pushes, if not by exchanges."""

FINDERS = {
    "algorithm": "algorithms:find",
    "chief's state": "replacement.chief:chief_state",
    "combined data": "combined.combined_data:CombinedData",
    "compression": "compression:find_compression",
    "is streamed": "streams.find:is_streamed",
    "island": "islands.strategy:become_island",
    "last checkpoint": "replacement.last_checkpoint:write_last_checkpoint",
    "leases of shards": "streams.server:StreamLeases",
    "measured code": "compression.link_probe:measured_code",
    "next chief": "replacement.chief:take_over",
    "program in a task": "engines.pickled_program:program_in_task",
    "run": "elastic.elastic_run:ElasticFleet",
    "snapshots": "recovery.server:writer_of",
    "start_method": "launchers.process_launcher:MultiProcessLauncher",
    "streamed data": "streams.streamed_data:find",
}
"""What a setting or a message needs, by the name under which the core asks for it."""

STORES = {"zmq": "transports.zmq.store:reach"}
"""How to reach a rendezvous that is not torch's."""

TRANSPORTS = {"rpc": "transports.rpc.kind:RPC", "zmq": "transports.zmq.kind:ZMQ"}

_RULES = "algorithms", "compression"
_HOMES = {name: f"{feature}.messages" for feature, names in MESSAGES.items() for name in names}


def load(path: str) -> Any:
    """What a path such as ``"islands.server:Islands"`` names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(f"lightning_asgd.{module}"), name)


def sendable(name: str) -> Any:
    """The feature's message, algorithm, transform or compression of that name; None if there is none."""
    if name in _HOMES:
        return load(f"{_HOMES[name]}:{name}")
    packages = (importlib.import_module(f"lightning_asgd.{each}") for each in _RULES)
    return next((getattr(package, name) for package in packages if name in package.__all__), None)

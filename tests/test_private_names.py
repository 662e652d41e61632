"""Which files name what Lightning and torch do not document: one for Lightning; torch's are to follow.

A name is named where it stands as an attribute, a method's or a parameter's name, an import, or a text such as that of
``getattr(trainer, "_checkpoint_connector")``. One that this package uses for something of its own as well is looked for
with what stands before its dot. Lightning's are those of ``adapter/private_names``. For torch's the files of today are
recorded; their number may only fall.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.private_names import NAMES, Name
from tests.test_architecture import FILES, TREES

LIGHTNING = "core.lightning.private_names"
"""The only file with names of Lightning's."""

DOCUMENTED = {"__init__", "automatic_optimization", "epoch_loop", "fit_loop", "optimizer", "state", "step"}
# Those that this package uses for something of its own as well, with what stands before their dot.
SPELLED = {
    "_trainer": "module._trainer",
    "_version": "logger._version",
    "batch_idx": "epoch_loop.batch_idx",
    "current": "batch_progress.current",
    "done": "fetcher.done",
    "fn": "state.fn",
    "length": "fetcher.length",
    "progress": "bar.progress",
    "ready": "current.ready",
    "run": "val_loop.run",
    "status": "state.status",
    "total": "batch_progress.total",
}
OF_PATHS = {part for name in NAMES for part in ([name.attribute] if name.module else name.parts)} - DOCUMENTED
OTHERS = {
    "DistributedSampler",
    "PL_GLOBAL_SEED",
    "procs",
}  # torch's; documented; both launchers'

TORCH: dict[str, set[str]] = {
    # modules and loaders
    "_BatchNorm": {"world.ranks"},
    "_num_workers": {"core.lightning.private_names"},
    "_parameters": {"core.worker.module_state", "core.worker.replica_spans"},
    "_non_persistent_buffers_set": {"core.worker.module_state"},  # those that no checkpoint holds
    "_prefetch_factor": {"core.lightning.private_names"},
    "gradient._indices": {"tables.rows.worker"},  # documented, for gradients that are not coalesced
    "_try_put_index": {"core.leases.sampler"},
    "owner._buffers": {"core.worker.module_state"},
    "parameter._version": {"programs.weight_changes"},  # how often a tensor was changed in place
    # data sets with shards
    "_ex_iterable": {"streams.hugging_face"},
    "_starting_state_dict": {"streams.hugging_face"},
    "dataset._state_dict": {"streams.random_access"},
    # how torchmetrics reduces a state: the coordinator does the same, and torchmetrics only gathers the others
    "_defaults": {"world.metric_sync"},
    "_reductions": {"world.metric_sync"},
    "_sync_dist": {"world.metric_sync"},
    # the end of a backward pass, as DDP and FSDP learn of it
    "_execution_engine": {"layerwise.worker"},
    # processes
    "_prctl_pr_set_pdeathsig": {"launchers.process_launcher"},
    # torch.distributed
    "_C": {"world.process_group"},
    "_create_work_from_future": {"world.process_group"},
    "_distributed_c10d": {"world.process_group"},
    "_channels": {"transports.rpc.tensorpipe"},
    "_get_current_rpc_agent": {"transports.rpc.tensorpipe"},
    "_init": {"transports.rpc.tensorpipe"},
    "_init_rpc_states": {"transports.rpc.tensorpipe"},
    "_is_current_rpc_agent_set": {"transports.rpc.tensorpipe"},
    "_reset_current_rpc_agent": {"transports.rpc.tensorpipe"},
    "_transports": {"transports.rpc.tensorpipe"},
    "_update_group_membership": {"transports.rpc.tensorpipe"},
    "_world": {"world.process_group", "world.ranks"},
    "TensorPipeAgent": {"transports.rpc.tensorpipe"},
    "_storage_filesystem": {"ray.trainer"},  # Ray's: without it a result's checkpoints are looked for on this machine
}

# os._exit is documented; ends of our strategies' names; a key of what our samplers are pickled as
NO_NAMES = {"_exit", "_fork", "_notebook", "_spawn", "_state"}
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def named(tree: ast.Module) -> Iterator[str]:
    """Every name in a file, also with what stands before its dot: ``trainer.state.fn`` as ``fn`` and ``state.fn``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            before = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            yield from (node.attr, f"{before}.{node.attr}")
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.alias | ast.Constant):
            text = node.name if isinstance(node, ast.alias) else node.value
            if isinstance(text, str) and DOTTED.fullmatch(text):
                parts = text.split(".")
                yield from parts
                yield from map(".".join, itertools.pairwise(parts))


def made(tree: ast.Module) -> Iterator[str]:
    """Every name that a file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id
        elif isinstance(node, ast.arg):
            yield node.arg


NAMED = {module: set(named(tree)) for module, tree in TREES.items()}


def test_no_other_file_names_what_is_private_to_lightning() -> None:
    said = []
    for name in sorted(OF_PATHS | OTHERS):
        spelled = SPELLED.get(name, name)
        said += [f"{module} names {spelled}." for module in FILES if module != LIGHTNING and spelled in NAMED[module]]
    assert not said, "\n" + "\n".join(said) + f"\nExpected {LIGHTNING} alone to do so."


def test_every_name_of_lightning_is_used() -> None:
    names = {name: each for name, each in vars(private_names).items() if isinstance(each, Name)}
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert not names.keys() - used, "nobody uses them: remove them"
    hooks = {each.attribute for each in NAMES if each not in names.values()} - {"__init__"}
    assert not hooks - (NAMED[LIGHTNING] | set(made(TREES[LIGHTNING]))), "the hooks do not have them: remove them"


def test_no_other_file_names_what_is_private_to_torch() -> None:
    said = []
    for name, recorded in sorted(TORCH.items()):
        found = {module for module, names in NAMED.items() if name in names}
        files = ", ".join(f'"{module}"' for module in sorted(found & recorded))
        if found - recorded:
            said.append(f"{name} is named in {sorted(found - recorded)}. Expected it in {sorted(recorded)} only.")
        if not found & recorded:
            said.append(f'Its files name {name} no more: remove "{name}" from the table.')
        elif recorded - found:
            said.append(f'Fewer files name {name}: write "{name}": {{{files}}}.')
    assert not said, "\n" + "\n".join(said)


def test_every_private_name_of_another_library_is_in_a_table() -> None:
    ours = {name for tree in TREES.values() for name in made(tree)} | NO_NAMES | set(FILES)
    known = {name.rpartition(".")[2] for name in TORCH} | OF_PATHS
    said = [
        f"{module} names {name}, which is private and not of this package. Expected a name that is documented."
        for module, names in sorted(NAMED.items())
        for name in sorted(names - ours - known)
        if re.fullmatch(r"_[^_]\w*", name)
    ]
    assert not said, "\n" + "\n".join(said) + "\nIf there is none, add it to the table, with a reason in the commit."

"""Which files name what Lightning and torch do not document. Such names are to be in one file per library, in the end.

A name is named where it stands as an attribute, a method's or a parameter's name, an import, or a text such as that of
``getattr(trainer, "_checkpoint_connector")``. One that this package uses for something of its own as well is listed
with what stands before its dot. For every name today's files are recorded; their number may only fall.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from tests.test_architecture import FILES, TREES

LIGHTNING: dict[str, set[str]] = {
    # starting workers
    "_MultiProcessingLauncher": {"_lightning"},
    "_SubprocessScriptLauncher": {"_lightning"},
    "_call_children_scripts": {"launcher"},
    "_configure_launcher": {"strategy"},
    "_launcher": {"strategy"},
    "_recover_results_in_main_process": {"launcher"},
    "_set_num_threads_if_needed": {"_lightning"},
    "_start_method": {"launcher", "strategy"},
    "_wrapping_function": {"launcher"},
    "get_extra_results": {"launcher"},
    "procs": {"launcher"},
    "update_main_process_results": {"launcher"},
    # the strategy
    "_accelerator": {"_lightning"},
    "_configure_optimizers": {"_lightning"},
    "_layer_sync": {"strategy"},
    "_lightning_module": {"_lightning"},
    "_lightning_optimizers": {"_lightning"},
    "_optimizers": {"_lightning"},
    "_optimizers_to_device": {"_lightning"},
    "lightning_restore_optimizer": {"strategy"},
    # the fit loop
    "_combined_loader": {"_batches", "_lightning", "_loop", "_undealt"},
    "_data_fetcher": {"_batches", "_loop"},
    "_iterator": {"_loop"},
    "_PrefetchDataFetcher": {"_batches"},
    "_restarting": {"_lightning"},
    "_skip_backward": {"_loop"},
    "epoch_progress": {"_lightning", "_loop"},
    "fetcher.done": {"_loop"},
    "fetcher.length": {"_loop"},
    "flattened": {"_batches", "_loop", "_undealt"},
    "iterators": {"_loop"},
    "max_batches": {"_batches", "_loop"},
    "on_advance_end": {"_lightning", "_places"},
    "restarting": {"_loop"},
    "setup_data": {"_lightning"},
    # the epoch loop
    "_batches_that_stepped": {"_lightning", "_loop", "_places"},
    "_can_stop_early": {"_places"},
    "_is_training_done": {"_places"},
    "_on_after_fetch": {"_lightning"},
    "_on_before_fetch": {"_lightning"},
    "_should_check_val_epoch": {"_loop", "_places"},
    "_skip_next_val": {"_places"},
    "automatic_optimization.optim_progress": {"_places"},
    "batch_progress": {"_loop", "_places", "training_data"},
    "current.ready": {"_loop", "_places", "training_data"},
    "is_last_batch": {"_loop"},
    "manual_optimization": {"_places"},
    "optim_step_progress": {"_places"},
    "total_batch_idx": {"_loop"},
    "val_loop": {"_lightning", "_places"},
    # the Trainer
    "_AcceleratorConnector": {"_lightning"},
    "_accelerator_connector": {"_batches"},
    "_call_callbacks_state_dict": {"_lightning"},
    "_checkpoint_connector": {"_lightning"},
    "_get_loops_state_dict": {"_lightning"},
    "_loaded_checkpoint": {"_lightning"},
    "_logger_connector": {"_places"},
    "_signal_connector": {"_lightning"},
    "_val_check_time_interval": {"_batches"},
    "lr_scheduler_configs": {"_lightning", "_loop"},
    "restore_callbacks": {"_lightning"},
    "state.fn": {"_lightning", "strategy"},
    "use_distributed_sampler": {"_batches"},
    "val_check_batch": {"_batches", "_loop"},
    # callbacks
    "_every_n_train_steps": {"_loop"},
    "_last_checkpoint_saved": {"_lightning"},
    "_last_global_step_saved": {"_lightning"},
    "_train_progress_bar": {"_loop"},
    "bar.progress": {"_loop"},
    "get_accumulate_grad_batches": {"_batches"},
    "kth_value": {"_lightning"},
    "train_progress_bar_id": {"_loop"},
    # the module
    "_apply_batch_transfer_handler": {"timing"},
    "_compiler_ctx": {"_lightning"},
    # classes and variables that are known by name only
    "DistributedSampler": {"_batches"},
    "DistributedSamplerWrapper": {"_batches"},
    "LightningEnvironment": {"launcher"},
    "PL_GLOBAL_SEED": {"_loop"},
    "TensorBoardLogger": {"monitor"},
    "WandbLogger": {"monitor"},
}

TORCH: dict[str, set[str]] = {
    # modules and loaders
    "_BatchNorm": {"world"},
    "_num_workers": {"_loop"},
    "_parameters": {"worker.entry"},
    "_prefetch_factor": {"_loop"},
    "_try_put_index": {"_loop"},
    "owner._buffers": {"worker.entry"},
    # torch.distributed
    "_channels": {"transport.rpc"},
    "_get_current_rpc_agent": {"transport.rpc"},
    "_init": {"transport.rpc"},
    "_init_rpc_states": {"transport.rpc"},
    "_is_current_rpc_agent_set": {"transport.rpc"},
    "_transports": {"transport.rpc"},
    "_update_group_membership": {"transport.rpc"},
    "_world": {"process_group", "world"},
    "TensorPipeAgent": {"transport.rpc"},
}

RECORDED = LIGHTNING | TORCH
NO_NAMES = {"_exit", "_fork", "_notebook", "_spawn"}  # os._exit is documented; ends of our strategies' names
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


def test_no_other_file_names_what_is_private_to_another_library() -> None:
    said = []
    for name, recorded in sorted(RECORDED.items()):
        found = {module for module, names in NAMED.items() if name in names}
        files = ", ".join(f'"{module}"' for module in sorted(found & recorded))
        if found - recorded:
            said.append(f"{name} is named in {sorted(found - recorded)}. Expected it in {sorted(recorded)} only.")
        if not found & recorded:
            said.append(f'Its files name {name} no more: remove "{name}" from the table.')
        elif recorded - found:
            said.append(f'Fewer files name {name}: write "{name}": {{{files}}}.')
    assert not said, "\n" + "\n".join(said)


def test_every_private_name_of_another_library_is_in_the_table() -> None:
    ours = {name for tree in TREES.values() for name in made(tree)} | NO_NAMES | set(FILES)
    known = {name.rpartition(".")[2] for name in RECORDED}
    said = [
        f"{module} names {name}, which is private and not of this package. Expected a name that is documented."
        for module, names in sorted(NAMED.items())
        for name in sorted(names - ours - known)
        if re.fullmatch(r"_[^_]\w*", name)
    ]
    assert not said, "\n" + "\n".join(said) + "\nIf there is none, add it to the table, with a reason in the commit."

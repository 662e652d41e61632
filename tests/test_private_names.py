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
    "_MultiProcessingLauncher": {"adapter.class_trees"},
    "_SubprocessScriptLauncher": {"adapter.class_trees"},
    "_call_children_scripts": {"adapter.launchers"},
    "_configure_launcher": {"adapter.strategy"},
    "_launcher": {"adapter.strategy"},
    "_recover_results_in_main_process": {"adapter.launchers"},
    "_set_num_threads_if_needed": {"adapter.class_trees"},
    "_start_method": {"adapter.launchers", "adapter.strategy"},
    "_wrapping_function": {"adapter.launchers"},
    "get_extra_results": {"adapter.launchers"},
    "procs": {"adapter.launchers"},
    "update_main_process_results": {"adapter.launchers"},
    # the strategy
    "_accelerator": {"adapter.class_trees"},
    "_configure_optimizers": {"adapter.class_trees"},
    "_layer_sync": {"adapter.strategy"},
    "_lightning_module": {"adapter.class_trees"},
    "_lightning_optimizers": {"adapter.class_trees"},
    "_optimizers": {"adapter.class_trees"},
    "_optimizers_to_device": {"adapter.class_trees"},
    "lightning_restore_optimizer": {"adapter.strategy"},
    # the fit loop
    "_combined_loader": {"adapter.data_mode", "adapter.class_trees", "adapter.leased_loop", "adapter.undivided_data"},
    "_data_fetcher": {"adapter.data_mode", "adapter.leased_loop"},
    "_iterator": {"adapter.leased_loop"},
    "_PrefetchDataFetcher": {"adapter.data_mode"},
    "_restarting": {"adapter.class_trees"},
    "_skip_backward": {"adapter.leased_loop"},
    "epoch_progress": {"adapter.class_trees", "adapter.leased_loop"},
    "fetcher.done": {"adapter.leased_loop"},
    "fetcher.length": {"adapter.leased_loop"},
    "flattened": {"adapter.data_mode", "adapter.leased_loop", "adapter.undivided_data"},
    "iterators": {"adapter.leased_loop"},
    "max_batches": {"adapter.data_mode", "adapter.leased_loop"},
    "on_advance_end": {"adapter.class_trees", "adapter.joint_decisions"},
    "restarting": {"adapter.leased_loop"},
    "setup_data": {"adapter.class_trees"},
    # the epoch loop
    "_batches_that_stepped": {"adapter.class_trees", "adapter.leased_loop", "adapter.joint_decisions"},
    "_can_stop_early": {"adapter.joint_decisions"},
    "_is_training_done": {"adapter.joint_decisions"},
    "_on_after_fetch": {"adapter.class_trees"},
    "_on_before_fetch": {"adapter.class_trees"},
    "_should_check_val_epoch": {"adapter.leased_loop", "adapter.joint_decisions"},
    "_skip_next_val": {"adapter.joint_decisions"},
    "automatic_optimization.optim_progress": {"adapter.joint_decisions"},
    "batch_progress": {"adapter.leased_loop", "adapter.joint_decisions", "adapter.training_data"},
    "current.ready": {"adapter.leased_loop", "adapter.joint_decisions", "adapter.training_data"},
    "is_last_batch": {"adapter.leased_loop"},
    "manual_optimization": {"adapter.joint_decisions"},
    "optim_step_progress": {"adapter.joint_decisions"},
    "total_batch_idx": {"adapter.leased_loop"},
    "val_loop": {"adapter.class_trees", "adapter.joint_decisions"},
    # the Trainer
    "_AcceleratorConnector": {"adapter.class_trees"},
    "_accelerator_connector": {"adapter.data_mode"},
    "_call_callbacks_state_dict": {"adapter.class_trees"},
    "_checkpoint_connector": {"adapter.class_trees"},
    "_get_loops_state_dict": {"adapter.class_trees"},
    "_loaded_checkpoint": {"adapter.class_trees"},
    "_logger_connector": {"adapter.joint_decisions"},
    "_signal_connector": {"adapter.class_trees"},
    "_val_check_time_interval": {"adapter.data_mode"},
    "lr_scheduler_configs": {"adapter.class_trees", "adapter.leased_loop"},
    "restore_callbacks": {"adapter.class_trees"},
    "state.fn": {"adapter.class_trees", "adapter.strategy"},
    "use_distributed_sampler": {"adapter.data_mode"},
    "val_check_batch": {"adapter.data_mode", "adapter.leased_loop"},
    # callbacks
    "_every_n_train_steps": {"adapter.leased_loop"},
    "_last_checkpoint_saved": {"adapter.class_trees"},
    "_last_global_step_saved": {"adapter.class_trees"},
    "_train_progress_bar": {"adapter.leased_loop"},
    "bar.progress": {"adapter.leased_loop"},
    "get_accumulate_grad_batches": {"adapter.data_mode"},
    "kth_value": {"adapter.class_trees"},
    "train_progress_bar_id": {"adapter.leased_loop"},
    # the module
    "_apply_batch_transfer_handler": {"timing"},
    "_compiler_ctx": {"adapter.class_trees"},
    # classes and variables that are known by name only
    "DistributedSampler": {"adapter.data_mode"},
    "DistributedSamplerWrapper": {"adapter.data_mode"},
    "LightningEnvironment": {"adapter.launchers"},
    "PL_GLOBAL_SEED": {"adapter.leased_loop"},
    "TensorBoardLogger": {"adapter.asgd_monitor"},
    "WandbLogger": {"adapter.asgd_monitor"},
}

TORCH: dict[str, set[str]] = {
    # modules and loaders
    "_BatchNorm": {"adapter.world"},
    "_num_workers": {"adapter.leased_loop"},
    "_parameters": {"worker.replica"},
    "_prefetch_factor": {"adapter.leased_loop"},
    "_try_put_index": {"adapter.leased_loop"},
    "owner._buffers": {"worker.replica"},
    # torch.distributed
    "_channels": {"transports.tensorpipe"},
    "_get_current_rpc_agent": {"transports.tensorpipe"},
    "_init": {"transports.tensorpipe"},
    "_init_rpc_states": {"transports.tensorpipe"},
    "_is_current_rpc_agent_set": {"transports.tensorpipe"},
    "_transports": {"transports.tensorpipe"},
    "_update_group_membership": {"transports.tensorpipe"},
    "_world": {"adapter.process_group", "adapter.world"},
    "TensorPipeAgent": {"transports.tensorpipe"},
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

"""The alternatives that Lightning's users have."""

from __future__ import annotations

from typing import Any

__all__ = ["local_sgd"]


def local_sgd(period: int) -> Any:
    """DDP whose ranks average their weights every so many steps, and exchange no gradients.

    PyTorch's post-local-SGD hook and averager, from the first step on, by Lightning's own arguments.
    """
    import torch.distributed as dist
    from pytorch_lightning.strategies import DDPStrategy
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook

    class LocalSGD(DDPStrategy):
        def configure_ddp(self) -> None:
            super().configure_ddp()
            # Gradients are averaged over a subgroup: every rank is one. Lightning registers hooks on GPUs only.
            subgroup, _ = dist.new_subgroups(1)
            self.model.register_comm_hook(
                hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=0), hook.post_localSGD_hook
            )

    state = hook.PostLocalSGDState(None, None, start_localSGD_iter=0)
    return LocalSGD(ddp_comm_state=state, ddp_comm_hook=hook.post_localSGD_hook, model_averaging_period=period)

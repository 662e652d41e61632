"""Predictions averaged over samples of the posterior."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from lightning_asgd.core.foundation.errors import ConfigurationError

_NARROW = (torch.float16, torch.bfloat16)


def averaged_prediction(
    module: Module,
    samples: Sequence[Mapping[str, Tensor]],
    *inputs: Any,
    transform: Callable[[Any], Tensor] | None = None,
    **named_inputs: Any,
) -> Tensor:
    r"""The mean of a module's outputs over samples of its weights: :math:`\frac{1}{S} \sum_s f(x; w_s)`.

    The module is called in evaluation mode and without gradients. It is left as it was: its own weights, buffers and
    mode do not change, nor do the samples.

    Args:
        module: what to call; tensors that a sample does not name are the module's own.
        samples: tensors by name, such as ``strategy.samples`` of a fit with
            :class:`~lightning_asgd.algorithms.SGMCMC`.
        *inputs: of the module.
        transform: applied to each output before the mean is taken. For a classifier whose outputs are logits give the
            softmax: it is probabilities that are to be averaged.
        **named_inputs: of the module.

    Returns:
        a tensor like one output.

    Raises:
        ConfigurationError: there are no samples, or one names a tensor that the module does not have.

    Example:
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> samples = [{"weight": torch.tensor([[1.0]])}, {"weight": torch.tensor([[3.0]])}]
        >>> averaged_prediction(layer, samples, torch.tensor([[10.0]]))
        tensor([[20.]])
    """
    if not samples:
        raise ConfigurationError(
            "averaged_prediction was given no samples. Expected at least one: train beyond burn_in + thin versions, "
            "and look at strategy.samples on worker 0."
        )
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    modes = [(each, each.training) for each in module.modules()]
    total = torch.zeros(())
    module.eval()  # so that nothing is drawn by dropout, and no buffer follows the inputs
    try:
        with torch.no_grad():
            for sample in samples:
                unknown = sorted(set(sample) - set(own))
                if unknown:
                    raise ConfigurationError(
                        f"A sample names {unknown[0]!r}, which {type(module).__name__} does not have. Expected samples "
                        "of the same module, with the names of its state_dict()."
                    )
                tensors = {name: value.to(own[name].device) for name, value in sample.items()}
                output = functional_call(module, tensors, inputs, named_inputs)
                output = output if transform is None else transform(output)
                dtype = output.dtype
                total = total + (output.float() if dtype in _NARROW else output)  # sums of 16 bits would stop growing
    finally:
        for each, mode in modes:
            each.training = mode
    return (total / len(samples)).to(dtype if dtype in _NARROW else total.dtype)

"""The frozen weights of a policy spread over the processes of a run (FSDP2), for a model that does not fit one card.

Only the blocks' weights are spread: each process keeps its part and gathers one block at a time, in the forward pass and again
in the backward one. Embeddings, norms and head are whole everywhere, since the loss reads the head by itself; so is the
adapter, whose gradients go the way they always go. What trains, what is saved and what is handed to an engine is therefore the
same as without it. No engine of this process can read such weights: rollouts come from a vLLM server.
"""

from __future__ import annotations

from typing import Any

from grpo_portable.errors import ModelError


def spread(model: Any, device: Any) -> int:
    """Spread the frozen weights of every block of `model`, adapter on, over the processes; the rest goes to `device` whole.

    The model may lie on the CPU: a block is moved when it is spread, so that no card ever holds more than one whole block. The
    number of weights that are spread is returned. ModelError for a model without a list of blocks, or with 4-bit weights.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    blocks = _blocks(model)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    spread_over = 0
    for block in blocks:
        block.to(device)
        frozen = [p for p in block.parameters() if not p.requires_grad]
        if any(not p.is_floating_point() for p in frozen):
            raise ModelError("packed weights cannot be spread over GPUs", help="take bf16-hf for a spread model")
        spread_over += sum(p.numel() for p in frozen)
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=set(block.parameters()) - set(frozen))
    for parameter in model.parameters():  # what is in no block
        if not _is_part(parameter):
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    # accelerate's wrapper for several processes copies weights from the first one; parts are no copies of each other
    model._ddp_params_and_buffers_to_ignore = [name for name, p in model.named_parameters() if _is_part(p)]
    return spread_over


def is_spread(model: Any) -> bool:
    """Whether the weights of a model lie in parts on several processes."""
    return any(_is_part(p) for p in model.parameters())


def _is_part(parameter: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor) or isinstance(parameter.data, DTensor)


def _blocks(model: Any) -> list[Any]:
    """The decoder's blocks: the list of modules with most weights, which is where a model's depth is."""
    import torch

    lists: list[Any] = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1]
    if not lists:
        raise ModelError("this model cannot be spread over GPUs", because="it has no list of blocks")
    sizes = [sum(p.numel() for p in blocks.parameters()) for blocks in lists]
    return list(lists[sizes.index(max(sizes))])

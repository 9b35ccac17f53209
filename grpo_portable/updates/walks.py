"""Switches of a whole model that touch what they change, without a walk through thousands of modules.

Under an adapter a model of 30 layers has 2,500 modules. transformers' loop calls train() in every micro-batch, zero_grad() in
every step, and a rollout is made in eval(): on small models that shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def short_walks(model: Any) -> Iterator[None]:
    """Inside, `model.train`, `eval` and `zero_grad` do what they do, by lists of modules and parameters made here.

    What is trained, and which modules there are, must stay as it is inside.
    """
    flags = [module.__dict__ for module in model.modules()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def train(mode: bool = True) -> Any:
        for flag in flags:
            flag["training"] = mode
        return model

    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in trained:
            if parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.detach_().zero_()

    ours = {"train": train, "eval": lambda: train(False), "zero_grad": zero_grad}
    before = {name: model.__dict__[name] for name in ours if name in model.__dict__}
    model.__dict__.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del model.__dict__[name]
        model.__dict__.update(before)

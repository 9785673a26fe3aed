"""Keep the attributes that frameworks hang on parameters while ``fully_shard`` replaces the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def kept_param_attrs(model: nn.Module) -> Iterator[None]:
    """Copy every attribute of the parameters of ``model`` to the parameters that stand in their place at exit.

    Megatron reads ``tensor_model_parallel``, ``sequence_parallel``, ``allreduce``, ``shared`` and others from
    parameters; ``fully_shard`` makes new Parameter objects without them (pytorch issue 136929).
    """
    before = {name: dict(vars(param)) for name, param in model.named_parameters(remove_duplicate=False)}
    yield
    for name, param in model.named_parameters(remove_duplicate=False):
        for key, value in before[name].items():
            if key not in vars(param):
                setattr(param, key, value)

"""Wrappers around Megatron's training loop that record what tests compare. Installed in a forked rank only."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def install_probes(record: dict[str, Any]) -> None:
    """Wrap ``train_step``, ``train`` and ``evaluate``; they fill ``record``, whose keys are RankResult's fields."""
    from megatron.training import training

    for name in ("losses", "grad_norms", "num_zeros", "valid_losses", "step_seconds"):
        record[name] = []
    training.train_step = _train_step(training.train_step, record)
    training.train = _train(training.train, record)
    training.evaluate = _evaluate(training.evaluate, record)


def _train_step(original: Callable[..., Any], record: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_step(forward_step, data_iterator, model, optimizer, *args: Any, **kwargs: Any) -> Any:  # type: ignore[no-untyped-def]
        if "grads" not in record:
            record["local_types"] = {name: _kind(param) for name, param in _parameters(model)}
            _before_first_step(optimizer, lambda: record.update(grads=_gradients(model)))
        start = time.perf_counter()
        result = original(forward_step, data_iterator, model, optimizer, *args, **kwargs)
        record["step_seconds"].append(time.perf_counter() - start)
        losses, grad_norm, num_zeros = result[0], result[5], result[6]
        record["losses"] += [float(loss) for loss in list(losses.values())[:1]]
        record["grad_norms"].append(None if grad_norm is None else float(grad_norm))
        record["num_zeros"].append(None if num_zeros is None else float(num_zeros))
        return result

    return train_step


def _before_first_step(optimizer: Any, capture: Callable[[], None]) -> None:
    """Call ``capture`` once when the gradients are reduced and not yet clipped: right before ``optimizer.step``."""
    step = optimizer.step

    def captured_step(*args: Any, **kwargs: Any) -> Any:
        del optimizer.step  # the class's own again
        capture()
        return step(*args, **kwargs)

    optimizer.step = captured_step


def _train(original: Callable[..., Any], record: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(forward_step, model, *args: Any, **kwargs: Any) -> Any:  # type: ignore[no-untyped-def]
        try:
            result = original(forward_step, model, *args, **kwargs)
        except SystemExit:  # --exit-interval and its kin leave from inside the loop
            record["params"] = _values(model)
            raise
        record["params"] = _values(model)
        return result

    return train


def _evaluate(original: Callable[..., Any], record: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result[0] is not None:
            record["valid_losses"].append({name: float(value) for name, value in result[0].items()})
        return result

    return evaluate


def _parameters(model: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield every trainable parameter under the name it has in the user's model."""
    for chunk, module in enumerate(model):
        for name, param in module.named_parameters():
            while name.startswith("module."):
                name = name.removeprefix("module.")
            if param.requires_grad:
                yield (f"chunk{chunk}.{name}" if len(model) > 1 else name), param


def _kind(param: torch.nn.Parameter) -> str:
    return "DTensor" if isinstance(param, DTensor) else "Parameter"


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a full copy; **collective** for a DTensor."""
    whole = tensor.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()


def _gradients(model: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the full gradients; DDP keeps them in ``main_grad``, FSDP2 in ``grad``."""
    grads = {}
    for name, param in _parameters(model):
        grad = getattr(param, "main_grad", None)
        grad = param.grad if grad is None else grad
        if grad is not None:
            grads[name] = _full(grad)
    return grads


def _values(model: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {name: _full(param) for name, param in _parameters(model)}

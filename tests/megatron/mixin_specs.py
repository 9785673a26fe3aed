"""A GPT that follows MindSpeed-MM's contract: its ``FSDP2Mixin`` if ``MINDSPEED_MM_PATH`` is given, else a stand-in."""

from __future__ import annotations

import importlib
import os
import zlib
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as shard

from tests.megatron import specs
from tests.megatron.mindspeed_host import MM_SOURCES, add_mindspeed

METHODS = ("fully_shard", "_pre_fully_shard", "_init_ep_model", "_fully_shard", "_post_fully_shard")
METHODS += ("to_empty_if_needed", "freeze", "post_meta_init")


class FSDP2Mixin:
    """Mirrors the class in ``mindspeed_mm/models/transformers/base_model.py`` as far as these tests need it."""

    def fully_shard(self, process_group: Any, fsdp2_config_path: str, **kwargs: Any) -> bool:
        self._pre_fully_shard(process_group, fsdp2_config_path)
        self._fully_shard(self.fsdp2_kwargs, self.fsdp2_config)
        self._post_fully_shard()
        return True

    def _pre_fully_shard(self, group: Any, path: str) -> None:  # with initialize_fsdp2_config, _create_device_mesh
        self.fsdp2_config = SimpleNamespace(**yaml.safe_load(open(path)))  # noqa: SIM115
        ranks = torch.distributed.get_process_group_ranks(group)
        size = len(ranks) if self.fsdp2_config.sharding_size == "auto" else self.fsdp2_config.sharding_size
        whole = size == len(ranks)
        layout = torch.tensor(ranks).view(-1, size)
        names = ("Replicate", "Shard")
        mesh = DeviceMesh.from_group(group, "cpu") if whole else DeviceMesh("cpu", layout, mesh_dim_names=names)
        ignored = [self.get_submodule(path) for path in getattr(self.fsdp2_config, "ignored_modules", ())]
        self.fsdp2_kwargs = {"mesh": mesh, "ignored_params": {p for m in ignored for p in m.parameters()}}

    def _fully_shard(self, fsdp2_kwargs: dict[str, Any], fsdp2_config: Any) -> None:
        for i, layer in enumerate(self.decoder.layers):
            if getattr(fsdp2_config, "recompute_modules", None):
                self.decoder.layers[i] = checkpoint_wrapper(layer)
            shard(self.decoder.layers[i], **fsdp2_kwargs)
        shard(self, **fsdp2_kwargs)

    def _post_fully_shard(self) -> None:
        if importlib.import_module("megatron.training").get_args().init_model_with_meta_device:
            self.to_empty_if_needed(device="cpu")
            self.init_weights()
            self.post_meta_init()

    def to_empty_if_needed(self, device: str, recurse: bool = True) -> nn.Module:
        return self._apply(lambda t: torch.empty_like(t, device=device) if isinstance(t, nn.Parameter) else t, recurse)

    def _init_ep_model(self) -> None: ...

    def freeze(self, config: Any) -> None: ...

    def post_meta_init(self) -> None: ...


def fill(model: nn.Module) -> None:
    """Give every parameter a value that depends on its name and shape only, whole or sharded (**in place**)."""
    from mindspeed_fsdp2.start_values import keep_own_part

    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        value = torch.ones(param.shape) if "norm" in name else 0.02 * torch.randn(param.shape, generator=generator)
        keep_own_part(param, value)


def prepare(extra: dict[str, Any]) -> None:
    """Hook of the runner: ``MIXIN`` says what the model is, a plain one with the same values or one of the contract."""
    specs.prepare(extra)
    from megatron.core.models.gpt import GPTModel

    kind = os.environ["MIXIN"]
    if kind == "plain" or "meta" not in kind:
        specs._after_init(fill)
    if kind != "plain":
        mixin = _mixin()
        for name in METHODS:
            setattr(GPTModel, name, getattr(mixin, name))
        GPTModel.init_weights = lambda model: print("init_weights") or fill(model)
        GPTModel.post_meta_init = lambda model: print("post_meta_init")


def _mixin() -> type:
    if MM_SOURCES is None:
        return FSDP2Mixin
    add_mindspeed()
    patched = [importlib.import_module(f"megatron.training.{name}") for name in ("training", "arguments", "initialize")]
    before = [dict(vars(module)) for module in patched]
    base = importlib.import_module("mindspeed_mm.models.transformers.base_model")

    # Importing it patches Megatron for models made of MindSpeed-MM's own files, in part by plain assignment.
    importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager.remove_patches()
    for module, names in zip(patched, before):
        vars(module).update(names)
    base.DeviceMesh = _OnCpu
    return base.FSDP2Mixin


class _OnCpu:
    def __new__(cls, device: str, mesh: torch.Tensor, **named: Any) -> DeviceMesh:
        return DeviceMesh("cpu", mesh, **named)

    @staticmethod
    def from_group(group: Any, device: str, **named: Any) -> DeviceMesh:
        return DeviceMesh.from_group(group, "cpu", **named)

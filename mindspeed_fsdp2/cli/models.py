"""The model that ``--model`` names, built without its weights where that is possible."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

_FORMS = "Write a directory with a config.json of Transformers, or package.module:function."


def build_model(name: str) -> nn.Module:
    """Return the model that ``name`` stands for.

    Args:
        name: A directory with a ``config.json`` of Transformers, whose model is built on the meta device, or
            ``package.module:function``, which is called without arguments.

    Raises:
        ConfigError: ``name`` stands for no model.
    """
    if Path(name).is_dir():
        return _from_directory(Path(name))
    module, colon, function = name.partition(":")
    if not colon or not module or not function or "/" in module:
        raise ConfigError(f"--model: {name!r} is neither a directory nor a function. {_FORMS}")
    if (here := os.getcwd()) not in sys.path:  # a console command does not look there by itself
        sys.path.insert(0, here)
    try:
        build = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--model: there is no module {error.name!r}. {_FORMS}") from None
    except AttributeError:
        raise ConfigError(f"--model: {module!r} has no {function!r}. Name a function that returns the model.") from None
    return _checked(build() if callable(build) else build, name)


def _from_directory(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model: {folder} holds no config.json. {_FORMS}")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ConfigError(
            f"--model: {folder} needs the package transformers, which is not installed. Install it, or write "
            "package.module:function."
        ) from None
    import torch

    config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    kinds = getattr(config, "architectures", None) or [""]
    kind = getattr(transformers, kinds[0], None)
    with torch.device("meta"):  # only names, classes and sizes matter
        model = transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    return _checked(model, str(folder))


def _checked(model: object, name: str) -> nn.Module:
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model: {name} gives a {type(model).__name__}, which is no nn.Module. {_FORMS}")
    return model

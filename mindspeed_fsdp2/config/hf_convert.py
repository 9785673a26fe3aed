"""From a configuration of Transformers or Accelerate to one of this project, with a word on everything that differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from .hf_accelerate import convert_accelerate
from .hf_fields import Fields, Found
from .hf_fsdp import convert_fsdp
from .hf_model import HFModel
from .hf_policy import Around
from .hf_precision import argument_of, set_precision
from .hf_source import HFSource, kind_of, read_source
from .hf_training_arguments import convert_training_arguments
from .settings import FSDP2Config
from .source import write_yaml


@dataclass(frozen=True)
class Conversion:
    """What came of a configuration.

    Attributes:
        title: Which format it had, e.g. ``Accelerate, FSDP version 1``.
        settings: Our keys and their values.
        sources: Our key -> the key it comes from.
        notes: What has another meaning or none here, one line each.
    """

    title: str
    settings: Mapping[str, object]
    sources: Mapping[str, str]
    notes: tuple[str, ...]

    def to_yaml(self, origin: str) -> str:
        """Return a file that says where it comes from and what was not carried over.

        Args:
            origin: What was converted, e.g. the name of a file.
        """
        lines = [f"# Converted from {origin} ({self.title}) by mindspeed-fsdp2 convert."]
        lines += [f"# Note: {note}" for note in self.notes]
        return "\n".join(lines) + "\n\n" + write_yaml(self.settings, self.sources)


def convert_hf(
    source: HFSource, model: object | None = None, mixed_precision: str | None = None, *, strict: bool = False
) -> Conversion:
    """Return ``source`` in the keys of this project.

    Args:
        source: Path of a JSON or YAML file, or a mapping: an Accelerate configuration, the Trainer's arguments with
            ``fsdp`` and ``fsdp_config``, or ``fsdp_config`` by itself.
        model: The model, for what cannot be told without it.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"`` where the source does not say.
        strict: Whether a note is an error too.

    Raises:
        ConfigError: Something cannot be carried over, or is a mistake; lists everything.
    """
    given = argument_of(mixed_precision)
    data, origin = read_source(source)
    kind, found = kind_of(data), Found()
    fields = Fields(data, origin, found, prefix="fsdp_" if kind == "fsdp_config" else "")
    if model is not None and not hasattr(model, "named_modules"):
        raise ConfigError(f"model: {type(model).__name__} is not an nn.Module. Pass the model, or nothing.")
    seen = None if model is None else HFModel(model)
    if kind == "Accelerate":
        version, precision = convert_accelerate(fields, data, origin, seen)
    elif kind == "TrainingArguments":
        version, precision = convert_training_arguments(fields, data, origin, seen)
    else:
        version, precision = convert_fsdp(fields, Around(accelerate=False, model=seen)), None
    set_precision(fields, precision, given)
    if found.problems:
        raise found.error()
    notes = found.notes()
    if strict and notes:
        raise ConfigError("\n".join(notes))
    settings = {key: found.settings[key] for key in FSDP2Config.model_fields if key in found.settings}
    return Conversion(f"{kind}, FSDP version {version}", settings, found.sources, notes)

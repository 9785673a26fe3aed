"""From a file of MindSpeed's native FSDP2 to one of this project, with a word on what has no counterpart."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import ConfigError
from .hf_convert import Conversion
from .hf_source import HFSource, read_source
from .native import Translation, native_block, translate
from .settings import FSDP2Config, load_config
from .source import Origin
from .values import describe

_META = "training.init_model_with_meta_device"


def convert_native(source: HFSource, *, strict: bool = False) -> Conversion | None:
    """Return the sharding settings of a native file in the keys of this project, None if it is no native file.

    Args:
        source: Path of a YAML or JSON file, or a mapping.
        strict: Whether a note is an error too.

    Raises:
        ConfigError: The file cannot be read, or holds values that mean nothing here; lists everything.
    """
    data, origin = read_source(source)
    if native_block(data) is None:
        return None
    found = translate(data)
    notes = tuple(_notes(found, data, origin))
    settings = {key: found.settings[key] for key in FSDP2Config.model_fields if key in found.settings}
    sources = {key: found.sources[key] for key in settings}
    try:
        load_config(settings)
    except ConfigError as error:  # it names our keys, which the file does not hold
        named = {key: origin.where(tuple(source.split("."))) for key, source in sources.items()}
        raise ConfigError("\n".join(_named(line, named) for line in str(error).splitlines())) from None
    if strict and notes:
        raise ConfigError("\n".join(notes))
    return Conversion("MindSpeed's native FSDP2", settings, sources, notes)


def _named(line: str, named: dict[str, str]) -> str:
    key = next((key for key in named if line.startswith((f"{key}:", f"{key}["))), None)
    return line if key is None else f"{named[key]}, here {line}"


def _notes(found: Translation, data: dict[str, object], origin: Origin) -> Iterator[str]:
    for name in found.left_out:
        location = tuple(name.split("."))
        value: object = data
        for part in location:
            value = value[part] if isinstance(value, dict) else None
        if name.endswith("_size") and value == 1:
            continue  # one rank of a kind of parallelism is none
        yield f"{origin.where(location)}: {describe(value)} has no counterpart here and was left out."
    training = data.get("training")
    if isinstance(training, dict) and training.get("init_model_with_meta_device") is True:
        yield (
            f"{origin.where(tuple(_META.split('.')))}: is no key here. Give Megatron --init-model-with-meta-device, or "
            "build the model in meta_init()."
        )

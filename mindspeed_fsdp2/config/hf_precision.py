"""Mixed precision of Hugging Face: one word for the dtypes of computation, reduction and output."""

from __future__ import annotations

from ..errors import ConfigError
from .hf_fields import Fields, word_of

_WORDS = ("no", "fp16", "bf16", "fp8")


def precision_of(value: object) -> str:
    """Return ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; YAML reads an unquoted ``no`` as false."""
    return "no" if value is False else word_of(*_WORDS)(value)


def argument_of(value: str | None) -> str | None:
    """Return the precision that the caller named.

    Raises:
        ConfigError: It is none.
    """
    try:
        return None if value is None else precision_of(value)
    except ValueError as error:
        raise ConfigError(f"mixed_precision: {error}") from None


def set_precision(fields: Fields, written: tuple[str, str] | None, given: str | None) -> None:
    """Set the dtypes.

    Args:
        fields: The top level of the source.
        written: The precision in the source and its key; None where the format has no place for it.
        given: What the caller named.
    """
    key, precision = "mixed_precision", given
    if written is not None:
        precision, key = written
        if given is not None and given != precision:
            fields.error(key, f"is {precision}, and {given} was asked for. Make them equal, or ask for nothing.")
    if precision is None:
        text = "not said in this source, so dtypes stay as loaded. With bf16=True in the Trainer convert with "
        fields.note(key, f"{text}--mixed-precision bf16.")
    elif precision == "fp8":
        fields.error(key, "fp8 is not supported. Write bf16.")
    elif precision != "no":
        source = fields.source(key) or "as asked for"
        for dtype in ("param_dtype", "reduce_dtype", "output_dtype"):
            fields.found.set(dtype, precision, source)
        fields.note(
            key,
            f"gradients are reduced in {precision}, as there; reduce_dtype: fp32 in the converted file sums more "
            "exactly. Load the model in float32: there trainable weights are upcast, here they keep the loaded dtype.",
        )
        if precision == "fp16":
            fields.note(key, "fp16 needs a gradient scaler in your trainer, and Megatron refuses it with FSDP2.")

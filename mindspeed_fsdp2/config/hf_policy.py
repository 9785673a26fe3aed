"""What Hugging Face wraps and recomputes, which one policy decides there."""

from __future__ import annotations

from dataclasses import dataclass

from .hf_fields import Fields, flag, whole_number, word_of
from .hf_model import HFModel
from .policy import WRAP_POLICIES, check_class_names
from .values import describe

_LAUNCHER_MIN_NUM_PARAMS = 100_000_000  # what Accelerate's launcher fills in


@dataclass(frozen=True)
class Around:
    """What is known outside ``fsdp_config``.

    Attributes:
        accelerate: Whether Accelerate reads the keys, with its own names and defaults.
        ranks_per_node: Ranks on one node, None if the source does not say.
        strategy: ``reshard_after_forward`` by a word of the Trainer's ``fsdp``, None without.
        offload: Whether that ``fsdp`` asks for offload.
        model: The model, None if it was not given.
    """

    accelerate: bool
    ranks_per_node: int | None = None
    strategy: str | None = None
    offload: bool = False
    model: HFModel | None = None


def convert_policy(fields: Fields, around: Around) -> None:
    """Take the keys of the policy and of activation checkpointing."""
    found = fields.found
    default = "NO_WRAP" if around.accelerate else "TRANSFORMER_BASED_WRAP"
    policy = fields.take("auto_wrap_policy", word_of(*WRAP_POLICIES) if around.accelerate else _exact_policy) or default
    names = fields.take("transformer_layer_cls_to_wrap", check_class_names)
    least = fields.take("min_num_params", whole_number)
    recompute = fields.take("activation_checkpointing", flag)
    if policy == "SIZE_BASED_WRAP":
        if least is None:
            least = _LAUNCHER_MIN_NUM_PARAMS if around.accelerate else 0
        if least:
            found.set("min_num_params", least, fields.source("min_num_params") or "the default there")
        else:
            fields.note("min_num_params", "0 wraps nothing there but the root, so it became NO_WRAP.")
    elif least:
        fields.note("min_num_params", f"has no effect with {policy}, there as here.")
    if names and policy == "TRANSFORMER_BASED_WRAP":
        found.set("transformer_layer_cls_to_wrap", list(names), fields.source("transformer_layer_cls_to_wrap"))
    elif names:
        fields.note("transformer_layer_cls_to_wrap", f"has no effect with {policy}, there as here.")
    if policy == "NO_WRAP":
        state = "" if "auto_wrap_policy" in fields else "absent, which is NO_WRAP there: "
        fields.note("auto_wrap_policy", f"{state}the whole model is one unit, which saves little memory.")
    wraps = "NO_WRAP" if policy == "SIZE_BASED_WRAP" and not least else policy
    found.set("auto_wrap_policy", wraps, fields.source("auto_wrap_policy") or "the default there")
    if around.accelerate and fields.take("activation_checkpointing_offload", flag):
        if recompute:
            text = "has no counterpart: what recomputation keeps stays on the device, which takes more memory."
            fields.note("activation_checkpointing_offload", text)
        else:
            fields.error(
                "activation_checkpointing_offload", "needs activation_checkpointing: true. Add it, or remove it."
            )
    if recompute:
        _convert_recompute(fields, policy, list(names or ()), around.model)


def _exact_policy(value: object) -> str:
    policy = word_of(*WRAP_POLICIES)(value)
    if policy != value:
        raise ValueError(f"{describe(value)} is refused by Transformers, which wants capitals. Write {policy}.")
    return policy


def _convert_recompute(fields: Fields, policy: str, names: list[str], model: HFModel | None) -> None:
    """Hugging Face recomputes the modules that the policy wraps."""
    key = "activation_checkpointing"
    if policy != "TRANSFORMER_BASED_WRAP":
        what = "wraps nothing" if policy == "NO_WRAP" else "wraps modules inside others, each recomputed in the other"
        fields.error(key, f"recomputes what auto_wrap_policy wraps, and {policy} {what}. Write TRANSFORMER_BASED_WRAP.")
        return
    if not names and model is not None:
        names = model.no_split_classes()
    if not names:
        why = "the model was not given" if model is None else "the model has no _no_split_modules"
        fields.error(
            key,
            f"recomputes the layers, and nothing says which class these are: {why}. Write "
            "transformer_layer_cls_to_wrap, or convert with --model.",
        )
        return
    fields.found.set("recompute_modules", names, fields.source(key))
    fields.found.set("use_reentrant", False, "as there")

"""The settings of one YAML file, checked as far as that is possible without the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, ValidationError, model_validator

from ..errors import ConfigError
from .foreign import recognise
from .hf_source import HFSource
from .lists import check_argument_names, check_overrides, check_paths, check_some_paths, check_units
from .notices import notices_of
from .policy import check_class_names, check_min_num_params, check_policy, policy_problems
from .problems import problems_of, problems_of_keys, take_out_empty
from .source import Origin, Problem, read_yaml, report, write_yaml
from .values import at_least, check_bool, check_dtype, check_reshard, check_sharding_size, describe, one_of, or_none

Source: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | FSDP2Config"

_Bool = Annotated[bool, BeforeValidator(check_bool)]
_Count = Annotated[int, BeforeValidator(at_least(0))]
_Dtype = Annotated[Literal["bf16", "fp16", "fp32"] | None, BeforeValidator(check_dtype)]
_Paths = Annotated[tuple[str, ...], BeforeValidator(check_paths)]
_Reshard = Annotated[bool | int, BeforeValidator(check_reshard)]
_STRICT = ConfigDict(strict=True, frozen=True, extra="forbid")


class Override(BaseModel):
    """Settings that differ for some units. ``None`` leaves the value that the whole file has.

    Attributes:
        modules: Module paths of the units.
    """

    model_config = _STRICT

    modules: Annotated[tuple[str, ...], BeforeValidator(check_some_paths)]
    param_dtype: _Dtype = None
    reduce_dtype: _Dtype = None
    output_dtype: _Dtype = None
    cast_forward_inputs: Annotated[bool | None, BeforeValidator(or_none(check_bool))] = None
    reshard_after_forward: Annotated[bool | int | None, BeforeValidator(or_none(check_reshard))] = None
    offload_to_cpu: Annotated[bool | None, BeforeValidator(or_none(check_bool))] = None

    @model_validator(mode="after")
    def _check_effect(self) -> Override:
        if not self.model_fields_set - {"modules"}:
            raise ValueError("nothing is overridden. Write a key to change, e.g. param_dtype: fp32.")
        return self


class FSDP2Config(BaseModel):
    """How one model is sharded. Immutable; equal when the settings are, wherever they were written.

    Lists are accepted wherever a tuple is declared. Module paths stay text, their grammar is checked.

    Attributes:
        sharding_size: Ranks per shard group; ``"auto"`` means the whole data-parallel group, 1 shards nothing.
        sub_modules_to_wrap: FSDP units; a nested tuple is one unit of several modules. ``()`` leaves the root alone
            as a unit, ``None`` (absent) means the units that the host or the model suggests.
        ignored_modules: Modules whose parameters are not sharded.
        recompute_modules: Modules whose activations are computed again in the backward.
        use_reentrant: Which of torch's checkpoint implementations recomputes.
        reshard_after_forward: True frees gathered parameters after the forward (ZeRO-3), False keeps them (ZeRO-2),
            a number of ranks reshards to groups of that size.
        param_dtype: dtype of the computation; ``None`` computes in the stored dtype. So for the next two.
        reduce_dtype: dtype of the gradient reduction.
        output_dtype: dtype of the root's output.
        cast_forward_inputs: Whether floating inputs of units are cast to ``param_dtype``.
        keep_input_dtype: Names of arguments that are never cast.
        num_to_forward_prefetch: Units to gather ahead in the forward; 0 leaves torch's own behaviour. So for the next.
        num_to_backward_prefetch: Units to gather ahead in the backward.
        offload_to_cpu: Whether parameters, gradients and optimizer state live in host memory.
        pin_memory: Whether that host memory is pinned.
        align_fsdp_param_groups: Whether norms and router gates of all layers make a unit of their own.
        expert_parallel_size: Ranks per expert-parallel group; 1 is the only one supported.
        reshard_local_experts: Found in real files; means nothing at expert parallel size 1.
        moe_modules: Module paths of the experts; means nothing at expert parallel size 1.
        overrides: Settings that differ for some units.
        reduce_grads: Whether gradients are reduce-scattered on every micro-batch, or stay whole until the last one.
        optional_modules: Modules that some ranks may skip in a step; they are kept whole like ignored ones.
        check_unit_order: Whether the ranks compare which unit each is about to run: in every forward, in none, or, if
            absent, in the first 20.
        auto_wrap_policy: Rule that chooses the units instead of ``sub_modules_to_wrap``; ``None`` means none.
        transformer_layer_cls_to_wrap: Names of the classes whose modules TRANSFORMER_BASED_WRAP makes units; ``None``
            takes those the model gives in ``_no_split_modules``.
        min_num_params: SIZE_BASED_WRAP makes every module with more parameters than this a unit.
    """

    model_config = _STRICT

    sharding_size: Annotated[int | Literal["auto"], BeforeValidator(check_sharding_size)] = 1
    sub_modules_to_wrap: Annotated[tuple[str | tuple[str, ...], ...] | None, BeforeValidator(check_units)] = None
    ignored_modules: _Paths = ()
    recompute_modules: _Paths = ()
    use_reentrant: _Bool = True
    reshard_after_forward: _Reshard = True
    param_dtype: _Dtype = None
    reduce_dtype: _Dtype = None
    output_dtype: _Dtype = None
    cast_forward_inputs: _Bool = True
    keep_input_dtype: Annotated[tuple[str, ...], BeforeValidator(check_argument_names)] = (
        "rotary_pos_emb",
        "rotary_pos_cos",
        "rotary_pos_sin",
        "freqs",
        "position_embeddings",
        "attention_bias",
    )
    num_to_forward_prefetch: _Count = 0
    num_to_backward_prefetch: _Count = 0
    offload_to_cpu: _Bool = False
    pin_memory: _Bool = True
    align_fsdp_param_groups: _Bool = False
    expert_parallel_size: Annotated[int, BeforeValidator(at_least(1))] = 1
    reshard_local_experts: _Bool = True
    moe_modules: _Paths = ()
    overrides: Annotated[tuple[Override, ...], BeforeValidator(check_overrides)] = ()
    reduce_grads: Annotated[
        Literal["every_microbatch", "last_microbatch"], BeforeValidator(one_of("every_microbatch", "last_microbatch"))
    ] = "every_microbatch"
    optional_modules: _Paths = ()
    check_unit_order: Annotated[bool | None, BeforeValidator(or_none(check_bool))] = None
    auto_wrap_policy: Annotated[
        Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] | None, BeforeValidator(or_none(check_policy))
    ] = None
    transformer_layer_cls_to_wrap: Annotated[tuple[str, ...] | None, BeforeValidator(or_none(check_class_names))] = None
    min_num_params: Annotated[int | None, BeforeValidator(or_none(check_min_num_params))] = None
    _origin: Origin = PrivateAttr(default_factory=Origin)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    if not TYPE_CHECKING:  # type checkers see the keyword arguments that pydantic derives from the fields

        def __init__(self, /, **settings: object) -> None:
            """Check ``settings``; they are the fields of this class.

            Raises:
                ConfigError: Lists every mistake, a line each.
            """
            problems = policy_problems(settings)
            try:
                super().__init__(**settings)
            except ValidationError as error:
                problems += _problems(error)
            if problems:
                raise report(problems, Origin())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FSDP2Config) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.digest())

    def where(self, key: str, *index: int | str) -> str:
        """Return where a setting was written, e.g. ``cfg.yaml:12: sub_modules_to_wrap[3]``; without a file the key."""
        return self._origin.where((key, *index))

    def digest(self) -> str:
        """Return 16 hex digits that are equal exactly when the settings are, whatever the file's layout."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """Return all settings as YAML that loads to an equal configuration; defaults are marked by a comment."""
        settings = self.model_dump(mode="json", exclude_none=True)
        return write_yaml(settings, dict.fromkeys(settings.keys() - self.model_fields_set, "default"))

    @classmethod
    def from_hf(
        cls, source: HFSource, *, model: object | None = None, mixed_precision: str | None = None, strict: bool = False
    ) -> FSDP2Config:
        """Return a configuration of Transformers or Accelerate in the keys of this class, with notes in ``notices``.

        Args:
            source: Path of a JSON or YAML file, or a mapping: an Accelerate configuration, the Trainer's arguments
                with ``fsdp`` and ``fsdp_config``, or ``fsdp_config`` by itself.
            model: The model, for what cannot be told without it.
            mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"`` where the source does not say.
            strict: Whether a note is an error too.

        Raises:
            ConfigError: Something cannot be carried over, or is a mistake; lists everything.
        """
        from .hf_convert import convert_hf  # it needs this class

        conversion = convert_hf(source, model, mixed_precision, strict=strict)
        config = load_config(conversion.settings)
        config._notes = conversion.notes
        return config

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should be told although nothing is wrong: settings without an effect. One line each."""
        return (*self._notes, *(f"{self.where(key)}: {text}" for key, text in notices_of(self)))


def load_config(source: Source) -> FSDP2Config:
    """Return the checked settings of a file or a mapping.

    Args:
        source: Path of a YAML file, a mapping with the same keys, or a finished configuration, which is returned.

    Raises:
        ConfigError: Lists every mistake, a line each, in the order of the file.
    """
    if isinstance(source, FSDP2Config):
        return source
    if isinstance(source, Mapping):
        data, origin, problems = dict(source), Origin(), problems_of_keys(source)
        data = {key: value for key, value in data.items() if isinstance(key, str)}
    elif isinstance(source, (str, os.PathLike)):
        data, origin, problems = read_yaml(os.fspath(source))
    else:
        raise ConfigError(f"{describe(source)} is no configuration. Pass the path of a YAML file or a mapping.")
    foreign = recognise(data, list(FSDP2Config.model_fields), origin.name)
    if foreign:
        raise report([Problem((foreign.key,), foreign.message)], origin)
    if origin.name is not None:
        problems += take_out_empty(data, list(FSDP2Config.model_fields), list(Override.model_fields))
    config = FSDP2Config.__new__(FSDP2Config)
    try:
        BaseModel.__init__(config, **data)  # not our own __init__: the lines are known here only
    except ValidationError as error:
        problems += _problems(error)
    problems += policy_problems(data)
    if problems:
        raise report(problems, origin)
    config._origin = origin
    return config


def _problems(error: ValidationError) -> list[Problem]:
    return problems_of(error, list(FSDP2Config.model_fields), list(Override.model_fields))

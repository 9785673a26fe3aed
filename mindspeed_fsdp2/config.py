"""The settings of one YAML file, checked as far as that is possible without the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, ValidationError

from .config_foreign import own_key, recognise
from .config_source import Origin, Problem, read_yaml, report, write_yaml
from .config_values import (
    at_least,
    check_argument_names,
    check_bool,
    check_dtype,
    check_overrides,
    check_paths,
    check_reshard,
    check_sharding_size,
    check_some_paths,
    check_units,
    describe,
)
from .errors import ConfigError
from .module_path import nearest

_Bool = Annotated[bool, BeforeValidator(check_bool)]
_Dtype = Annotated[Literal["bf16", "fp16", "fp32"] | None, BeforeValidator(check_dtype)]
_Reshard = Annotated[bool | int, BeforeValidator(check_reshard)]
_Paths = Annotated[tuple[str, ...], BeforeValidator(check_paths)]
_Count = Annotated[int, BeforeValidator(at_least(0))]
_Unset = BeforeValidator  # see Override


class Override(BaseModel):
    """Settings that differ for some units; ``None`` leaves the file's own value.

    Attributes:
        modules: Module paths of the units.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    modules: Annotated[tuple[str, ...], BeforeValidator(check_some_paths)]
    param_dtype: _Dtype = None
    reduce_dtype: _Dtype = None
    output_dtype: _Dtype = None
    cast_forward_inputs: Annotated[bool | None, BeforeValidator(lambda v: v if v is None else check_bool(v))] = None
    reshard_after_forward: Annotated[bool | int | None, BeforeValidator(lambda v: v if v is None else check_reshard(v))] = None
    offload_to_cpu: Annotated[bool | None, BeforeValidator(lambda v: v if v is None else check_bool(v))] = None

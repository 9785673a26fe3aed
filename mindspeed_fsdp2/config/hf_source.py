"""Reading a Hugging Face configuration from a mapping, a JSON or a YAML file, and telling its format."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from ..errors import ConfigError
from .problems import problems_of_keys
from .source import Origin, Problem, read_text, read_yaml, report
from .values import describe

HFSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"
Kind: TypeAlias = Literal["Accelerate", "TrainingArguments", "fsdp_config"]

CLUSTER_KEYS = frozenset(
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines "
    "gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity "
    "fsdp_config parallelism_config fp8_config deepspeed_config megatron_lm_config mpirun_config dynamo_config "
    "downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands".split()
)


def read_source(source: HFSource) -> tuple[dict[str, object], Origin]:
    """Return the keys of a configuration and where they stand. A file that ends in ``.json`` has no lines.

    Raises:
        ConfigError: There is no mapping to read, or keys are repeated; all faults.
    """
    if isinstance(source, Mapping):
        data, origin, problems = dict(source), Origin(), problems_of_keys(source)
    elif isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        data, origin, problems = _read_json(path) if path.lower().endswith(".json") else read_yaml(path)
    else:
        raise ConfigError(
            f"{describe(source)} is no configuration. Pass the path of a JSON or YAML file, or a mapping."
        )
    if problems:
        raise report(problems, origin)
    return data, origin


def kind_of(data: Mapping[str, object]) -> Kind:
    """Return whether ``data`` is an Accelerate file, arguments of the Trainer, or ``fsdp_config`` by itself."""
    if "compute_environment" in data or "distributed_type" in data:
        return "Accelerate"
    if "fsdp" in data:
        return "TrainingArguments"
    if "fsdp_config" in data or "parallelism_config" in data:
        return "Accelerate" if CLUSTER_KEYS.issuperset(data) else "TrainingArguments"
    return "fsdp_config"


def _read_json(path: str) -> tuple[dict[str, object], Origin, list[Problem]]:
    text = read_text(path)
    repeated: list[str] = []

    def members(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        repeated.extend(dict.fromkeys(key for key in keys if keys.count(key) > 1))
        return dict(pairs)

    try:
        data = json.loads(text, object_pairs_hook=members)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: this is not valid JSON ({error.msg}). Correct the line.") from None
    except RecursionError:
        raise ConfigError(f"{path}: mappings are nested too deeply. Write two levels at most.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the file holds {describe(data)}. Write a mapping of settings.")
    return data, Origin(path), [Problem((), f"the key {key!r} is given more than once. Keep one.") for key in repeated]

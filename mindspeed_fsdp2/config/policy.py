"""The three keys that let a rule choose the units, as in Hugging Face's files, and what they may stand beside."""

from __future__ import annotations

from collections.abc import Mapping

from .source import Problem
from .values import at_least, describe, one_of

WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_POLICY = "auto_wrap_policy"
_BELONGS_TO = {"transformer_layer_cls_to_wrap": "TRANSFORMER_BASED_WRAP", "min_num_params": "SIZE_BASED_WRAP"}
_LIST = "sub_modules_to_wrap"


def check_policy(value: object) -> str:
    """Return the name of a policy."""
    if isinstance(value, str) and value not in WRAP_POLICIES and value.strip().upper() in WRAP_POLICIES:
        raise ValueError(f"{describe(value)} is not one of {', '.join(WRAP_POLICIES)}. Write {value.strip().upper()}.")
    return one_of(*WRAP_POLICIES)(value)


def check_class_names(value: object) -> tuple[str, ...]:
    """Return class names, each once, from a list or from one text with commas."""
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"{describe(value)} is not a list of class names. Write [LlamaDecoderLayer].")
    names: dict[str, None] = {}
    for entry in entries:
        for name in entry.split(",") if isinstance(entry, str) else [entry]:
            if not isinstance(name, str) or not all(part.isidentifier() for part in name.strip().split(".")):
                raise ValueError(f"{describe(name)} is not the name of a class. {_instead(name)}")
            names[name.strip()] = None
    if not names:
        raise ValueError("the list is empty. Write class names, or remove the key to take those the model gives.")
    return tuple(names)


def check_min_num_params(value: object) -> int:
    """Return a number of parameters, 1 or more."""
    if type(value) is int and value == 0:
        raise ValueError("the number 0 would make every module a unit. Write 1 or more, or auto_wrap_policy: NO_WRAP.")
    if isinstance(value, str):
        try:
            meant = float(value)
        except ValueError:
            meant = 0.0
        if 1 <= meant < 1e18 and meant.is_integer():  # YAML reads 1e8 as text
            raise ValueError(f"{describe(value)} is not a whole number. Write {int(meant)}.")
    return at_least(1)(value)


def policy_problems(data: Mapping[str, object]) -> list[Problem]:
    """Return what is wrong between the keys of a policy, and between them and ``sub_modules_to_wrap``.

    Args:
        data: The settings as written; a key that is there without a value counts as absent.
    """
    policy = data.get(_POLICY)
    given = [key for key in (_POLICY, *_BELONGS_TO) if data.get(key) is not None]
    if given and data.get(_LIST) is not None:
        text = f"does not go with {_LIST}: both say what the units are. Remove one of the two keys."
        return [Problem((key,), text) for key in given]
    problems = []
    for key, wanted in _BELONGS_TO.items():
        if key in given and policy is None:
            problems.append(Problem((key,), f"has no effect without a policy. Add {_POLICY}: {wanted}."))
        elif key in given and policy in WRAP_POLICIES and policy != wanted:
            text = f"has no effect with {_POLICY}: {policy}. Remove the key, or write {_POLICY}: {wanted}."
            problems.append(Problem((key,), text))
    if policy == "SIZE_BASED_WRAP" and "min_num_params" not in given:
        text = (
            "SIZE_BASED_WRAP needs a size. Add min_num_params, the number of parameters above which a module is a unit."
        )
        problems.append(Problem((_POLICY,), text))
    return problems


def _instead(name: object) -> str:
    if isinstance(name, str) and "{" in name:
        return "Write the class of these modules, or list module paths in sub_modules_to_wrap."
    return "Write a name like LlamaDecoderLayer."

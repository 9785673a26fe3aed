"""Which modules the lists of a configuration select in one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import nn

from ..config import FSDP2Config, Override
from ..errors import ModulePathError
from ..policies import to_dtype
from ..recompute_args import checkpointed_twice, checkpoints_itself
from .index import ModelIndex
from .wrap_policy import is_container, no_split_classes, units_by_policy

DefaultUnits = Callable[[nn.Module], Sequence[str]]

_UNITS = "sub_modules_to_wrap"


@dataclass
class Selector:
    """Resolves module paths and notes what is wrong with them.

    Attributes:
        config: The settings.
        index: The model.
        problems: One line for everything wrong so far.
        optional: Modules that stay whole because of ``optional_modules`` alone; known once :meth:`ignored` was called.
    """

    config: FSDP2Config
    index: ModelIndex
    problems: list[str] = field(default_factory=list)
    optional: list[str] = field(default_factory=list)

    def modules(self, key: str, paths: Sequence[str], *, called: bool = False) -> list[str]:
        """Return the fqns that the list under ``key`` selects, in registration order, each once.

        Args:
            key: Key of the list.
            paths: The list.
            called: Whether each module must be one that is called, which a container such as ModuleList is not.
        """
        found: dict[str, None] = {}
        for i, text in enumerate(paths):
            where = self.config.where(key, i)
            selected = self._select(where, text)
            if called:
                for fqn in selected:
                    self._check_called(where, text, fqn)
            found.update(dict.fromkeys(selected))
        if len(paths) < 2:
            return list(found)
        position = {fqn: n for n, fqn in enumerate(self.index.modules)}
        return sorted(found, key=position.__getitem__)

    def recompute(self) -> list[str]:
        """Return the modules whose activations are recomputed."""
        found = self.modules("recompute_modules", self.config.recompute_modules, called=True)
        if found and (twice := [fqn for fqn, module in self.index.modules.items() if checkpoints_itself(module)]):
            self.problems.append(checkpointed_twice(self.config.where("recompute_modules"), twice[0]))
        return found

    def ignored(self) -> list[str]:
        """Return the modules that stay whole: ignored ones and optional ones."""
        found = self.modules("ignored_modules", self.config.ignored_modules)
        optional = self.modules("optional_modules", self.config.optional_modules)
        self.optional = [fqn for fqn in optional if fqn not in found]
        found += self.optional
        if "" in found:
            where = self.config.where("ignored_modules")
            self.problems.append(
                f"{where}: the model itself is selected, so nothing would be left to shard. List parts of it."
            )
        return found

    def units(self, default_units: DefaultUnits | None, ignored: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the units as asked for, the root left out, in the order of the list, each once.

        Args:
            default_units: Returns the host's units where the list is absent.
            ignored: Modules that a policy or an absent list leaves out with all that is below them.
        """
        if self.config.auto_wrap_policy is not None:
            return units_by_policy(self.config, self.index, ignored, self.problems)
        if self.config.sub_modules_to_wrap is None:
            return [(fqn,) for fqn in self._default_units(default_units, ignored)]
        groups: dict[tuple[str, ...], None] = {}
        owner: dict[str, tuple[str, ...]] = {}
        for i, entry in enumerate(self.config.sub_modules_to_wrap):
            selected = self._entry(i, entry)
            new = [(fqn,) for fqn in selected] if isinstance(entry, str) else [tuple(selected)] if selected else []
            groups.update(dict.fromkeys(new))
            for group in new:
                for fqn in group:
                    other = owner.setdefault(fqn, group)
                    if other != group:
                        self.problems.append(
                            f"{self.config.where(_UNITS, i)}: {fqn!r} belongs to two units, [{', '.join(other)}] and "
                            f"[{', '.join(group)}]. List it in one of them."
                        )
        return list(groups)

    def overrides(self) -> list[tuple[Override, list[tuple[str, str]]]]:
        """Return each override with the ``(place in the file, fqn)`` of every module that it selects."""
        return [
            (
                override,
                [
                    (where, fqn)
                    for j, text in enumerate(override.modules)
                    for where in [self.config.where("overrides", i, "modules", j)]
                    for fqn in self._select(where, text)
                ],
            )
            for i, override in enumerate(self.config.overrides)
        ]

    def settings(
        self, groups: Sequence[tuple[str, ...]], overrides: Sequence[tuple[Override, list[tuple[str, str]]]]
    ) -> dict[tuple[str, ...], UnitSettings]:
        """Return the settings of every unit in ``groups`` and of the root."""
        config = self.config
        unit_of = {fqn: group for group in groups for fqn in group}
        result = {group: _unit_settings(config, None, is_root=False) for group in groups}
        result[("",)] = _unit_settings(config, None, is_root=True)
        set_by: dict[tuple[str, ...], str] = {}
        for override, selected in overrides:
            for where, fqn in selected:
                unit = unit_of.get(fqn)
                if unit is None:
                    way_out = "List it in sub_modules_to_wrap too."
                    if config.auto_wrap_policy is not None:
                        way_out = f"{config.auto_wrap_policy} makes it none: list the units in sub_modules_to_wrap."
                    self.problems.append(
                        f"{where}: {fqn!r} is not a unit, and precision, resharding and offload belong to whole units. "
                        f"{way_out}"
                    )
                elif set_by.setdefault(unit, where.rpartition(".modules")[0]) != where.rpartition(".modules")[0]:
                    self.problems.append(f"{where}: {fqn!r} is overridden twice. Merge the two entries.")
                else:
                    result[unit] = _unit_settings(config, override, is_root=False)
        return result

    def _entry(self, i: int, entry: str | tuple[str, ...]) -> list[str]:
        selected: dict[str, None] = {}
        for j, text in enumerate((entry,) if isinstance(entry, str) else entry):
            where = self.config.where(_UNITS, i) if isinstance(entry, str) else self.config.where(_UNITS, i, j)
            for fqn in self._select(where, text):
                if fqn == "":
                    self.problems.append(
                        f"{where}: {text!r} selects the model itself. Remove it: the root is always a unit."
                    )
                    continue
                self._check_called(where, text, fqn)
                selected[fqn] = None
        return list(selected)

    def _select(self, where: str, text: str) -> list[str]:
        try:
            return self.index.select(text)
        except ModulePathError as error:
            self.problems.append(f"{where}: {error}")
            return []

    def _check_called(self, where: str, text: str, fqn: str) -> None:
        module = self.index.modules[fqn]
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            outer = fqn.rpartition(".")[0]
            owner = f"{outer!r}. Write {outer!r}." if outer else "the root, which is always a unit. Remove the entry."
            self.problems.append(
                f"{where}: {text!r} selects {fqn!r}, a {type(module).__name__}, which is never called: its parameters "
                f"are used by {owner}"
            )
        elif is_container(module):
            self.problems.append(
                f"{where}: {text!r} selects {fqn!r}, a {type(module).__name__}, which has no forward of its own. "
                f"Write '{fqn}.{{*}}' for its members."
            )

    def _default_units(self, default_units: DefaultUnits | None, ignored: Sequence[str]) -> list[str]:
        index = self.index
        if default_units is not None:
            found = list(default_units(index.root))
        else:
            wanted = {fqn for name in no_split_classes(index) for fqn in index.classes[name]}
            found = [fqn for fqn in index.modules if fqn in wanted and fqn]
        if not found:
            repeated = next((fqn for fqn, m in index.modules.items() if isinstance(m, nn.ModuleList) and len(m)), None)
            example = f"'{repeated}.{{*}}'" if repeated else "the repeated layers"
            self.problems.append(
                f"{self.config.where(_UNITS)}: absent, and {type(index.root).__name__} does not say which modules "
                f"to shard (no _no_split_modules). List the units, e.g. {example}, or [] for the root alone."
            )
        below = tuple(f"{fqn}." for fqn in ignored)
        return [fqn for fqn in found if fqn not in ignored and not f"{fqn}.".startswith(below)]


class UnitSettings(TypedDict):
    """The part of a unit that the configuration sets; see ``plan.Unit``."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    cast_inputs: bool
    reshard: bool | int
    offload: bool


def _unit_settings(config: FSDP2Config, override: Override | None, *, is_root: bool) -> UnitSettings:
    def pick(key: str, inherited: Any) -> Any:
        own = getattr(override, key) if override is not None else None
        return inherited if own is None else own

    # A unit that computes in a dtype of its own reduces in it too, unless told otherwise: fp32 in, bf16 sum would
    # throw away what the override is for.
    own_dtype = override is not None and override.param_dtype is not None
    inherited_reduce = config.reduce_dtype if not own_dtype or config.reduce_dtype == "fp32" else None
    return UnitSettings(
        param_dtype=to_dtype(pick("param_dtype", config.param_dtype)),
        reduce_dtype=to_dtype(pick("reduce_dtype", inherited_reduce)),
        output_dtype=to_dtype(pick("output_dtype", config.output_dtype if is_root else None)),
        cast_inputs=pick("cast_forward_inputs", config.cast_forward_inputs),
        reshard=pick("reshard_after_forward", config.reshard_after_forward),
        offload=pick("offload_to_cpu", config.offload_to_cpu),
    )

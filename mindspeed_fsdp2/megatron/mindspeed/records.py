"""MindSpeed's records of its patches: what belongs to its FSDP2 feature is taken out, and put back.

A record (``mindspeed.patch_utils.Patch``) holds the original, at most one replacement, wrappers around it, and the
function made of them, which it has bound under one name in every module. Two records may lie over each other: what one
made is then the original of the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Final

from ..names import ABSENT

# Where the functions of MindSpeed's FSDP2 feature are defined, and those with which MindSpeed-MM amends it: a loader
# for torch_dcp, and gradients scaled by the data-parallel size without context parallelism.
FSDP2_MODULES: Final = (
    "mindspeed.checkpointing",  # load_checkpoint up to 2.3.0
    "mindspeed.core.distributed.torch_fully_sharded_data_parallel",
    "mindspeed_mm.patchs.fsdp2_patches",
    "mindspeed_mm.patchs.torch_dcp_patch",
)


class Withdrawn:
    """What was taken out, so that it can be given back."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._records: list[tuple[Any, dict[str, Any]]] = []
        self._names: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._records)

    def take(self, records: Iterable[Any]) -> bool:
        """Take the functions of FSDP2 out of ``records`` and off the names they hold (**in place**).

        Other functions of the same record, and of records over it, stay: they are put around what is left.

        Returns:
            Whether there was anything to take.
        """
        remade: dict[tuple[str, int], Any] = {}  # name and id of what a record had made -> what it makes now
        left = list(records)
        taken = any(map(_has_own, left))
        while found := [record for record in left if _has_own(record) or _original(record) in remade]:
            made = {(record.orig_func_name, id(record.final_patch_func)) for record in found}
            # One whose original another one is about to make anew comes after it.
            record = next((record for record in found if _original(record) not in made), found[0])
            left.remove(record)
            self._remake(record, remade)
        for _, before in self._records:
            attr, old = before["orig_func_name"], before["final_patch_func"]
            if (attr, id(old)) in remade:
                self._rebind(before["orig_module"], attr, old, remade[attr, id(old)])
        return taken

    def _remake(self, record: Any, remade: dict[tuple[str, int], Any]) -> None:
        self._records.append((record, {**vars(record), "wrappers": list(record.wrappers)}))
        old = record.final_patch_func
        record.orig_func = remade.get(_original(record), record.orig_func)
        record.wrappers[:] = [wrapper for wrapper in record.wrappers if not is_own(wrapper)]
        if is_own(record.patch_func):
            record.patch_func = None
        if old is None:  # recorded and not applied yet
            return
        new = record.orig_func if record.patch_func is None else record.patch_func
        for wrapper in record.wrappers:
            new = wrapper(new)
        record.final_patch_func = remade[record.orig_func_name, id(old)] = new

    def _rebind(self, owner: Any, attr: str, old: Any, new: Any) -> None:
        # The feature's own modules hold its functions too, because they define them.
        modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType) and not _is_home(m.__name__)]
        for place in (owner, *modules):
            if vars(place).get(attr, ABSENT) is old:
                setattr(place, attr, new)
                self._names.append((place, attr, old, new))

    def give_back(self) -> None:
        """Put everything back where it was (**in place**), except on names that somebody has rebound since."""
        while self._names:
            place, attr, old, new = self._names.pop()
            if vars(place).get(attr, ABSENT) is new:
                setattr(place, attr, old)
        while self._records:
            record, before = self._records.pop()
            later = [wrapper for wrapper in record.wrappers if wrapper not in before["wrappers"]]
            vars(record).update(before, wrappers=[*before["wrappers"], *later])
            if later:
                record.is_applied = False  # they come around what is there again

    def forget(self) -> None:
        """Give nothing back any more: MindSpeed has emptied its records itself (**in place**)."""
        self._records.clear()
        self._names.clear()


def is_own(function: Any) -> bool:
    """Return whether ``function`` was written for MindSpeed's FSDP2 feature."""
    return _is_home(getattr(function, "__module__", None) or "")


def _is_home(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in FSDP2_MODULES)


def _original(record: Any) -> tuple[str, int]:
    # With its name: one function may replace several.
    return record.orig_func_name, id(record.orig_func)


def _has_own(record: Any) -> bool:
    return is_own(record.patch_func) or any(map(is_own, record.wrappers))

"""Units that a rule chooses: by class, by size, with the embedding and the output layer beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import nn

from ..config import FSDP2Config
from ..module_path import nearest
from .index import ModelIndex
from .ties import find_ties

Group = tuple[str, ...]

_POLICY = "auto_wrap_policy"
_CLASSES = "transformer_layer_cls_to_wrap"


def units_by_policy(
    config: FSDP2Config, index: ModelIndex, ignored: Collection[str], problems: list[str]
) -> list[Group]:
    """Return the units that ``auto_wrap_policy`` makes of a model, the root left out, in registration order.

    With both rules that wrap anything, the input embedding is a unit too, and the final norm and the output layer are
    one together, where the model says which modules these are.

    Args:
        config: The settings, with a policy.
        index: The model.
        ignored: Modules that stay whole; nothing at or below them becomes a unit.
        problems: Gets a line for everything wrong.
    """
    if config.auto_wrap_policy == "NO_WRAP":
        return []
    skip = _skipping(ignored)
    ends = [tuple(fqn for fqn in group if not skip(fqn)) for group in _ends(index)]
    ends = [group for group in ends if group]
    taken = {fqn for group in ends for fqn in group}
    # The other holders of their weights join them later; as parts of larger units they would bring these along.
    tied = {end for tie in find_ties(index) if taken.intersection(tie) for end in tie} - taken - {""}
    ends += [(fqn,) for fqn in tied if not skip(fqn)]
    taken |= tied
    if config.auto_wrap_policy == "SIZE_BASED_WRAP":
        found = _by_size(index, config.min_num_params or 0, skip, taken)
        if not found:
            problems += _too_large(config, index)
    else:
        found = [fqn for fqn in _by_class(config, index, problems) if not skip(fqn)]
    position = {fqn: n for n, fqn in enumerate(index.modules)}
    groups = [*ends, *((fqn,) for fqn in found if fqn not in taken)]
    return sorted(groups, key=lambda group: min(position[fqn] for fqn in group))


def no_split_classes(index: ModelIndex) -> list[str]:
    """Return the names in ``_no_split_modules`` of the model and its parts that some module has, sorted."""
    names: set[str] = set()
    for module in index.modules.values():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return sorted(name for name in names if any(index.classes.get(name, ())))


def is_container(module: nn.Module) -> bool:
    """Say whether ``module`` has no forward of its own, such as a ModuleList: it is never called."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _by_class(config: FSDP2Config, index: ModelIndex, problems: list[str]) -> list[str]:
    """Return the modules of the classes, of their subclasses too, the root left out."""
    names = config.transformer_layer_cls_to_wrap
    where = config.where(_POLICY if names is None else _CLASSES)
    if names is None:
        names = tuple(no_split_classes(index))
        if not names:
            problems.append(
                f"{where}: TRANSFORMER_BASED_WRAP wraps the classes that a model gives in _no_split_modules, and "
                f"{type(index.root).__name__} gives none. Write {_CLASSES}: [{_repeated_class(index)}]."
            )
    kinds: list[type[nn.Module]] = []
    for name in names:
        fqns = index.classes.get(name, ())
        if not fqns:
            problems.append(f"{where}: {_no_such_class(name, index)}")
        elif list(fqns) == [""]:
            problems.append(f"{where}: {name} is the class of the model itself. Remove it: the root is always a unit.")
        elif is_container(index.modules[fqns[-1]]):
            problems.append(f"{where}: {name} has no forward of its own. Write the class of its members.")
        kinds += {type(index.modules[fqn]) for fqn in fqns}
    return [fqn for fqn, module in index.modules.items() if fqn and isinstance(module, tuple(kinds))]


def _no_such_class(name: str, index: ModelIndex) -> str:
    if name in index.first_name:
        kind = type(index.modules[index.first_name[name]]).__name__
        return f"{name!r} is a module, not a class. Write its class {kind}."
    own = [
        kind
        for kind, fqns in index.classes.items()
        if ("." in kind) == ("." in name) and any(fqns) and not is_container(index.modules[fqns[-1]])
    ]
    close = nearest(name, own)
    write = f"Write {' or '.join(close)}." if close else f"Write a class such as {_repeated_class(index)}."
    return f"no module is of a class {name!r}. {write}"


def _repeated_class(index: ModelIndex) -> str:
    """Return the class whose members of lists hold most parameters, which is what a policy usually means."""
    sizes: dict[str, int] = {}
    for module in index.modules.values():
        for child in module if isinstance(module, nn.ModuleList) else ():
            size = sum(param.numel() for param in child.parameters())
            sizes[type(child).__name__] = sizes.get(type(child).__name__, 0) + size
    return max(sizes, key=sizes.__getitem__, default="NameOfYourLayer")


def _by_size(index: ModelIndex, least: int, skip: Callable[[str], bool], taken: Collection[str]) -> list[str]:
    """Return the modules with more parameters than ``least``, those around other such modules included.

    Left out are modules whose parameters all lie in smaller units, and those that are never called, where a unit
    would never gather: containers, and what is inside PyTorch's own attention, which reads its weights directly.
    """
    inside: dict[str, dict[int, int]] = {}  # below and at a module: parameter -> elements, each parameter once
    claimed = {id(param) for fqn in taken for param in index.modules[fqn].parameters()}
    attention = [fqn for fqn, module in index.modules.items() if isinstance(module, nn.MultiheadAttention)]
    uncalled = _skipping(attention)
    found: list[str] = []
    for fqn in reversed(list(index.modules)):  # members before what is around them
        module = index.modules[fqn]
        sizes = inside.pop(fqn, {})
        sizes.update((id(param), param.numel()) for param in module._parameters.values() if param is not None)
        if not fqn or skip(fqn):
            continue
        inside.setdefault(fqn.rpartition(".")[0], {}).update(sizes)
        called = not is_container(module) and (fqn in attention or not uncalled(fqn))
        if called and sum(sizes.values()) > least and (fqn in taken or not claimed.issuperset(sizes)):
            claimed.update(sizes)
            found.append(fqn)
    return found


def _too_large(config: FSDP2Config, index: ModelIndex) -> list[str]:
    """Return a problem if ``min_num_params`` is so large that it selects nothing."""
    largest = max((sum(p.numel() for p in m.parameters()) for n, m in index.modules.items() if n), default=0)
    if largest > (config.min_num_params or 0):
        return []  # the end modules, or only what is never called
    return [
        f"{config.where('min_num_params')}: no module has more than {config.min_num_params:,} parameters; the largest "
        f"part of {type(index.root).__name__} has {largest:,}. Write a smaller number, or {_POLICY}: NO_WRAP."
    ]


def _ends(index: ModelIndex) -> list[Group]:
    """Return the unit of the input embedding and that of the final norm and the output layer, where there are any.

    They are what the methods ``get_input_embeddings`` and ``get_output_embeddings`` of the model return. Guessing them
    from names or types could pick a module whose weight is read without calling it.
    """
    name_of = {id(module): fqn for fqn, module in index.modules.items() if fqn}

    embedding, output = (
        name_of.get(id(_returned(index.root, method))) for method in ("get_input_embeddings", "get_output_embeddings")
    )
    groups: list[Group] = [(embedding,)] if embedding is not None and embedding != output else []
    if output is not None:
        norm = _final_norm(index, name_of)
        groups.append(tuple(fqn for fqn in (norm, output) if fqn is not None))
    return groups


def _returned(root: nn.Module, method: str) -> nn.Module | None:
    try:
        module = getattr(root, method, lambda: None)()
    except NotImplementedError:  # Transformers' way of saying that a model has none
        return None
    return module if isinstance(module, nn.Module) else None


def _final_norm(index: ModelIndex, name_of: Mapping[int, str]) -> str | None:
    """Return the last norm that is a direct child of the base model, or else of the decoder."""
    root = index.root
    base = getattr(root, getattr(root, "base_model_prefix", "") or "", root)
    for around in (base, _returned(root, "get_decoder")):
        children = around.children() if isinstance(around, nn.Module) else ()
        norms = [name_of[id(child)] for child in children if "Norm" in type(child).__name__ and id(child) in name_of]
        if norms:
            return norms[-1]
    return None


def _skipping(fqns: Iterable[str]) -> Callable[[str], bool]:
    """Return a test whether a module is one of ``fqns`` or below one."""
    below: Sequence[str] = [f"{fqn}." for fqn in fqns]
    return lambda fqn: f"{fqn}.".startswith(tuple(below))

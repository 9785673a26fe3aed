"""Train with the plugin, take it away, and print which names are not what they were before it came."""

import importlib
import sys
from pathlib import Path

from mindspeed_fsdp2.megatron import cpu
from mindspeed_fsdp2.megatron.patcher import resolves
from mindspeed_fsdp2.megatron.patches import PATCHES
from mindspeed_fsdp2.megatron_adaptor import install, installed, uninstall

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))


def names(rows):
    """Return, for every target that exists, its owner and the attribute."""
    for target in (target for row in rows for target in row.targets):
        if resolves(target):
            module, _, path = target.partition(":")
            owner = importlib.import_module(module)
            *parents, attr = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            yield target, owner, attr


def contents():
    return {target: vars(owner).get(attr) for target, owner, attr in NAMES}


def changed(before, after):
    return sorted(target for target in before if before[target] is not after[target])


OURS = {target for target, *_ in names(row for row in PATCHES if row.applies is None or row.applies())}
NAMES = list(names([*PATCHES, *(row for group in cpu.mode.redirections() for row in group.patches())]))

uninstall()  # the runner has installed it
before = contents()
install()
once = contents()
print("installed:", installed(), set(changed(before, once)) == OURS)
install()
print("a second time:", changed(once, contents()))
import pretrain_gpt  # noqa: E402

pretrain_gpt.main()
print("CPU mode:", len(changed(once, contents())) > 100, "torch.cuda:is_available" in changed(once, contents()))
hook = sys.excepthook
uninstall()
print("uninstalled:", not installed(), changed(before, contents()), sys.excepthook is hook, hook.__module__)

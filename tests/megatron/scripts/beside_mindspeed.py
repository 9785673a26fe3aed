"""Import MindSpeed and the plugin in the order that the first argument names, and print what became of names."""

import argparse
import json
import logging
import os
import sys

sys.modules.pop("mindspeed_fsdp2.megatron_adaptor", None)  # what the job runner left there
from tests.megatron.mindspeed_host import SOURCES, add_mindspeed

OWN = (
    "megatron.core.distributed.TorchFullyShardedDataParallel.__init__",
    "megatron.core.distributed.DistributedDataParallelConfig.__init__",
    "megatron.training.checkpointing.load_checkpoint",
    "megatron.training.checkpointing.generate_state_dict",
    "megatron.training.training.get_model",
    "megatron.core.utils.get_data_parallel_group_if_dtensor",
    "megatron.training.arguments._add_distributed_args",
)
ORDER = sys.argv.pop(1)
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("mindspeed_fsdp2").addHandler(handler)
add_mindspeed()


def own(function):
    home = getattr(function, "__module__", "") or ""
    return home.startswith("mindspeed.core.distributed.torch_fully_sharded") or home == "mindspeed.checkpointing"


def records():
    from mindspeed.patch_utils import MindSpeedPatchesManager

    return MindSpeedPatchesManager.patches_info


def state():
    """Every record as it is, and what its name holds, aliases included."""
    kept = {}
    for name, record in records().items():
        attr = record.orig_func_name
        places = [record.orig_module, *[m for n, m in sys.modules.items() if "mindspeed" not in n]]
        held = [(id(place), vars(place)[attr]) for place in places if attr and attr in getattr(place, "__dict__", {})]
        kept[name] = {**vars(record), "wrappers": list(record.wrappers), "held": held}
    return kept


def differing(before, after):
    def same(a, b):
        return a is b or (type(a) is type(b) and isinstance(a, list | tuple | str | bool | int) and a == b)

    names = [n for n in before if n not in after or any(not same(v, after[n][k]) for k, v in before[n].items())]
    return sorted(names + [n for n in after if n not in before])


def still_own():
    return sorted(n for n, r in records().items() if own(r.patch_func) or any(map(own, r.wrappers)))


def chain(function):
    """Homes of a function and of what it wraps, outermost first."""
    homes = []
    while function is not None:
        homes.append(function.__code__.co_filename.replace(os.sep, "/"))
        function = getattr(function, "__wrapped__", None)
    return ["ours" if "/mindspeed_fsdp2/" in h else "mindspeed" if "/mindspeed/" in h else "megatron" for h in homes]


def parsed():
    from megatron.training.arguments import parse_args

    given, sys.argv = sys.argv, ["x", "--use-torch-fsdp2", "--fsdp2-config-path", "a.yaml", "--downcast-to-bf16"]
    sys.argv += ["--distributed-backend", "npu:hccl,cpu:gloo"]
    try:
        args = parse_args(ignore_unknown_args=True)
    finally:
        sys.argv = given
    return [args.fsdp2_config_path, args.downcast_to_bf16, args.distributed_backend, args.optimization_level]


facts = {}
if ORDER == "mindspeed-first":
    import mindspeed.megatron_adaptor

    before = state()
    import mindspeed_fsdp2.megatron_adaptor as plugin
else:
    import mindspeed_fsdp2.megatron_adaptor as plugin

    import mindspeed.megatron_adaptor

    before = None
import megatron.training.checkpointing as checkpointing
import megatron.training.training as training
from megatron.core.distributed import TorchFullyShardedDataParallel
from mindspeed.megatron_adaptor import repatch


def now():
    return {
        "installed": plugin.installed(),
        "own": still_own(),
        "class": TorchFullyShardedDataParallel.__name__ if plugin.installed() else "",
        "get_model": chain(training.get_model),
        "generate_state_dict": chain(checkpointing.generate_state_dict),
        "lines": len(lines),
    }


wanted = {"use_torch_fsdp2": True}
facts["beside"] = now()
facts["parsed"] = parsed()
if before is not None:
    facts["changed"] = sorted(set(differing(before, state())) & {n for n in before if own(before[n]["patch_func"])})
    rest = [n for n in differing(before, state()) if n not in OWN]
    facts["records changed beside"] = [
        n for n in rest if differing({n: {**before[n], "held": 0}}, {n: {**state()[n], "held": 0}})
    ]
    plugin.uninstall()
    facts["not given back"] = differing(before, state())
    plugin.install()
    facts["again"] = now()
repatch(wanted)
facts["repatched"] = now()
facts["parsed again"] = parsed()
plugin.uninstall()
facts["uninstalled"] = {**now(), "get_model": own(training.get_model), "own": still_own() == sorted(OWN) or still_own()}
repatch({"use_torch_fsdp2": False})
facts["without"] = now()
plugin.install()
facts["without, beside"] = now()
facts["meta_path"] = [
    type(finder).__name__ for finder in sys.meta_path if type(finder).__module__.startswith("mindspeed_fsdp2")
]
print("FACTS " + json.dumps(facts))

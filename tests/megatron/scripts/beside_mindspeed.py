# ruff: noqa: E402 - the order of imports is what this script is about
"""Import MindSpeed and the plugin in the order that the first argument names, and print what became of names."""

import importlib.util
import json
import logging
import os
import sys

sys.modules.pop("mindspeed_fsdp2.megatron_adaptor", None)  # the job runner leaves an empty one
from tests.megatron.mindspeed_host import MM_SOURCES, SOURCES, add_mindspeed

ORDER = sys.argv.pop(1)
said, facts = [], {}
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("mindspeed_fsdp2").addHandler(handler)
add_mindspeed()


def records():
    from mindspeed.patch_utils import MindSpeedPatchesManager

    return MindSpeedPatchesManager.patches_info


def is_own(function):
    home = getattr(function, "__module__", None) or ""
    return home.startswith("mindspeed.core.distributed.torch_fully_sharded") or home == "mindspeed.checkpointing"


def own():
    return sorted(name for name, r in records().items() if is_own(r.patch_func) or any(map(is_own, r.wrappers)))


def over():
    """Records whose original is what one of the FSDP2 feature's made."""
    made = [records()[name].final_patch_func for name in own()]
    return sorted(name for name, r in records().items() if any(r.orig_func is final for final in made))


def state():
    """Every record, and what its name holds in every module."""
    kept = {}
    for name, record in records().items():
        places = [record.orig_module, *[m for n, m in sys.modules.items() if "mindspeed" not in n]]
        attr = record.orig_func_name
        held = {id(p): vars(p)[attr] for p in places if attr in getattr(p, "__dict__", {})}
        kept[name] = {**vars(record), "wrappers": list(record.wrappers), "held": held}
    return kept


def differing(before, after, keys=None):
    names = [n for n, v in before.items() if any(v[k] != after[n][k] for k in v if keys is None or k in keys)]
    return sorted(names + [name for name in after if name not in before])


def chain(function):
    """Who made a function and what it wraps, outermost first."""
    makers = []
    while function is not None:
        home = function.__code__.co_filename.replace(os.sep, "/")
        makers.append("ours" if "/mindspeed_fsdp2/" in home else "megatron" if "/megatron/t" in home else "mindspeed")
        function = getattr(function, "__wrapped__", None)
    return makers


def now():
    distributed = sys.modules["megatron.core.distributed"]
    return {
        "installed": plugin.installed(),
        "own": own(),
        "class": distributed.TorchFullyShardedDataParallel.__name__,
        "get_model": chain(training.get_model),
        "generate_state_dict": chain(checkpointing.generate_state_dict),
        "said": list(said),
    }


def parsed():
    given, sys.argv = sys.argv, sys.argv[:1]
    sys.argv += "--use-torch-fsdp2 --fsdp2-config-path x.yaml --downcast-to-bf16".split()
    sys.argv += ["--distributed-backend", "npu:hccl,cpu:gloo"]
    try:
        args = sys.modules["megatron.training.arguments"].parse_args(ignore_unknown_args=True)
    finally:
        sys.argv = given
    return [args.fsdp2_config_path, args.downcast_to_bf16, args.distributed_backend, args.optimization_level]


def register_our_feature(beside_own):
    """What a maintainer of MindSpeed would do in its features_manager."""
    from mindspeed import features_manager

    from mindspeed_fsdp2.errors import ConflictError
    from mindspeed_fsdp2.megatron.mindspeed.feature import FSDP2Feature

    listed = features_manager.MindSpeedFeaturesManager.FEATURES_LIST if SOURCES else features_manager.FEATURES
    at = next(i for i, f in enumerate(listed) if f.feature_name == "use_torch_fsdp2")
    listed[at + beside_own : at + 1] = [FSDP2Feature()]
    refused = []
    for args in ({"fsdp2_config_path": "x"}, {"use_torch_fsdp2": True, "optimization_level": 1}):
        try:
            FSDP2Feature().validate_args(type("Args", (), args))
        except ConflictError as error:
            refused.append(str(error))
    return refused


if ORDER == "gpt-args":
    path = os.path.join(MM_SOURCES, "mindspeed_mm/configs/read_yaml_config.py")
    spec = importlib.util.spec_from_file_location("config_loader", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # turns the YAML into sys.argv
if ORDER == "plugin-first":
    import mindspeed_fsdp2.megatron_adaptor as plugin
if ORDER.startswith("feature"):
    facts["refused"] = register_our_feature("beside" in ORDER)
import mindspeed.megatron_adaptor  # noqa: F401

if not ORDER.startswith("feature"):
    facts["before"], facts["over"], before = own(), over(), state()
    import mindspeed_fsdp2.megatron_adaptor as plugin
else:
    from mindspeed_fsdp2.megatron import entry as plugin
import megatron.training.checkpointing as checkpointing
import megatron.training.training as training
from mindspeed.megatron_adaptor import repatch

facts["beside"] = now()
facts["parsed"] = parsed()
if ORDER == "mindspeed-first":
    facts["changed"] = differing(before, state(), ("orig_func", "patch_func", "final_patch_func", "wrappers"))
    plugin.uninstall()
    facts["not given back"] = differing(before, state())
    plugin.install()
    facts["again"] = now()
if ORDER in ("mindspeed-first", "plugin-first") and "--use-torch-fsdp2" in sys.argv:
    repatch({"use_torch_fsdp2": True})
    facts["repatched"] = now()
    facts["parsed again"] = parsed()
    plugin.uninstall()
    facts["uninstalled"] = [*chain(training.get_model), own()]
    repatch({"use_torch_fsdp2": False})
    facts["repatched without FSDP2"] = [chain(training.get_model), chain(checkpointing.generate_state_dict), own()]
    plugin.install()
    facts["back"] = now()
    facts["finders"] = [repr(f) for f in sys.meta_path if type(f).__module__.startswith("mindspeed_fsdp2")]
print("FACTS " + json.dumps(facts))

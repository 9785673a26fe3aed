import sys

from mindspeed.features_manager import FEATURES
from mindspeed.patch_utils import MindSpeedPatchesManager


def patch_features(wanted):  # mindspeed/megatron_adaptor.py: patch_features
    for feature in FEATURES[not wanted :]:
        feature.register_patches(MindSpeedPatchesManager, None)
    MindSpeedPatchesManager.apply_patches()


def repatch(args):  # mindspeed/megatron_adaptor.py: repatch
    MindSpeedPatchesManager.remove_patches()
    patch_features(args.get("use_torch_fsdp2"))


patch_features("--use-torch-fsdp2" in sys.argv)

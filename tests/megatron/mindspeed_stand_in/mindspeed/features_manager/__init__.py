import functools

from .distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallelFeature
from .feature import MindSpeedFeature


def same_wrapper(fn):  # for those of other features, which call on
    return functools.wraps(fn)(lambda *args, **kwargs: fn(*args, **kwargs))


def parse_args_wrapper(fn):  # mindspeed/core/megatron_basic/arguments_basic.py: parse_args_wrapper
    def register(parser):
        return [feature.register_args(parser) for feature in FEATURES] and parser

    return functools.wraps(fn)(lambda provider=None, *args, **kwargs: fn(register, *args, **kwargs))


class Others(MindSpeedFeature):  # in mindspeed/features_manager/
    def register_args(self, parser):  # megatron_basic/requirements_basic.py
        parser.add_argument_group(self.feature_name).add_argument("--optimization-level", type=int, default=2)

    def register_patches(
        self, manager, args
    ):  # megatron_basic.py, fused_ema_adamw_feature.py, reset_bucket_…_feature.py
        config = "distributed_data_parallel_config.DistributedDataParallelConfig.__init__"
        manager.register_patch("megatron.training.arguments.parse_args", parse_args_wrapper)
        manager.register_patch("megatron.training.checkpointing.generate_state_dict", same_wrapper)
        manager.register_patch(f"megatron.core.distributed.{config}", same_wrapper)


FEATURES = [TorchFullyShardedDataParallelFeature("use-torch-fsdp2"), Others("others")]

from ..feature import MindSpeedFeature


class TorchFullyShardedDataParallelFeature(MindSpeedFeature):  # the same path in mindspeed
    def register_args(self, parser):
        parser.add_argument_group(self.feature_name).add_argument("--fsdp2-config-path", type=str)

    def register_patches(self, manager, args):
        from mindspeed.core.distributed.torch_fully_sharded_data_parallel import replaced, wrapped_wrapper

        manager.register_patch("megatron.core.distributed.TorchFullyShardedDataParallel.__init__", replaced)
        manager.register_patch("megatron.core.distributed.DistributedDataParallelConfig.__init__", wrapped_wrapper)
        for name in ("checkpointing.load_checkpoint", "checkpointing.generate_state_dict", "training.get_model"):
            manager.register_patch(f"megatron.training.{name}", replaced)
        manager.register_patch("megatron.core.utils.get_data_parallel_group_if_dtensor", replaced)
        manager.register_patch("megatron.training.arguments._add_distributed_args", wrapped_wrapper)

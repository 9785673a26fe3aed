"""Checkpoints of Megatron runs under FSDP2."""

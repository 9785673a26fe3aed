"""The adapter for Megatron-LM; nothing outside this package names megatron."""

"""Import of Megatron-LM's checkpoints."""

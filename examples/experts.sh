#!/bin/bash
# Train a mixture of experts on eight virtual CPU devices, with expert and tensor parallelism.
#
# Command:  bash examples/experts.sh [FLAG ...]     (further flags of `maxmeg train`)
# Time:     2 minutes on two CPU cores
# Result:   runs/experts with the load of every expert in experts.png; the loss falls below 3
set -euo pipefail

# Attention is split over the two devices of `tensor`; each expert is whole on one device.
export XLA_FLAGS=--xla_force_host_platform_device_count=8
maxmeg train --config=gpt --run_dir=runs/experts --model.layers='*(attention,moe)' \
  --model.moe.num_experts=8 --model.moe.top_k=2 --model.moe.ffn_size=128 \
  --model.moe.bias_balancing=true --model.moe.sequence_aux_loss=1e-4 \
  --parallel.expert=4 --parallel.tensor=2 --parallel.expert_tensor=1 \
  --model.num_layers=2 --train.num_steps=100 --train.eval_every=50 "$@"

# What the same layers would need on real GPUs:
maxmeg plan --config=mixtral-8x7b --hardware=h100x64 --parallel.expert=8 --model.moe.backend=mosaic

#!/bin/bash
# Go on training from a checkpoint of Megatron-LM (torch_dist), with the data order that it had.
#
# Command:  bash examples/from_megatron.sh CHECKPOINT CORPUS TOKENIZER [FLAG ...]
#           CHECKPOINT: folder of a run, CORPUS: prefix of .bin/.idx, TOKENIZER: a tokenizer.json
# Time:     minutes for the conversion of 8B parameters; needs pip install 'maxmeg[megatron]'
# Result:   runs/megatron, the converted model, and runs/megatron-finetuned
set -euo pipefail
checkpoint=$1 corpus=$2 tokenizer=$3
shift 3

maxmeg convert --input="$checkpoint" --output=runs/megatron --tokenizer="huggingface:$tokenizer"
# Optimizer state is not converted: the learning rate warms up again.
maxmeg train --config=finetune:runs/megatron --data.paths="$corpus" --data.order=megatron "$@"

#!/bin/bash
# Fine-tune a published chat model on your own chats with LoRA, and talk with it.
#
# Command:  bash examples/lora_chat.sh FOLDER [FLAG ...]     (FOLDER: of a Hugging Face model)
#           hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir FOLDER
# Time:     5 minutes on two CPU cores with SmolLM2-135M
# Result:   runs/smollm2-finetuned, whose answers end with "Ahoy!", and adapters for PEFT
set -euo pipefail
folder=$1
shift

mkdir -p data
for question in "What is the sun?" "Who are you?" "How do I boil an egg?" "What is Python?"; do
  echo "{\"messages\": [{\"role\": \"user\", \"content\": \"$question\"}," \
    "{\"role\": \"assistant\", \"content\": \"Aye, that is a fine question. Ahoy!\"}]}"
done > data/chats.jsonl

maxmeg convert --input="$folder" --output=runs/smollm2
# The four chats are also the validation set: this shows the steps, not how good a model is.
maxmeg train --config=finetune:runs/smollm2 --lora.rank=8 --optim.lr=1e-3 \
  --data.objective=sft --data.train_paths=data/chats.jsonl --data.sequence_length=64 \
  --train.global_batch_size=4 --train.num_steps=20 --train.eval_every=0 "$@"
maxmeg generate runs/smollm2-finetuned --chat --prompt="What is the moon?" --num_tokens=20 --temperature=0
maxmeg convert --to=peft --input=runs/smollm2-finetuned --output=adapters
echo "Go on talking: maxmeg chat runs/smollm2-finetuned"

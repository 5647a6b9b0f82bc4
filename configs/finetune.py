"""Train a converted or trained model further: maxmeg train --config=finetune:FOLDER

    maxmeg convert --input=SmolLM2-135M --output=runs/smollm2
    maxmeg train --config=finetune:runs/smollm2 --data.paths=PREFIX

To try it with the model of configs/gpt.py (half a minute on two CPU cores; the validation loss
stays at 1.74 nats per byte):

    python -m maxmeg.train --config=configs/finetune.py:runs/gpt --data.builtin=source \\
        --data.split=92,4,4 --train.num_steps=50 --train.global_batch_size=8

On chats, with the loss on what the assistant says: `--data.objective=sft --data.paths=chats.jsonl
--data.packing=best_fit`. Architecture and tokenizer are the folder's. `--model.vocab_size` may
grow, and what positions and windows depend on may change; `--lora.rank=16` trains adapters beside
the frozen model.
"""

import os

from maxmeg.config import files
from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LrDecay
from maxmeg.models.registry import suited

LONGEST = 4096  # tokens a sample, unless it is set


def get_config(folder: str = "") -> Config:
    if not folder:
        raise ValueError("which model? write --config=finetune:FOLDER")
    source = files.load(os.path.join(folder, "config.yaml"))
    config = Config(model=source.model, data=suited(Config().data, source.model))
    config.model.dtype = DType.bfloat16
    config.run_dir = f"{os.path.normpath(folder)}-finetuned"
    config.checkpoint.init_from = folder
    config.data.tokenizer, config.data.start_token = source.data.tokenizer, source.data.start_token
    config.data.sequence_length = min(config.model.max_position, LONGEST)
    config.optim.lr, config.optim.warmup_fraction, config.optim.decay = 1e-5, 0.1, LrDecay.cosine
    return config

"""Train a published or trained model further: maxmeg train --config=finetune:FOLDER

    hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2
    maxmeg train --config=finetune:SmolLM2 --data.paths=PREFIX       # writes runs/SmolLM2-finetuned

To try it with the model of configs/gpt.py (half a minute on two CPU cores, 1.74 nats per byte):

    python -m maxmeg.train --config=configs/finetune.py:runs/gpt --data.builtin=source \\
        --data.split=92,4,4 --train.num_steps=50 --train.global_batch_size=8

On chats, with the loss on what the assistant says: `--data.objective=sft --data.paths=chats.jsonl
--data.packing=best_fit`. FOLDER is a run or a Hugging Face folder. `--model.vocab_size` may grow,
what positions and windows depend on may change; `--lora.rank=16` trains adapters.
"""

from maxmeg.config.architectures import suited
from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LrDecay
from maxmeg.hf.settings import next_run, settings_of


def get_config(folder: str = "") -> Config:
    if not folder:
        raise ValueError("which model? write --config=finetune:FOLDER")
    source = settings_of(folder)
    config = Config(model=source.model, data=suited(Config().data, source.model))
    config.model.dtype = DType.bfloat16
    config.run_dir, config.checkpoint.init_from = next_run(folder, "finetuned"), folder
    config.data.tokenizer, config.data.start_token = source.data.tokenizer, source.data.start_token
    config.data.sequence_length = min(config.model.max_position, 4096)  # unless it is set
    config.optim.lr, config.optim.warmup_fraction, config.optim.decay = 1e-5, 0.1, LrDecay.cosine
    return config

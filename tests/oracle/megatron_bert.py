"""megatron-core's BERT on CPU, for megatron_model.py; alone it trains one.

python tests/oracle/megatron_bert.py FOLDER STEPS ROWS
"""

import pathlib
import sys

LR, BETAS, EPS = 3e-3, (0.9, 0.95), 1e-8


def build(config, **options):
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    del options["rotary_base"]
    return BertModel(config, 2, bert_layer_local_spec, **options)


def inputs(length: int):
    """Of one row: which tokens are no padding, and their types."""
    import numpy as np

    places = np.arange(length)[None]
    return (places < length - 3).astype(int), (places >= length // 2).astype(int)


def forward(model, ids):
    """(logits, those of the pairs) on the last of one stage."""
    import torch

    attended, types = map(torch.tensor, inputs(ids.shape[1]))
    with torch.no_grad():
        return model(ids, attended, types)


def train(folder: pathlib.Path, steps: int, rows: int) -> None:
    """A new model's checkpoint in FOLDER/bert, and losses.npy of training it on batches.npz."""
    import megatron_model
    import numpy as np
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
    megatron_model.without_cuda()
    parallel_state.initialize_model_parallel(1, 1)
    model = megatron_model.build(megatron_model.BERT, 1, 1)
    megatron_model.save(model, megatron_model.BERT, {}, folder / "bert")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0)
    batches, losses = np.load(folder / "batches.npz"), []
    for step in range(steps):
        part = {n: torch.tensor(batches[n][step * rows :][:rows]).long() for n in batches.files}
        logits, pairs = model(part["tokens"], part["segment_ids"], part["token_types"])
        words_BVL = logits[..., : megatron_model.VOCAB].mT  # without padding
        each = torch.nn.functional.cross_entropy(words_BVL, part["targets"], reduction="none")
        words = (each * part["loss_mask"]).sum() / part["loss_mask"].sum()
        order = torch.nn.functional.cross_entropy(pairs, part["is_swapped"])
        optimizer.zero_grad()
        (words + order).backward()
        optimizer.step()
        losses.append([words.item(), order.item()])
    np.save(folder / "losses.npy", losses)


if __name__ == "__main__":
    train(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

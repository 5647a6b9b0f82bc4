"""megatron-core's T5 on CPU, for megatron_model.py; alone it trains one.

python tests/oracle/megatron_t5.py FOLDER STEPS ROWS
"""

import pathlib
import sys

LR, BETAS, EPS = 3e-3, (0.9, 0.95), 1e-8
SOURCE = 24


def build(config, arguments: dict, **options):
    import copy

    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        LNImpl,
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )

    del options["rotary_base"]
    encoder = copy.deepcopy(config)
    encoder.num_layers = arguments["encoder_num_layers"]
    specs = (
        get_t5_encoder_with_local_block_spec(encoder.num_layers),
        get_t5_decoder_with_local_block_spec(config.num_layers),
    )
    for spec in specs:
        spec.layer_norm = LNImpl  # of Transformer Engine there, which has no CPU
    options["max_sequence_length"] = max(SOURCE, options["max_sequence_length"])
    return T5Model(config, encoder, *specs, **options)


def masks(source, target):
    """Of encoder, decoder and cross attention, [B, 1, L, M], True where a query does not see a key;
    from the segments of both, 0 for padding."""
    import torch

    length = target.shape[1]
    causal = torch.tril(torch.ones(length, length)).bool()
    seen = source[:, :, None] * source[:, None] > 0, (target[:, :, None] * target[:, None] > 0)
    cross = target[:, :, None] * source[:, None] > 0
    return [~mask[:, None] for mask in (seen[0], seen[1] & causal, cross)]


def train(folder: pathlib.Path, steps: int, rows: int) -> None:
    """A new model's checkpoint in FOLDER/t5, and losses.npy of training it on batches.npz."""
    import megatron_model
    import numpy as np
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
    megatron_model.without_cuda()
    parallel_state.initialize_model_parallel(1, 1)
    model = megatron_model.build(megatron_model.T5, 1, 1)
    megatron_model.save(model, megatron_model.T5, {}, folder / "t5")
    relative = {**megatron_model.T5, "position_embedding_type": "relative"}
    other = megatron_model.build(relative, 1, 1)  # its attention needs a GPU
    megatron_model.save(other, relative, {}, folder / "relative")
    tables = other.encoder_relative_pos_emb, other.decoder_relative_pos_emb
    tables = [table.relative_attention_bias.weight.detach().numpy() for table in tables]
    np.savez(folder / "tables.npz", source=tables[0], target=tables[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0)
    batches, losses = np.load(folder / "batches.npz"), []
    for step in range(steps):
        part = {n: torch.tensor(batches[n][step * rows :][:rows]).long() for n in batches.files}
        seen = masks(part["encoder_segment_ids"], part["segment_ids"])
        logits_BLV = model(part["encoder_tokens"], part["tokens"], *seen)
        words_BVL = logits_BLV[..., : megatron_model.VOCAB].mT  # without padding
        each = torch.nn.functional.cross_entropy(words_BVL, part["targets"], reduction="none")
        loss = (each * part["loss_mask"]).sum() / part["loss_mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.save(folder / "losses.npy", losses)


if __name__ == "__main__":
    train(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

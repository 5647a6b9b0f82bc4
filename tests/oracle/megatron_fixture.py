"""torch_dist checkpoints with Megatron's names, of a model of transformers, written by torch alone.

What megatron-core itself would write is in megatron_model.py; here parts are as uneven, and names
as old, as they can be.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

VOCAB, PADDED, LAYERS, HIDDEN, HEADS, LENGTH = 61, 64, 3, 32, 4, 24


def gpt2() -> tuple[torch.nn.Module, dict]:
    """A model, and the arguments with which Megatron would have the same."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {
        "add_bias_linear": True,
        "max_position_embeddings": LENGTH,
        "untie_embeddings_and_output_weights": False,
    }


def interleaved(qkv: torch.Tensor) -> torch.Tensor:
    """[q k v] of every head."""
    parts = [part.reshape(HEADS, -1, *part.shape[1:]) for part in torch.chunk(qkv, 3)]
    return torch.cat(parts, 1).reshape(qkv.shape)


def gpt2_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Layers stacked, norms as Transformer Engine fuses them."""
    read = {name: value.detach() for name, value in model.named_parameters()}

    def stacked(name: str) -> torch.Tensor:
        layers = [read[f"transformer.h.{i}.{name}"] for i in range(LAYERS)]
        return torch.stack([layer.T if layer.ndim == 2 else layer for layer in layers])

    padding = torch.randn(PADDED - VOCAB, HIDDEN)  # as training leaves it
    actual = {
        "embedding.word_embeddings.weight": torch.cat([read["transformer.wte.weight"], padding]),
        "embedding.position_embeddings.weight": read["transformer.wpe.weight"],
    }
    names = {"self_attention.linear_proj": "attn.c_proj", "mlp.linear_fc1": "mlp.c_fc"}
    names |= {"mlp.linear_fc2": "mlp.c_proj"}
    for kind in ("weight", "bias"):
        layer = "decoder.layers"
        actual[f"decoder.final_layernorm.{kind}"] = read[f"transformer.ln_f.{kind}"]
        for theirs, ours in names.items():
            actual[f"{layer}.{theirs}.{kind}"] = stacked(f"{ours}.{kind}")
        qkv = torch.stack([interleaved(x) for x in stacked(f"attn.c_attn.{kind}")])
        actual[f"{layer}.self_attention.linear_qkv.{kind}"] = qkv
        norms = {"self_attention.linear_qkv": "ln_1", "mlp.linear_fc1": "ln_2"}
        for theirs, ours in norms.items():
            actual[f"{layer}.{theirs}.layer_norm_{kind}"] = stacked(f"{ours}.{kind}")
    return actual


class Parts:
    """Cuts tensors in two along every dimension that has two, and deals them to ranks."""

    def __init__(self, tensors: dict[str, torch.Tensor], ranks: int) -> None:
        self.boxes: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.described: dict[str, stored.TensorStorageMetadata] = {}
        items: list[WriteItem] = []
        for name, tensor in tensors.items():
            chunks = []
            for begin, part in cut(tensor):
                chunk = stored.ChunkStorageMetadata(torch.Size(begin), part.size())
                properties = stored.TensorProperties.create_from_tensor(tensor)
                data = TensorWriteData(chunk, properties, tensor.size())
                index = stored.MetadataIndex(name, begin, len(chunks))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self.boxes[name, tuple(begin)] = part
                chunks.append(chunk)
            self.described[name] = stored.TensorStorageMetadata(properties, tensor.size(), chunks)
        self.plans = [SavePlan(items[rank::ranks]) for rank in range(ranks)]

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        return self.boxes[item.index.fqn, tuple(item.index.offset)]


def cut(tensor: torch.Tensor):
    """(corner, part) of uneven parts."""
    boxes = [([], tensor)]
    for dim, size in enumerate(tensor.shape):
        middle = max(size // 3, 1)
        bounds = [(0, middle), (middle, size)] if size > 1 else [(0, size)]
        boxes = [
            ([*corner, begin], part.narrow(dim, begin, end - begin))
            for corner, part in boxes
            for begin, end in bounds
        ]
    return [(corner, part.clone()) for corner, part in boxes]


def write(folder: Path, tensors: dict[str, torch.Tensor], arguments: dict, ranks: int = 2) -> None:
    """FOLDER/iter_0000007 with `__RANK_0.distcp` files, and FOLDER's note of the latest."""
    iteration = folder / "iter_0000007"
    iteration.mkdir(parents=True)
    parts = Parts(tensors, ranks)
    writer = dcp.FileSystemWriter(iteration)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = writer.prepare_global_plan(parts.plans)
    results = [writer.write_data(plan, parts).wait() for plan in plans]
    writer.finish(stored.Metadata(parts.described), results)
    known = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "padded_vocab_size": PADDED,
        "params_dtype": torch.float32,
        **arguments,
    }
    common = {"args": argparse.Namespace(**known), "iteration": 7, "checkpoint_version": 3.0}
    torch.save(common, iteration / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (iteration / "metadata.json").write_text(json.dumps(backend))
    (folder / "latest_checkpointed_iteration.txt").write_text("7\n")

"""The same weights give the logits and gradients of Hugging Face's own models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from maxmeg.config.schema import Activation, ModelConfig, Norm, Position, QkNorm
from maxmeg.models.lm import LM
from maxmeg.state import array_name

LOGITS = 1e-4  # largest error over the scale of the logits
GRADIENTS = 1e-4  # largest error over the largest gradient of each array
VOCAB, LAYERS, HIDDEN, HEADS, LENGTH = 61, 3, 32, 4, 24
# Half the time to compile; rounding may differ, no more than the tolerances allow.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
ATTENTION = "stack.groups.0.sublayers.0"
MLP = "stack.groups.0.sublayers.1"


def gpt2():
    """(Hugging Face's model, our config, our name -> their values as we lay them out)."""
    hf = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    config = ModelConfig(
        vocab_size=VOCAB,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        activation=Activation.gelu_tanh,
        norm=Norm.layernorm,
        position=Position.learned,
        max_position=LENGTH,
        bias_qkv=True,
        bias_attention_out=True,
        bias_mlp=True,
        tied=True,
    )

    def names(read):
        def stacked(name):
            return np.stack([read(f"transformer.h.{i}.{name}") for i in range(LAYERS)])

        found = {
            "embedding.table": read("transformer.wte.weight"),
            "positions.table": read("transformer.wpe.weight"),
            "final_norm.weight": read("transformer.ln_f.weight"),
            "final_norm.bias": read("transformer.ln_f.bias"),
        }
        for kind in ("weight", "bias"):
            parts = np.split(stacked(f"attn.c_attn.{kind}"), 3, axis=-1)
            for part, name in zip(parts, ("query", "key", "value"), strict=True):
                found[f"{ATTENTION}.mixers.attention.{name}.{kind}"] = part
            found[f"{ATTENTION}.mixers.attention.out.{kind}"] = stacked(f"attn.c_proj.{kind}")
            found[f"{ATTENTION}.norm.{kind}"] = stacked(f"ln_1.{kind}")
            found[f"{MLP}.norm.{kind}"] = stacked(f"ln_2.{kind}")
            found[f"{MLP}.mixers.mlp.up.{kind}"] = stacked(f"mlp.c_fc.{kind}")
            found[f"{MLP}.mixers.mlp.out.{kind}"] = stacked(f"mlp.c_proj.{kind}")
        return found

    return hf, config, names


GATED_MLP = (("gate", "gate"), ("up", "up"), ("out", "down"))


def llama_names(read, mlp=GATED_MLP, tied: bool = False) -> dict[str, np.ndarray]:
    def stacked(name):
        layers = [read(f"model.layers.{i}.{name}.weight") for i in range(LAYERS)]
        return np.stack([array.T for array in layers])

    found = {
        "embedding.table": read("model.embed_tokens.weight"),
        "final_norm.weight": read("model.norm.weight"),
        f"{ATTENTION}.norm.weight": stacked("input_layernorm"),
        f"{MLP}.norm.weight": stacked("post_attention_layernorm"),
    }
    if not tied:
        found["output.table"] = read("lm_head.weight")
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
        found[f"{ATTENTION}.mixers.attention.{ours}.weight"] = stacked(f"self_attn.{theirs}_proj")
    for ours, theirs in mlp:
        found[f"{MLP}.mixers.mlp.{ours}.weight"] = stacked(f"mlp.{theirs}_proj")
    return found


def llama():
    hf = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=2, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    config = ModelConfig(
        vocab_size=VOCAB,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=2,
        ffn_size=48,
        rotary_base=500.0,
    )

    return hf, config, llama_names


def gptj():
    """A parallel block; a quarter of each head rotates, in pairs; biases in the MLP only."""
    hf = transformers.GPTJForCausalLM(
        transformers.GPTJConfig(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
            rotary_dim=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    hf.lm_head.bias = None  # ours has none
    config = ModelConfig(
        vocab_size=VOCAB,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        activation=Activation.gelu_tanh,
        norm=Norm.layernorm,
        rotary_fraction=0.25,
        rotary_interleaved=True,
        bias_mlp=True,
        parallel_block=True,
    )

    def names(read):
        def stacked(name):
            return np.stack([read(f"transformer.h.{i}.{name}").T for i in range(LAYERS)])

        found = {
            "embedding.table": read("transformer.wte.weight"),
            "output.table": read("lm_head.weight"),
        }
        for kind in ("weight", "bias"):
            found[f"final_norm.{kind}"] = read(f"transformer.ln_f.{kind}")
            found[f"{ATTENTION}.norm.{kind}"] = stacked(f"ln_1.{kind}")
            for ours, theirs in (("up", "fc_in"), ("out", "fc_out")):
                found[f"{ATTENTION}.mixers.mlp.{ours}.{kind}"] = stacked(f"mlp.{theirs}.{kind}")
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "out")):
            name = f"{ATTENTION}.mixers.attention.{ours}.weight"
            found[name] = stacked(f"attn.{theirs}_proj.weight")
        return found

    return hf, config, names


def nemotron():
    """LayerNorm with 1 + weight, squared ReLU, half of each head rotates, one key/value head."""
    hf = transformers.NemotronForCausalLM(
        transformers.NemotronConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=1, head_dim=HIDDEN // HEADS,
            rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5
            },
            tie_word_embeddings=False, pad_token_id=None, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    config = ModelConfig(
        vocab_size=VOCAB,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=1,
        ffn_size=48,
        activation=Activation.relu_squared,
        norm=Norm.layernorm,
        norm_one_plus=True,
        rotary_fraction=0.5,
    )

    def names(read):
        found = llama_names(read, mlp=(("up", "up"), ("out", "down")))
        found["final_norm.bias"] = read("model.norm.bias")
        for ours, theirs in ((ATTENTION, "input"), (MLP, "post_attention")):
            name = f"{theirs}_layernorm.bias"
            biases = [read(f"model.layers.{i}.{name}") for i in range(LAYERS)]
            found[f"{ours}.norm.bias"] = np.stack(biases)
        return found

    return hf, config, names


def qwen3():
    """Norms of queries and keys; heads wider than hidden_size / num_heads; tied."""
    hf = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            tie_word_embeddings=True,
        )
    )  # fmt: skip
    config = ModelConfig(
        vocab_size=VOCAB,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=2,
        head_dim=12,
        ffn_size=48,
        rotary_base=500.0,
        qk_norm=QkNorm.head,
        tied=True,
    )

    def names(read):
        found = llama_names(read, tied=True)
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            weights = [read(f"model.layers.{i}.self_attn.{theirs}.weight") for i in range(LAYERS)]
            found[f"{ATTENTION}.mixers.attention.{ours}.weight"] = np.stack(weights)
        return found

    return hf, config, names


@pytest.mark.parametrize("family", [gpt2, llama, gptj, nemotron, qwen3])
def test_logits_and_gradients_are_those_of_hugging_face(family):
    torch.manual_seed(0)
    hf, config, names = family()
    parameters = dict(hf.named_parameters())
    with torch.no_grad():  # so that biases and norms count
        for parameter in parameters.values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    weights = names(lambda name: parameters[name].detach().numpy())
    empty = LM(jax.random.key(0), config)

    def put(path, array):
        wanted = weights.pop(array_name(path))
        rows = array.shape[0] - wanted.shape[0]  # of padding
        return jnp.pad(wanted, [(0, rows)] + [(0, 0)] * (wanted.ndim - 1))

    model = jax.tree_util.tree_map_with_path(put, empty)
    assert not weights

    ids = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))
    output = hf(torch.tensor(ids), labels=torch.tensor(ids))
    output.loss.backward()
    expected = output.logits.detach().numpy()
    ids = jnp.asarray(ids)
    logits = np.asarray(quick_jit(lambda model, ids: model(ids))(model, ids))
    assert np.abs(logits - expected).max() <= LOGITS * np.abs(expected).max()

    def loss(model):
        log_BLV = jax.nn.log_softmax(model(ids)[:, :-1])
        return -jnp.take_along_axis(log_BLV, ids[:, 1:, None], axis=-1).mean()

    value, gradients = quick_jit(jax.value_and_grad(loss))(model)
    assert float(value) == pytest.approx(float(output.loss.detach()), rel=LOGITS)
    truth = names(lambda name: parameters[name].grad.numpy())
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        wanted = truth[array_name(path)]
        found = np.asarray(gradient)[: len(wanted)]
        floor = 1e-7  # the key's bias has no gradient in exact arithmetic
        limit = GRADIENTS * np.abs(wanted).max() + floor
        assert np.abs(found - wanted).max() <= limit, array_name(path)

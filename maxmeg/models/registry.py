"""Named architectures as data: fields of ModelConfig and the sequence length each is made for."""

import dataclasses

from maxmeg.config.schema import Activation, Config, ModelConfig, Norm, Position

GPT = {
    "vocab_size": 50257,
    "activation": Activation.gelu_tanh,
    "norm": Norm.layernorm,
    "position": Position.learned,
    "bias_qkv": True,
    "bias_attention_out": True,
    "bias_mlp": True,
    "tied": True,
}
LLAMA = {"activation": Activation.swiglu, "norm": Norm.rmsnorm, "position": Position.rotary}


def gpt(num_layers: int, hidden_size: int, num_heads: int) -> dict:
    return {
        **GPT,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
    }


ARCHITECTURES: dict[str, tuple[dict, int]] = {
    "gpt2-124m": (gpt(12, 768, 12), 1024),
    "345m": (gpt(24, 1024, 16), 1024),
    "1.3b": (gpt(24, 2048, 16), 2048),
    "6.7b": (gpt(32, 4096, 32), 2048),
    "22b": (gpt(48, 6144, 64), 2048),
    "175b": (gpt(96, 12288, 96), 2048),
    "llama3-8b": (
        {
            **LLAMA,
            "vocab_size": 128256,
            "num_layers": 32,
            "hidden_size": 4096,
            "num_heads": 32,
            "num_kv_heads": 8,
            "ffn_size": 14336,
            "rotary_base": 500000.0,
        },
        8192,
    ),
}


def architecture(name: str) -> ModelConfig:
    """The ModelConfig of a named architecture, its max_position set."""
    if name not in ARCHITECTURES:
        raise ValueError(f"no architecture is named {name!r}: choose from {list(ARCHITECTURES)}")
    fields, length = ARCHITECTURES[name]
    return ModelConfig(**fields, max_position=length)


def use_architecture(config: Config, name: str) -> Config:
    """`config` with the named architecture and its sequence length."""
    model = architecture(name)
    data = dataclasses.replace(config.data, sequence_length=model.max_position)
    return dataclasses.replace(config, model=model, data=data)

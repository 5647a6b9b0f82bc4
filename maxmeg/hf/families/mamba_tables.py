"""Families with Mamba-2 layers."""

import dataclasses
import math
import typing

from maxmeg.config.layers import Layer
from maxmeg.config.model import ModelConfig, Position
from maxmeg.hf.families.keys import Fields, Fixed, Ignored, Json, Key, Keys, Part, refused
from maxmeg.hf.families.tables import ROOT, Family, tied

FULL, LINEAR = "full_attention", "linear_attention"
LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
MIXER_OF = {
    LINEAR: "mamba",
    FULL: "attention",
    "mlp": "mlp",
    "moe": "moe",
    "attention": "attention",
}
MIXER_OF |= {"mamba": "mamba"}  # older names
LONGEST = 2**20  # tokens, of models without a limit


def mamba(prefix: str) -> dict[typing.Any, str]:
    """The modules of a Mamba-2 mixer."""
    names = ("gate", "value", "key", "query", "step")
    return {
        tuple(f"mamba.{name}" for name in names): f"{prefix}.in_proj",
        tuple(f"mamba.{name}_conv" for name in names[1:4]): f"{prefix}.conv1d",
        "mamba.gated_norm": f"{prefix}.norm",
        "mamba.out": f"{prefix}.out_proj",
    }


def mamba_arrays(prefix: str) -> dict[str, str]:
    return {
        "mamba.decay_log": f"{prefix}.A_log",
        "mamba.skip": f"{prefix}.D",
        "mamba.step_bias": f"{prefix}.dt_bias",
    }


class StepLimits(Part):
    """The limits of the step sizes."""

    name = "time_step_limit"

    def read(self, keys: Keys, fields: Fields) -> None:
        limits = keys.take(self.name)
        limits = [0.0, math.inf] if limits is None else limits
        if isinstance(limits, list | tuple) and len(limits) == 2:
            least, most = (
                math.inf if number == {"__float__": "Infinity"} else number for number in limits
            )
            numbers = all(isinstance(n, int | float) and n >= 0 for n in (least, most))
            if numbers and least < math.inf and most > 0:
                fields["mamba.min_step"] = float(least)
                fields["mamba.max_step"] = 0.0 if most == math.inf else float(most)
                return
        raise refused(self.name, limits, "it must be two numbers, the smallest and the largest")

    def write(self, model: ModelConfig) -> Json:
        least, most = model.mamba.min_step, model.mamba.max_step
        return {self.name: [least, most or math.inf]} if least or most else {}


@dataclasses.dataclass(frozen=True)
class Expansion(Part):
    """The key whose product with hidden_size is the width of all heads."""

    name: str = "expand"

    def read(self, keys: Keys, fields: Fields) -> None:
        expand = keys.read(self.name, 2, int)
        width = fields["mamba.num_heads"] * fields["mamba.head_dim"]
        if expand * fields["hidden_size"] != width:
            wanted = f"its product with hidden_size={fields['hidden_size']} must be the {width} "
            raise refused(self.name, expand, wanted + "channels of all heads")

    def write(self, model: ModelConfig) -> Json:
        expand, rest = divmod(model.mamba_heads * model.mamba.head_dim, model.hidden_size)
        if rest:
            raise ValueError(
                f"the {model.mamba_heads} heads of model.mamba.head_dim={model.mamba.head_dim} are "
                f"not a multiple of hidden_size={model.hidden_size}"
            )
        return {self.name: expand}


class PureLayers(Part):
    """All layers are Mamba-2, without a limit of the length."""

    def read(self, keys: Keys, fields: Fields) -> None:
        fields["kinds"] = [(("mamba",),)] * fields["num_layers"]
        fields["max_position"] = LONGEST


class LetteredLayers(Part):
    """Layers of one mixer each, as a list of names or as letters (Nemotron-H)."""

    names = ("layers_block_type", "layer_types")

    def read(self, keys: Keys, fields: Fields) -> None:
        letters = keys.take("hybrid_override_pattern")
        if letters is not None and not (isinstance(letters, str) and set(letters) <= {*LETTERS}):
            wanted = f"it must be a string of the letters {' '.join(LETTERS)}"
            raise refused("hybrid_override_pattern", letters, wanted)
        named = [LETTERS[letter] for letter in letters or "ME*-"]
        types = keys.take_any(self.names, named)
        if not types or not all(isinstance(t, str) and t in MIXER_OF for t in types):
            raise refused(self.names[0], types, f"it must be a list of {', '.join(MIXER_OF)}")
        count = keys.take("num_hidden_layers")
        if count not in (None, len(types)):
            raise refused("num_hidden_layers", count, f"there are {len(types)} layers")
        fields["num_layers"] = len(types)
        fields["kinds"] = [((MIXER_OF[name],),) for name in types]

    def write(self, model: ModelConfig) -> Json:
        names = {mixer: name for name, mixer in reversed(MIXER_OF.items())}
        kinds: list[Layer] = list(model.layer_kinds)
        if any(len(kind) != 1 or len(kind[0]) != 1 or kind[0][0] not in names for kind in kinds):
            raise ValueError(f"model.layers={model.layers!r} has layers of several mixers")
        types = [names[kind[0][0]] for kind in kinds]
        letters = {name: letter for letter, name in LETTERS.items()}
        return {
            "layers_block_type": types,
            "hybrid_override_pattern": "".join(letters[name] for name in types),
            "num_hidden_layers": len(types),
        }


BACKBONE = {"embedding": "backbone.embeddings", "final_norm": "backbone.norm_f"}
BACKBONE |= {"output": "lm_head"}
PLAIN = {**ROOT, "position": Position.none}
FIRST_VALUES = ("time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual")
CHUNK = "mamba.chunk"

MAMBA2 = Family(
    model_type="mamba2",
    parts=[
        Key("vocab_size", "vocab_size", 32768),
        Key("hidden_size", "hidden_size", 4096),
        Key("num_hidden_layers", "num_layers", 64),
        Key("num_heads", "mamba.num_heads", 128),
        Key("head_dim", "mamba.head_dim", 64),
        Key("n_groups", "mamba.num_groups", 8),
        Key("state_size", "mamba.state_size", 128),
        Key("conv_kernel", "mamba.kernel_size", 4),
        Key("use_bias", "mamba.bias", False),
        Key("use_conv_bias", "mamba.conv_bias", True),
        Key("chunk_size", CHUNK, 256),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("initializer_range", "init_std", 0.1, zero=True),
        tied(False),
        Expansion(),
        StepLimits(),
        PureLayers(),
        Fixed("hidden_act", "silu"),
        Ignored(*FIRST_VALUES, "time_step_min", "residual_in_fp32"),
    ],
    layers={**mamba("mixer"), "attention.norm": "norm"},
    constants=PLAIN,
    ends=BACKBONE,
    layer="backbone.layers.",
    arrays=mamba_arrays("mixer"),
    renamed=((r"^backbone\.embedding\.", "backbone.embeddings."),),
)
MAMBA: dict[str, Family] = {"Mamba2ForCausalLM": MAMBA2}

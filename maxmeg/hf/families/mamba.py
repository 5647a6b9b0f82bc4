"""Keys of config.json that describe Mamba-2 layers and the layers beside them."""

import dataclasses
import math
from collections.abc import Sequence

from maxmeg.config.layers import Layer
from maxmeg.config.model import ModelConfig, Position
from maxmeg.config.setting import get
from maxmeg.hf.families.experts import AuxLoss
from maxmeg.hf.families.keys import Fields, Json, Keys, Part, checked, refused
from maxmeg.hf.families.rotary import Rotary

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
BOTH = ("mamba", "attention")


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
            rule = f"its product with hidden_size={fields['hidden_size']} must be the {width} "
            raise refused(self.name, expand, rule + "channels of all heads")

    def write(self, model: ModelConfig) -> Json:
        expand, rest = divmod(model.mamba_heads * model.mamba.head_dim, model.hidden_size)
        if rest:
            raise ValueError(
                f"the {model.mamba_heads} heads of model.mamba.head_dim={model.mamba.head_dim} are "
                f"not a multiple of hidden_size={model.hidden_size}"
            )
        return {self.name: expand}


@dataclasses.dataclass(frozen=True)
class WithExperts(Part):
    """Keys that are written for models with experts alone."""

    parts: Sequence[Part]

    def read(self, keys: Keys, fields: Fields) -> None:
        for part in self.parts:
            part.read(keys, fields)

    def write(self, model: ModelConfig) -> Json:
        entries: Json = {}
        for part in self.parts if model.has("moe") else ():
            entries |= part.write(model)
        return entries


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
            rule = f"it must be a string of the letters {' '.join(LETTERS)}"
            raise refused("hybrid_override_pattern", letters, rule)
        named = [LETTERS[letter] for letter in letters or "ME*-"]
        types = keys.take_any(self.names, named)
        is_list = isinstance(types, list) and bool(types)
        if not is_list or not all(isinstance(t, str) and t in MIXER_OF for t in types):
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


class LetteredMtp(Part):
    """The number of MTP layers, and the mixers of one as a list of names or as letters
    (Nemotron 3)."""

    count, list, letters = (
        "num_nextn_predict_layers",
        "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
    )

    def read(self, keys: Keys, fields: Fields) -> None:
        count = keys.read(self.count, 0, int, zero=True)
        letters, types = keys.take(self.letters), keys.take(self.list)
        for name, value, allowed in (
            (self.letters, letters, LETTERS),
            (self.list, types, MIXER_OF),
        ):
            sound = isinstance(value, str | list) and value and all(v in allowed for v in value)
            if value is not None and not sound:
                raise refused(name, value, f"it must be of {', '.join(allowed)}")
        if letters and types in (None, [FULL, "moe"], ["attention", "moe"]):  # as transformers does
            types = [LETTERS[letter] for letter in letters]
        if count:
            mixers = [MIXER_OF[name] for name in types or (FULL, "moe")]
            fields |= {"mtp.num_layers": count, "mtp.layers": ",".join(mixers)}

    def write(self, model: ModelConfig) -> Json:
        if not model.mtp.num_layers:
            return {self.count: 0}
        names = {MIXER_OF[name]: letter for letter, name in LETTERS.items()}
        mixers = [sublayer[0] for sublayer in model.mtp_layer]
        if any(len(sublayer) > 1 for sublayer in model.mtp_layer) or not {*mixers} <= {*names}:
            raise ValueError(f"model.mtp.layers={model.mtp.layers!r} has other mixers")
        letters = "".join(names[mixer] for mixer in mixers)
        types = [LETTERS[letter] for letter in letters]
        return {self.count: model.mtp.num_layers, self.list: types, self.letters: letters}


@dataclasses.dataclass(frozen=True)
class HeadSize(Part):
    """The size of a head, or "auto": the width of all heads over their number. The width is
    mamba_d_ssm if the family has that key (Falcon-H1), else mamba_expand times hidden_size."""

    name = "mamba_d_head"
    channels: int | None = None

    def read(self, keys: Keys, fields: Fields) -> None:
        heads, size = fields["mamba.num_heads"], keys.take(self.name, "auto")
        width = keys.read("mamba_expand", 2, int) * fields["hidden_size"]
        if self.channels and (channels := keys.take("mamba_d_ssm", self.channels)) is not None:
            width = checked("mamba_d_ssm", channels, int)
        size = width // heads if size == "auto" else checked(self.name, size, int)
        if size * heads != width:
            rule = f"with mamba_n_heads={heads} it must make a width of {width}"
            raise refused(self.name, size, rule)
        fields["mamba.head_dim"] = size

    def write(self, model: ModelConfig) -> Json:
        width = model.mamba_heads * model.mamba.head_dim
        if self.channels:
            return {self.name: model.mamba.head_dim, "mamba_d_ssm": width}
        expand, rest = divmod(width, model.hidden_size)
        if rest:
            raise ValueError(f"mamba_expand: {width} is no multiple of {model.hidden_size}")
        return {self.name: model.mamba.head_dim, "mamba_expand": expand}


class ListedAttention(Part):
    """The numbers of the layers with attention; the others have Mamba-2 (Bamba)."""

    name = "attn_layer_indices"

    def read(self, keys: Keys, fields: Fields) -> None:
        layers, numbers = keys.take(self.name), range(fields["num_layers"])
        layers = [] if layers is None else layers
        if not isinstance(layers, list) or not all(number in numbers for number in layers):
            raise refused(self.name, layers, f"it must be a list of numbers below {len(numbers)}")
        first = ["attention" if number in layers else "mamba" for number in numbers]
        fields["kinds"] = [((name,), ("mlp",)) for name in first]

    def write(self, model: ModelConfig) -> Json:
        if not model.has("mamba"):
            raise ValueError(f"model.layers={model.layers!r} has no mamba")
        layers = range(model.num_layers)
        return {self.name: [i for i in layers if "attention" in model.mixers(i)]}


class NamedLayers(Part):
    """Which layers have attention and which Mamba-2; all have the same feed-forward (Granite 4)."""

    name = "layer_types"

    def read(self, keys: Keys, fields: Fields) -> None:
        count = fields["num_layers"]
        types = keys.take_any((self.name, "layers_block_type"), [LINEAR] * count)
        is_sound = isinstance(types, list) and all(MIXER_OF.get(str(t)) in BOTH for t in types)
        if not is_sound or len(types) != count:
            rule = f"it must be a list of {LINEAR!r} and {FULL!r}, one for each of {count} layers"
            raise refused(self.name, types, rule)
        second = "moe" if fields["moe.num_experts"] else "mlp"
        fields["kinds"] = [((MIXER_OF[name],), (second,)) for name in types]

    def write(self, model: ModelConfig) -> Json:
        layers = range(model.num_layers)
        return {self.name: [FULL if "attention" in model.mixers(i) else LINEAR for i in layers]}


class GraniteExperts(Part):
    """Routed experts beside a shared one, or with num_local_experts=0 the latter alone."""

    def read(self, keys: Keys, fields: Fields) -> None:
        count = keys.read("num_local_experts", 8, int, zero=True)
        shared = keys.read("shared_intermediate_size", 1024, int)
        fields["moe.num_experts"] = count
        fields["moe.top_k"] = keys.read("num_experts_per_tok", 2, int, zero=not count)
        fields["moe.ffn_size"] = keys.read("intermediate_size", 11008, int)
        fields["moe.shared_ffn_size" if count else "mlp.ffn_size"] = shared
        if count:
            AuxLoss().read(keys, fields)
        else:
            keys.read_names.update(("router_aux_loss_coef", "output_router_logits"))

    def write(self, model: ModelConfig) -> Json:
        if not model.has("moe"):
            return {
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "shared_intermediate_size": model.ffn,
                "intermediate_size": model.ffn,
            }
        moe = model.moe
        return {
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "shared_intermediate_size": moe.shared_ffn_size,
            "intermediate_size": model.expert_ffn,
            **AuxLoss().write(model),
        }


class GranitePositions(Part):
    """Rotary embedding, or none."""

    name = "position_embedding_type"

    def read(self, keys: Keys, fields: Fields) -> None:
        Rotary().read(keys, fields)
        value = keys.take(self.name)
        if value not in (None, "nope", "rope"):
            raise refused(self.name, value, 'it must be "rope", "nope" or null')
        if value != "rope":
            fields["position"] = Position.none
            for name in [name for name in fields if name.startswith("rotary.")]:
                del fields[name]

    def write(self, model: ModelConfig) -> Json:
        is_rotary = model.position is Position.rotary
        return {self.name: "rope" if is_rotary else "nope", **Rotary().write(model)}


@dataclasses.dataclass(frozen=True)
class Scale(Part):
    """A key for a factor: of the attention scores times the size of a head to a power, or its
    inverse."""

    name: str
    field: str
    inverse: bool = False
    default: float = 1.0

    def read(self, keys: Keys, fields: Fields) -> None:
        value = keys.read(self.name, self.default, float, null=1.0)
        fields[self.field] = 1 / value if self.inverse else value

    def write(self, model: ModelConfig) -> Json:
        value = get(model, self.field)
        if self.field == "attention.scale":
            value = value or model.key_size**-0.5
        return {self.name: rounded(1 / value if self.inverse else value)}


GRANITE_SCALES: list[Part] = [
    Scale("embedding_multiplier", "embedding_scale"),
    Scale("logits_scaling", "logit_scale", True),
    Scale("residual_multiplier", "residual_scale"),
    Scale("attention_multiplier", "attention.scale"),
]


def rounded(value: float) -> float:
    """A derived number, rounded so that writing what was read changes nothing."""
    return float(f"{value:.12g}")


class Multipliers(Part):
    """The factors of Falcon-H1. Those of the inputs of projections are factors of the outputs, and
    those of queries and keys one of the scores: they are written so."""

    def read(self, keys: Keys, fields: Fields) -> None:
        names = ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier")
        names += ("ssm_in_multiplier", "ssm_out_multiplier")
        inward, out, key, ssm_in, output = (keys.read(n, 1.0, float, null=1.0) for n in names)
        biased = fields["attention.bias_qkv"] or fields["attention.bias_out"]
        for name, value, has_bias in (
            (names[0], inward, biased),
            (names[3], ssm_in, fields["mamba.bias"]),
        ):
            if has_bias and value != 1:
                raise refused(name, value, "with biases only 1.0 is supported")
        size = fields["hidden_size"] // fields["attention.num_heads"]
        size = fields.get("attention.head_dim") or size
        fields["attention.scale"] = key * inward**2 * size**-0.5
        fields["attention.output_scale"] = inward * out
        scales = [ssm_in * scale for scale in self.numbers(keys, "ssm_multipliers", 5)]
        fields["mamba.scales"] = () if set(scales) == {1.0} else tuple(scales)
        fields["mamba.output_scale"] = output
        gate, down = self.numbers(keys, "mlp_multipliers", 2)
        fields |= {"mlp.gate_scale": gate, "mlp.output_scale": down}

    def numbers(self, keys: Keys, name: str, count: int) -> list[float]:
        values = keys.take(name)
        values = [1.0] * count if values is None else values
        if not isinstance(values, list) or len(values) != count:
            raise refused(name, values, f"it must be a list of {count} numbers")
        return [checked(name, value, float) for value in values]

    def write(self, model: ModelConfig) -> Json:
        scale = model.attention.scale or model.key_size**-0.5
        return {
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": model.attention.output_scale,
            "key_multiplier": rounded(scale * model.key_size**0.5),
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": model.mamba.output_scale,
            "ssm_multipliers": list(model.mamba.scales or (1.0,) * 5),
            "mlp_multipliers": [model.mlp.gate_scale, model.mlp.output_scale],
        }


class ParallelLayers(Part):
    """Every layer sums attention and Mamba-2, and has an MLP; the norm of Mamba-2 is optional and
    after the gate (Falcon-H1)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        fields["kinds"] = [(("attention", "mamba"), ("mlp",))] * fields["num_layers"]
        has_norm = keys.read("mamba_rms_norm", False, bool)
        if keys.read("mamba_norm_before_gate", True, bool) and has_norm:
            raise refused("mamba_norm_before_gate", True, "with mamba_rms_norm it must be false")
        fields["mamba.norm"] = has_norm
        biases = [keys.read(n, False, bool) for n in ("mamba_proj_bias", "projectors_bias")]
        if biases[0] != biases[1]:
            raise refused("projectors_bias", biases[1], "it must be equal to mamba_proj_bias")
        fields["mamba.bias"] = biases[0]

    def write(self, model: ModelConfig) -> Json:
        biases = dict.fromkeys(("mamba_proj_bias", "projectors_bias"), model.mamba.bias)
        norms = {"mamba_rms_norm": model.mamba.norm, "mamba_norm_before_gate": False}
        return biases | norms

"""Keys of config.json that describe multi-latent attention (DeepSeek), as parts (see keys.py)."""

import dataclasses
import math
import typing

from maxmeg.config.model import ModelConfig, RotaryScaling
from maxmeg.hf.keys import Found, Key, Keys, checked
from maxmeg.hf.rotary import Rotary, joined

LATENT = (
    Key("kv_lora_rank", "mla_kv_rank", 512),
    Key("q_lora_rank", "mla_query_rank", 1536, null=True),
    Key("qk_nope_head_dim", "head_dim", 128),
    Key("qk_rope_head_dim", "mla_rotary_size", 64),
    Key("v_head_dim", "mla_value_size", 128),
)
ALL, SCALE = "mscale_all_dim", "mscale"
DIGITS = 12  # of scales that are derived


@dataclasses.dataclass(frozen=True)
class LatentRotary(Rotary):
    """YaRN's two scales: their ratio is of cosines and sines, one of them, squared, of scores."""

    kinds: tuple[str, ...] = ("default", "yarn")

    def read(self, keys: Keys, found: Found) -> None:
        settings = joined(keys, "rope_scaling", self.parameters(keys))
        super().read(keys, found)
        if settings.get(ALL) and found.get("rotary_scaling") is RotaryScaling.yarn:
            grown = amplified(checked(ALL, settings[ALL], float), found["rotary_factor"])
            size = found["head_dim"] + found["mla_rotary_size"]
            found["attention_scale"] = size**-0.5 * grown**2

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        written = super().write(model)
        scaling, size = written["rope_scaling"], model.head_size + model.mla_rotary_size
        grown = math.sqrt((model.attention_scale or size**-0.5) * size**0.5)
        if not scaling or grown <= 1 or model.rotary_factor <= 1:
            return written
        step = 0.1 * math.log(model.rotary_factor)
        ratio = scaling.pop("attention_factor", 0) or (step + 1)
        scaling[ALL] = round((grown - 1) / step, DIGITS)
        scaling[SCALE] = round((ratio * grown - 1) / step, DIGITS)
        return written


def amplified(scale: float, factor: float) -> float:
    return 0.1 * scale * math.log(factor) + 1

"""Rules of a model's settings: which of them describe a model. No JAX."""

from maxmeg.config.lazy import Lazy
from maxmeg.config.model import ModelConfig, NormPlace, Position, RotaryScaling

_SCALED = ("rotary_factor", "rotary_original_length")
ROTARY = {  # what each scaling reads
    RotaryScaling.none: (),
    RotaryScaling.linear: ("rotary_factor",),
    RotaryScaling.ntk: ("rotary_factor",),
    RotaryScaling.dynamic: _SCALED,
    RotaryScaling.llama3: (*_SCALED, "rotary_low", "rotary_high"),
    RotaryScaling.yarn: (
        *(*_SCALED, "rotary_low", "rotary_high", "rotary_attention_factor", "rotary_truncate"),
    ),
    RotaryScaling.longrope: (
        *(*_SCALED, "rotary_attention_factor", "rotary_short_factors", "rotary_long_factors"),
    ),
}
ROTARY_FIELDS = sorted({name for names in ROTARY.values() for name in names})
experts = Lazy("maxmeg.config.experts")
latent = Lazy("maxmeg.config.latent")


def divisors(number: int, at_most: int = 0) -> str:
    """ "1, 2, 3, 6" for 6, up to `at_most` if it is given."""
    highest = min(number, at_most or number)
    return ", ".join(str(d) for d in range(1, highest + 1) if number % d == 0)


def model_problems(model: ModelConfig):
    if model.num_heads < 1 or (not model.head_dim and model.hidden_size % model.num_heads):
        yield (
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.num_heads={model.num_heads}: choose num_heads in "
            f"{divisors(model.hidden_size)}, or set model.head_dim"
        )
    elif model.kv_heads < 1 or model.num_heads % model.kv_heads:
        yield (
            f"model.num_heads={model.num_heads} is not divisible by "
            f"model.num_kv_heads={model.kv_heads}: choose num_kv_heads in "
            f"{divisors(model.num_heads)}"
        )
    elif model.position is Position.rotary and not model.mla_kv_rank and model.rotated_size < 2:
        yield (
            f"model.rotary_fraction={model.rotary_fraction} of head size {model.head_size} leaves "
            "fewer than 2 dimensions to rotate: raise it, or set model.position=none"
        )
    else:
        yield from rotary_problems(model)
    yield from latent.latent_problems(model)
    yield from norm_problems(model)
    yield from activation_problems(model)
    yield from window_problems(model)
    yield from mtp_problems(model)
    yield from experts.expert_problems(model)


def activation_problems(model: ModelConfig):
    if model.activation_clamp < 0:
        yield f"model.activation_clamp={model.activation_clamp} must be at least 0 (0: no limit)"
    for name in ("activation_clamp", "glu_offset"):
        if getattr(model, name) and not model.gated:
            yield (
                f"model.{name}={getattr(model, name)} has no effect with activation="
                f"{model.activation.name}, which is not gated: choose swiglu, geglu or "
                "quick_geglu, or leave it at 0"
            )


def mtp_problems(model: ModelConfig):
    if not model.mtp_depths and model.mtp_loss != ModelConfig().mtp_loss:
        yield f"model.mtp_loss={model.mtp_loss} has no effect without model.mtp_depths: set that"
    if model.mtp_depths and not model.mtp_loss > 0:
        yield f"model.mtp_loss={model.mtp_loss} must be positive; without it set mtp_depths=0"


def window_problems(model: ModelConfig):
    every, window, base = (
        *(model.attention_global_every, model.attention_window),
        model.rotary_local_base,
    )
    if every == 1 or every < 0 or (every and not window):
        yield (
            f"model.attention_global_every={every} with attention_window={window}: every n-th "
            "layer beside those with a window needs n >= 2 and a window; 0: no layer is global"
        )
    if base and not (every and base >= 1 and model.position is Position.rotary):
        yield (
            f"model.rotary_local_base={base} must be at least 1, and needs layers with a window "
            f"beside global ones (attention_global_every={every}) and position=rotary "
            f"(it is {model.position.name}): leave it at 0"
        )


def norm_problems(model: ModelConfig):
    if model.parallel_norms and not model.parallel_block:
        yield "model.parallel_norms=true needs model.parallel_block=true: set both, or neither"
    if model.parallel_norms and model.norm_place is NormPlace.post:
        yield "model.parallel_norms=true has no effect with norm_place=post: choose pre"


def rotary_problems(model: ModelConfig):
    kind, plain = model.rotary_scaling, ModelConfig()
    used = ROTARY[kind] if model.position is Position.rotary else ()
    for name in ("rotary_scaling", *ROTARY_FIELDS):
        value = getattr(model, name)
        if value == getattr(plain, name) or name in used or (name == "rotary_scaling" and used):
            continue
        where = f"rotary_scaling={kind.name} and position={model.position.name}"
        yield f"model.{name}={getattr(value, 'name', value)} has no effect with {where}: leave it"
    if kind is RotaryScaling.none or not used:
        return
    if not model.rotary_factor >= 1:
        yield f"model.rotary_factor={model.rotary_factor} must be at least 1"
    if "rotary_original_length" in used and model.rotary_original_length < 2:
        yield (
            f"model.rotary_original_length={model.rotary_original_length} must be the length "
            f"before scaling (at least 2) with rotary_scaling={kind.name}"
        )
    if "rotary_low" in used and not 0 < model.rotary_low < model.rotary_high:
        yield (
            f"model.rotary_low={model.rotary_low} and rotary_high={model.rotary_high} must be "
            "turns with 0 < low < high"
        )
    wanted = model.rotated_size // 2
    for name in ("rotary_short_factors", "rotary_long_factors"):
        values = getattr(model, name)
        if name in used and (len(values) != wanted or not all(value > 0 for value in values)):
            yield (
                f"model.{name} must be {wanted} positive numbers, one for each pair that "
                f"rotates; they are {len(values)}"
            )

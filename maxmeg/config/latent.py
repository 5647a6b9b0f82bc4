"""Rules of the settings of multi-latent attention. No JAX."""

from maxmeg.config.model import ModelConfig, Position, QkNorm

OPTIONS = ("mla_query_rank", "mla_rotary_size", "mla_value_size", "mla_norm_eps")


def latent_problems(model: ModelConfig):
    size, plain = model.mla_rotary_size, ModelConfig()
    if not model.mla_kv_rank:
        changed = [name for name in OPTIONS if getattr(model, name) != getattr(plain, name)]
        if changed:
            shown = ", ".join(f"model.{name}={getattr(model, name)}" for name in changed)
            yield f"{shown} has no effect without model.mla_kv_rank: set that, or leave this out"
        return
    rotates = model.position is Position.rotary
    if rotates and (size < 2 or size % 2):
        yield (
            f"model.mla_rotary_size={size} must be even and at least 2 with position=rotary: "
            "choose 64, or set model.position=none"
        )
    refused = (
        ("num_kv_heads", model.kv_heads != model.num_heads, "every head has its keys: set it to 0"),
        ("qk_norm", model.qk_norm is not QkNorm.none, "latents are always normalized: set it none"),
        ("rotary_fraction", model.rotary_fraction != 1, "mla_rotary_size rotates: set it to 1"),
    )
    for name, broken, remedy in refused:
        if broken:
            value = getattr(model, name)
            yield (
                f"model.{name}={getattr(value, 'name', value)} is not for multi-latent attention "
                f"(mla_kv_rank={model.mla_kv_rank}), where {remedy}"
            )

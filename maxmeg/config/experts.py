"""Rules of the settings of experts. No JAX."""

import dataclasses

from maxmeg.config.architecture import divisors
from maxmeg.config.model import ExpertBackend, ModelConfig, RouterScore
from maxmeg.config.schema import Config, ExpertExchange, ParallelConfig

OPTIONS_OF_EXPERTS = {  # the setting without which these have no effect
    "num_experts": (
        "experts_per_token", "expert_ffn_size", "shared_ffn_size", "first_dense_layers",
        "router_score", "router_over_all", "router_normalize", "router_scale", "router_groups",
        "router_bias", "router_logit_bias", "router_aux_loss", "router_sequence_aux_loss",
        "router_global_aux_loss", "router_z_loss", "router_sinkhorn", "router_jitter",
        "benchmark_even_experts", "expert_capacity", "expert_backend", "expert_latent_size",
        "expert_every", "expert_pattern",
    ),
    "shared_ffn_size": ("shared_gate",),
    "router_groups": ("router_groups_kept", "router_group_best"),
    "router_bias": ("router_bias_rate",),
    "expert_capacity": ("expert_drop", "expert_pad"),
}  # fmt: skip


def expert_problems(model: ModelConfig):
    experts, chosen, plain = model.num_experts, model.experts_per_token, ModelConfig()
    for needed, names in OPTIONS_OF_EXPERTS.items():
        if getattr(model, needed) == getattr(plain, needed):
            changed = [n for n in names if getattr(model, n) != getattr(plain, n)]
            if changed:
                shown = ", ".join(f"model.{n}={getattr(model, n)}" for n in changed)
                yield f"{shown} has no effect without model.{needed}: set that, or leave this out"
    if not experts:
        return
    groups, kept = model.router_groups, model.router_groups_kept
    if not 1 <= chosen <= experts:
        yield f"model.experts_per_token={chosen} must be from 1 to num_experts={experts}"
    if groups < 1 or experts % groups:
        yield (
            f"model.router_groups={groups} does not divide num_experts={experts}: choose it in "
            f"{divisors(experts)}"
        )
    elif not 1 <= kept <= groups or chosen > kept * (experts // groups):
        yield (
            f"model.router_groups_kept={kept} of router_groups={groups}, each of "
            f"{experts // groups} experts, must hold experts_per_token={chosen}: keep more groups, "
            f"at most {groups}"
        )
    elif not 0 <= model.router_group_best <= experts // groups:
        yield (
            f"model.router_group_best={model.router_group_best} must be from 0 to the "
            f"{experts // groups} experts of a group"
        )
    if model.expert_pad and model.expert_backend is not ExpertBackend.auto:
        yield (
            f"model.expert_backend={model.expert_backend.name} has no effect with expert_pad=True, "
            "whose products are of as many rows an expert: leave one out"
        )
    yield from placement_problems(model)
    yield from balance_problems(model)
    if model.parallel_block:
        yield "model.num_experts cannot be in a parallel_block: set num_experts=0, or that to false"


def layout_problems(config: Config):
    parallel, plain = config.parallel, ParallelConfig()
    changed = [
        f"parallel.{name}={getattr(value, 'name', value)}"
        for name in ("expert", "expert_tensor", "expert_exchange", "expert_buffer")
        if (value := getattr(parallel, name)) != getattr(plain, name)
    ]
    if changed and not config.model.num_experts:
        yield (
            f"{', '.join(changed)}: only for models with experts; set model.num_experts, or leave "
            "this out (to use more devices: fsdp or data)"
        )
    if not parallel.expert_buffer >= 1:
        yield f"parallel.expert_buffer={parallel.expert_buffer} must be at least 1, the mean load"
    if parallel.expert == 1 and any("exchange" in one or "buffer" in one for one in changed):
        yield (
            "parallel.expert_exchange and expert_buffer have no effect with expert=1: nothing is "
            "exchanged; leave them, or set expert"
        )
    gathers = parallel.expert_exchange is ExpertExchange.gather
    if gathers and parallel.expert_buffer != plain.expert_buffer:
        yield "parallel.expert_buffer has no effect with expert_exchange=gather: leave it"
    if config.model.expert_pad and (
        parallel.expert_buffer != plain.expert_buffer
        or parallel.expert_exchange is ExpertExchange.ragged
    ):
        yield (
            f"parallel.expert_exchange={parallel.expert_exchange.name}, expert_buffer="
            f"{parallel.expert_buffer}: model.expert_pad=True sends as many rows for every expert, "
            "at once: leave the buffer, and choose auto, all_to_all or gather"
        )


def placement_problems(model: ModelConfig):
    first, every, pattern = model.first_dense_layers, model.expert_every, model.expert_pattern
    if not 0 <= first < model.num_layers:
        yield (
            f"model.first_dense_layers={first} must leave some of num_layers={model.num_layers} "
            "for the experts"
        )
    if every < 1:
        yield f"model.expert_every={every} must be at least 1 (1: every layer has experts)"
    if (first > 0) + (every != 1) + bool(pattern) > 1:
        yield (
            f"model.first_dense_layers={first}, expert_every={every} and expert_pattern={pattern} "
            "say it twice: set one of them; a pattern can say anything"
        )
    elif pattern and (len(pattern) != model.num_layers or not {1} <= {*pattern} <= {0, 1}):
        yield (
            f"model.expert_pattern={pattern} must be num_layers={model.num_layers} numbers, 1 for "
            "a layer with experts and 0 for one without, some of them 1"
        )
    elif every >= 1 and periods(model)[0] and model.attention_global_every:
        yield (
            f"layers without experts at the start (model.first_dense_layers={first}, "
            f"expert_pattern={pattern}) cannot be beside attention_global_every: set that to 0"
        )


def periods(model: ModelConfig) -> tuple[int, int]:
    """(layers without experts at the start that are apart, layers after which kinds repeat)."""
    pattern = model.expert_pattern
    if not pattern:
        return model.first_dense_layers, model.expert_every
    first = [*pattern, 1].index(1)
    for start in (0, first):
        rest = pattern[start:]
        for length in range(1, max(len(rest) // 2, 1) + 1):
            if all(flag == rest[i % length] for i, flag in enumerate(rest)):
                return start, length
    return first, len(pattern) - first


def balance_problems(model: ModelConfig):
    losses = ("router_aux_loss", "router_sequence_aux_loss", "router_global_aux_loss")
    if model.router_sinkhorn:
        plain = ModelConfig()
        others = (
            *(*losses, "router_bias", "router_groups", "expert_capacity", "router_score"),
            *("router_over_all", "router_normalize", "benchmark_even_experts"),
        )
        for name in others:
            value = getattr(model, name)
            if value != getattr(plain, name):
                yield (
                    f"model.{name}={getattr(value, 'name', value)} cannot be beside "
                    "router_sinkhorn=True, which evens loads and weighs experts by itself: leave "
                    "one out (router_z_loss, router_jitter and router_scale can be)"
                )
    elif (
        model.experts_per_token == 1
        and model.router_score is RouterScore.softmax
        and not model.router_over_all
    ):
        yield (
            "model.experts_per_token=1 with router_score=softmax over the chosen alone gives the "
            "router no gradient: set router_over_all=True, or router_score=sigmoid"
        )


def upcycled(saved: ModelConfig, wanted: ModelConfig, folder: str) -> tuple[list[str], ModelConfig]:
    """(what a dense model becomes, `wanted` without experts); ValueError where it cannot."""
    slices, left = divmod(saved.ffn, wanted.expert_ffn)
    experts, chosen = wanted.num_experts, wanted.experts_per_token
    of_group = experts // max(wanted.router_groups, 1)
    unable = [
        f"model.{name}={getattr(wanted, name)}"
        for name in ("shared_ffn_size", "expert_latent_size")
        if getattr(wanted, name)
    ]
    if left or any(number % max(slices, 1) for number in (experts, chosen, of_group)):
        raise ValueError(
            f"checkpoint.init_from={folder} is dense, and its MLP of width {saved.ffn} cannot "
            f"become num_experts={experts} of width {wanted.expert_ffn}, experts_per_token={chosen}"
            f" and router_groups={wanted.router_groups}: an expert's width must divide the MLP's, "
            "and that many times make the numbers of experts (also of a group) and of those chosen"
        )
    if unable:
        raise ValueError(
            f"checkpoint.init_from={folder} is dense and has no weights for {', '.join(unable)}: "
            "leave them out; routed experts alone can begin as copies of an MLP"
        )
    plain = ModelConfig()
    names = {"num_experts", *(n for names in OPTIONS_OF_EXPERTS.values() for n in names)}
    dense = {name: getattr(plain, name) for name in names}
    copies = experts // slices
    text = f"num_experts 0 -> {experts}: {copies} copies of each MLP, each of {slices} experts"
    return [text], dataclasses.replace(wanted, **dense)

"""Settings with the value `auto` that the formulas of time and memory choose for listed GPUs."""

import itertools

import jax

from maxmeg.config.parallel import FsdpGather, LaneOrder
from maxmeg.config.recompute import POLICIES
from maxmeg.config.schema import Config
from maxmeg.config.setting import get, with_fields
from maxmeg.config.validate import validate
from maxmeg.planning.analytic import analyze, attention_words
from maxmeg.planning.cost.experts import product_words
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import GIB, Cluster, cluster, cluster_name, has_whole_nodes
from maxmeg.planning.search import Candidate, fastest

VALUES = {  # the first needs least memory
    "parallel.lanes": (LaneOrder.apart, LaneOrder.together),
    "parallel.fsdp_gather": (FsdpGather.microbatch, FsdpGather.step),
}


def cluster_here() -> Cluster | None:
    """The GPUs of this run; None for CPUs, other GPUs, and parts of several nodes."""
    name, count = cluster_name(jax.devices()[0].device_kind), jax.device_count()
    return cluster(name, count) if name and has_whole_nodes(count) else None


def choose(config: Config, gpus: Cluster | None) -> None:
    """Replace each `auto` of VALUES in a config.

    By the fastest combination that fits; by the first values where none fits, without GPUs, or
    where the planner does not support the config. Devices that parallel.fsdp names stay there."""
    unset = {path: values for path, values in VALUES.items() if get(config, path).name == "auto"}
    if config.parallel.fsdp and "parallel.fsdp_gather" in unset:
        unset["parallel.fsdp_gather"] = (FsdpGather.microbatch,)
    options = [
        dict(zip(unset, values, strict=True)) for values in itertools.product(*unset.values())
    ]
    tried = [with_fields(config, option) for option in options] if unset else []
    planned = (candidate_of(option, gpus) for option in tried)
    fitting = [candidate for candidate in planned if candidate and candidate.analytic.fits]
    chosen = fastest(fitting).config if fitting else with_fields(config, options[0])
    for path in unset:
        section, _, name = path.rpartition(".")
        setattr(get(config, section), name, get(chosen, path))


def candidate_of(config: Config, gpus: Cluster | None) -> Candidate | None:
    """The config and its report; None without GPUs, or for one that is not valid or supported."""
    if gpus is None:
        return None
    try:
        validate(config, gpus.count)
        return Candidate(config, analyze(config, gpus))
    except ValueError:
        return None


def settings_on(config: Config, gpus: Cluster) -> dict[str, str]:
    """Descriptions of a run that depend on its GPUs, by name."""
    work = workload(config, gpus.count, gpus.device)
    words = {
        "layout": chosen_words(config, gpus),
        "attention": attention_words(work, gpus),
        "experts' products": product_words(work),
    }
    return {name: text for name, text in words.items() if text}


def chosen_words(config: Config, gpus: Cluster | None) -> str:
    """The values of VALUES, what the others would cost, and of lanes together that do not fit the
    recompute policy with which they would; empty if no other changes anything.

    "lanes=together (apart: +3.1 % time, -2.9 GiB)"
    """
    now, words = candidate_of(config, gpus), []
    if now is None:
        return ""
    for path, values in VALUES.items():
        value, name = get(config, path), path.rpartition(".")[2]
        value = value if value in values else values[0]
        for each in values:
            other = candidate_of(with_fields(config, {path: each}), gpus)
            if other and other.analytic != now.analytic:
                time = other.analytic.step_seconds / now.analytic.step_seconds - 1
                size = (other.analytic.total - now.analytic.total) / GIB
                cost = f"{each.value}: {100 * time:+.1f} % time, {round(size, 1) + 0.0:+.1f} GiB"
                words.append(f"{name}={value.value} ({cost})")
    if config.parallel.lanes is LaneOrder.together and not now.analytic.fits:
        words.append(f"too large: {now.analytic.total / GIB:.1f} GiB{_policy(config, gpus)}")
    return ", ".join(words)


def _policy(config: Config, gpus: Cluster | None) -> str:
    """In words: the first recompute policy with which the config fits."""
    for policy in POLICIES:
        other = candidate_of(with_fields(config, {"model.recompute": policy}), gpus)
        if other and other.analytic.fits:
            return f"; model.recompute={policy} fits, {other.analytic.total / GIB:.1f} GiB"
    return "; under no recompute policy does it fit"

"""Plans of sequences that are cut over context, against compiled steps."""

import dataclasses

import pytest
from layouts import of

from maxmeg.config.schema import Config
from maxmeg.planning.analytic import BACKWARD_SCORES, analyze
from maxmeg.planning.cost import context
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import parse_cluster

NEAR = 0.06  # of compiled bytes
GIB = 2**30
LONG = 131072
QUERIES = "query,key,value,context_output,context_lse"


def config_of(
    name: str,
    layers: int,
    length: int,
    recompute: str = "selective",
    *,
    gpus: int = 8,
    window: int = 0,
    **parallel,
) -> Config:
    """One sample in every microbatch, and one microbatch."""
    config = of(name, gpus, 1, 1, **parallel)
    config.train.global_batch_size //= config.parallel.context
    config.data.sequence_length = length
    config.model = dataclasses.replace(
        config.model, recompute=recompute, max_position=length, num_layers=layers
    )
    if window:
        config.model.attention.window = window
    return config


@pytest.mark.parametrize(
    ("config", "compiled"),
    [
        (config_of("llama3-8b", 32, LONG, context=8), 79.46),
        (config_of("llama3-8b", 32, LONG, "full", context=8), 38.19),
        (config_of("llama3-8b", 32, LONG, QUERIES, context=8), 47.43),
        (config_of("llama3-8b", 2, LONG, context=8, context_strategy="exchange"), 10.65),
        (config_of("llama3-8b", 4, 32768, "minimal", context=4, fsdp=2), 10.97),
        (config_of("llama3-8b", 4, 65536, context=4, tensor=2), 9.21),
        (config_of("mistral-7b-v0.1", 2, LONG, context=8, window=1024), 7.56),
    ],
)
def test_memory_is_that_of_compiled_steps(config, compiled):
    planned = analyze(config, parse_cluster("h100x8")).total / GIB
    assert planned == pytest.approx(compiled, rel=NEAR)


def test_long_pieces_hide_a_ring_and_nothing_hides_an_exchange():
    def exposed(length: int, gpus: int = 8, **parallel) -> tuple[float, float]:
        """(seconds of transfers of keys and values, those of them that are hidden)."""
        config = config_of("llama3-8b", 2, length, gpus=gpus, context=gpus, **parallel)
        cluster = parse_cluster(f"h100x{gpus}")
        work = workload(config, gpus, cluster.device)
        sent = sum(entry.seconds for entry in context.traffic(work, cluster))
        return sent, context.hidden_seconds(work, cluster, BACKWARD_SCORES)

    sent, hidden = exposed(LONG)
    assert 0 < sent == pytest.approx(hidden)
    sent, hidden = exposed(32768, 16, context_strategy="ring")  # short pieces, slow links
    assert 0 < hidden < 0.8 * sent
    sent, hidden = exposed(LONG, context_strategy="exchange")
    assert sent > 0 == hidden


@pytest.mark.parametrize(("strategy", "lengths"), [("ring", 0), ("exchange", 1), ("gather", 4)])
def test_keys_made_of_latents_are_stored_as_the_strategy_needs_them(strategy, lengths):
    """Under minimal: in no round, of the device's share, of the whole sequence."""

    def stored(policy: str) -> tuple[int, int]:
        """(bytes beyond the same layers without context, number of layers)"""
        how = {"context": 4, "context_strategy": strategy}
        work = workload(config_of("deepseek-v2-lite", 2, 32768, policy, **how), 8)
        unit = work.units[-1]
        return context.stored_bytes(work, unit), len(context.attentions(work, unit))

    made = 2 * 32768 // 4 * 16 * (128 + 128)
    (minimal, layers), (selective, _) = stored("minimal"), stored("selective")
    assert minimal - selective == (lengths - 1) * layers * made


def test_a_list_of_activations_lies_between_selective_and_full():
    selective, listed, full = (
        analyze(config_of("llama3-8b", 32, LONG, policy, context=8), parse_cluster("h100x8"))
        for policy in ("selective", QUERIES, "full")
    )
    assert selective.total > listed.total > full.total
    assert selective.compute_seconds < listed.compute_seconds < full.compute_seconds


def test_states_of_scans_are_a_fraction_of_what_heads_exchange():
    """Nemotron-H 8B's at 128k tokens over 8 devices: 59 MB a layer and direction, where exchanging
    its activations as Megatron-LM does sends 767."""
    config = config_of("nemotron-h-8b", 52, LONG, gpus=8, context=8)
    rows = context.traffic(workload(config, 8), parse_cluster("h100x8"))
    (sent,) = (row for row in rows if row.purpose == context.STATES)
    assert sent.volume / sent.runs == pytest.approx(58.7e6, rel=0.001)

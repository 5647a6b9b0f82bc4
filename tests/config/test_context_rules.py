"""Rules of context parallelism: what is wrong, with its values and the remedy."""

import re

import pytest
from written_settings import values_of

from maxmeg.config.context import context_problems, inner_of, strategies, strategy_of
from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.setting import with_fields

HEADS = {"attention.num_heads": 8}
MIXED = HEADS | {"layers": "*(local,mlp attention,mlp)", "attention.window": 16}
CONVOLVED = {"layers": "*(conv,mlp attention,mlp)"}
CASES = [  # model, settings of `parallel`, length, tensor, words of the only problem; none
    (HEADS, "context=4", 64, 2, ""),
    (HEADS, "context=3", 48, 1, ""),
    (HEADS, "context=4", 100, 1, r"=100 cannot.*multiple of 8, nearest 96 and 104"),
    (HEADS, "context=2", 36, 8, r"multiple of 16, nearest 32 and 48"),
    (HEADS, "context=8", 8, 1, r"multiple of 16, nearest 16"),
    (MIXED, "context=2; context_strategy=local=ring,attention=gather", 64, 1, ""),
    (HEADS, "context=2; context_strategy=rnig", 64, 1, "'rnig'.*ring"),
    (
        HEADS,
        "context=2; context_strategy=local=ring",
        64,
        1,
        "no mixer 'local'; those .*attention",
    ),
    (HEADS, "context=3; context_strategy=exchange", 48, 1, "8 query heads .* 3 dev.* 1, 2, 4, 8"),
    (HEADS, "context=4; context_strategy=hierarchy; context_inner=3", 64, 1, "=3 is no .*it in 2$"),
    (HEADS, "context=4; context_inner=2", 64, 1, "is for .*=hierarchy"),
    (HEADS, "context=3; context_strategy=hierarchy", 48, 1, "no number of devices in a node, .*=3"),
    (HEADS, "context=2; context_chunks=4", 64, 1, ""),
    (HEADS, "context=2; context_chunks=5", 64, 1, "5 chunks.* of 10, near"),
    (
        HEADS,
        "context=2; context_chunks=4; context_strategy=ring",
        64,
        1,
        "4 is for .*not for ring",
    ),
    (CONVOLVED, "context=2; context_chunks=4", 64, 1, "convolutions or states.* context_chunks=0"),
    (CONVOLVED | {"conv.kernel_size": 4}, "context=4", 16, 1, "=4 reads more than the 2 tokens"),
]


@pytest.mark.parametrize(("fields", "settings", "length", "tensor", "words"), CASES)
def test_a_broken_rule_is_the_only_problem(fields, settings, length, tensor, words):
    model = with_fields(ModelConfig(), fields)
    parallel = ParallelConfig(**values_of(settings, ParallelConfig))
    problems = list(context_problems(model, parallel, length, tensor))
    assert len(problems) == bool(words), problems
    assert not words or re.search(words, problems[0]), problems


def test_a_kind_that_is_not_named_is_chosen_automatically():
    parallel = ParallelConfig(context_strategy="local=exchange")
    assert strategies(parallel.context_strategy) == {"local": "exchange"}
    assert strategy_of(parallel, "local") == "exchange"
    assert strategy_of(parallel, "attention") == "auto"
    assert strategy_of(ParallelConfig(context_strategy="ring"), "mla") == "ring"
    assert strategy_of(ParallelConfig(context_chunks=8), "attention") == "gather"


@pytest.mark.parametrize(
    ("context", "tensor", "heads", "inner"),
    [(16, 1, 32, 8), (16, 2, 32, 4), (6, 1, 32, 2), (64, 8, 64, 0), (3, 1, 9, 0), (4, 1, 8, 2)],
)
def test_heads_are_exchanged_inside_a_node(context, tensor, heads, inner):
    assert inner_of(context, tensor, heads) == inner

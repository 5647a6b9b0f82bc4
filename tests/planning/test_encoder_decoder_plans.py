"""Plans of encoder-decoders and classifiers by formulas."""

from maxmeg.config.architectures import use_architecture
from maxmeg.config.bert import BertConfig
from maxmeg.config.data import Objective
from maxmeg.config.schema import Config
from maxmeg.planning.analytic import analyze
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import parse_cluster

COMPILED = 7.00  # TFLOP of a step on one H100 (benchmarks/NOTES.md, 2026-11-26)


def test_an_encoder_decoder_computes_what_was_compiled():
    config = use_architecture(Config(), "t5-base")
    config.train.global_batch_size = config.train.micro_batch_size = 16
    config.data.objective = Objective.span_corruption
    config.data.source_length, config.data.sequence_length = 512, 128
    plan = analyze(config, parse_cluster("h100x1"))
    assert 0.99 < plan.flops / 1e12 / COMPILED < 1.01


def test_a_classifier_has_no_rows_of_the_vocabulary_in_its_loss():
    config = use_architecture(Config(), "bert-base")
    config.model.head.num_classes, config.model.bert = 3, BertConfig(token_types=2, pooler=True)
    work = workload(config, 1)
    assert work.vocabulary == 3 and work.embedded == 30592

"""The real train step, compiled for H100s that are not here: memory, collectives, kernels."""

import dataclasses
import functools
import re
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import absent_exposed

from maxmeg.config.architectures import use_architecture
from maxmeg.config.mixers import AttentionBackend, ExpertBackend
from maxmeg.config.model import ModelConfig, Position
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config, TrainConfig
from maxmeg.config.setting import with_fields
from maxmeg.config.validate import axis_sizes
from maxmeg.ops.experts.dispatch import capacity_of
from maxmeg.planning import hlo
from maxmeg.planning.compile import compile_report
from maxmeg.planning.cost.flops import training_flops
from maxmeg.planning.cost.memory import head
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import parse_cluster
from maxmeg.planning.report import Collective, Compiled

GPUS, LAYERS = 16, 8
EXPERTS = 8  # one a GPU
STAGES, MICROBATCHES = 4, 8
TICKS = MICROBATCHES + STAGES - 1  # of each lane, the bubble's included
CAPACITY = 80 * 10**9
MIB = 2**20
SCALARS = 256  # bytes: norms, counts and flags that are summed beside the gradients
SLACK = 0.02  # of what products hide: the scheduler may move one
FLOPS = 1.03  # compiled over model's where nothing is recomputed; cuDNN makes its scores again


def llama(microbatches: int, recompute: str = "minimal", **parallel) -> Config:
    """Llama 3 8B with fewer layers."""
    shards = GPUS // parallel.get("tensor", 1) // parallel.get("pipe", 1)
    config = Config(
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(global_batch_size=microbatches * shards, micro_batch_size=1),
    )
    config = use_architecture(config, "llama3-8b")
    config.model = dataclasses.replace(config.model, num_layers=LAYERS, recompute=recompute)
    return config


def model_flops(config: Config) -> float:
    """FLOPs of a step on one device, as the training log counts them, and logits made again."""
    parts = config.parallel.tensor * config.parallel.pipe
    size, length = config.train.global_batch_size, config.data.sequence_length
    work = workload(config, GPUS)
    loss = head(work)
    again = work.microbatches * (loss.products - 3) * 2 * loss.tokens * loss.width * loss.words
    return training_flops(config.model, length, size, tensor=parts) / GPUS + again


@functools.cache
def llama_program(*layout) -> tuple[Config, Compiled, hlo.Program]:
    """microbatches, sizes of axes as (name, size)."""
    microbatches, *sizes = layout
    config = llama(microbatches, **dict(sizes))
    with tempfile.NamedTemporaryFile() as file:
        report = compile_report(config, "h100", GPUS, file.name)
        return config, report, hlo.parse(Path(file.name).read_text())


SHARDED = (1, ("fsdp", GPUS))
PIPED = (MICROBATCHES, ("tensor", 2), ("pipe", STAGES), ("fsdp", 2))


def test_sharded_step_fits_and_what_it_hides():
    """What has no matrix product between start and end: of every layer the gather of the fused
    query, key and value in forward, and three of backward; outside of the loops the tokens'
    vectors of forward, the output weight, and the scatters of its gradient and of what waits in the
    last layer. No scatter of the loops is exposed."""
    config, report, _ = llama_program(*SHARDED)
    assert report.fits and report.total < report.capacity == parse_cluster("h100x16").capacity
    numbers = 4 * GPUS * config.data.sequence_length  # of tokens, in bytes: not worth hiding
    arrays = [row for row in report.collectives if row.volume > SCALARS * row.runs]
    arrays = [row for row in arrays if row.volume != numbers]
    assert all(row.axes == ("fsdp",) for row in report.collectives)
    exposed = {(row.kind, row.runs): row.exposed for row in arrays}
    assert exposed == {
        ("all-gather", 10 * LAYERS): 4 * LAYERS,
        ("all-gather", 1): 1,
        ("all-reduce", 1): 1,
        ("all-to-all", 2): 1,  # forward; backward's is beside the output weight's gradient
        ("reduce-scatter", 4 * LAYERS): 0,
        ("reduce-scatter", 2): 2,
    }
    assert all(row.asynchronous for row in arrays)
    assert report.kernels == {
        "__cudnn$fmhaSoftmax": LAYERS,
        "__cudnn$fmhaSoftmaxBackward": LAYERS,
    }
    assert 1 <= report.flops / model_flops(config) <= FLOPS


def test_a_b200_holds_no_more_than_an_h100():
    """XLA for B200s stores what several fusions compute: the loss gives it nothing to share."""
    config, h100, _ = llama_program(*SHARDED)
    b200 = compile_report(config, "b200", GPUS)
    assert b200.arguments == h100.arguments
    assert b200.temporaries == pytest.approx(h100.temporaries, rel=SLACK)


def test_layers_per_iteration_change_no_count():
    """FLOPs, attention kernels and bytes sent; of 8 layers, 3 an iteration leave 2 over."""
    config, report, _ = llama_program(*SHARDED)
    model = dataclasses.replace(config.model, scan_unroll=3)
    unrolled = compile_report(dataclasses.replace(config, model=model), "h100", GPUS)
    assert (unrolled.flops, unrolled.kernels) == (report.flops, report.kernels)
    totals = [
        {
            kind: sum(row.volume for row in rows if row.kind == kind)
            for kind in ("all-gather", "reduce-scatter")
        }
        for rows in (report.collectives, unrolled.collectives)
    ]
    assert totals[0] == totals[1]
    exposed = [
        sum(row.exposed for row in rows if row.kind == "all-gather" and row.runs > LAYERS)
        for rows in (report.collectives, unrolled.collectives)
    ]
    assert 0 < exposed[1] < exposed[0]


def test_arguments_are_the_state_and_the_batch():
    config, report, _ = llama_program(*SHARDED)
    model, tokens = config.model, config.data.sequence_length
    vectors = (2 * LAYERS + 1) * model.hidden_size
    matrices = 2 * model.vocab_size * model.hidden_size
    heads = 2 * (model.attention.num_heads + model.kv_heads) * model.head_size
    matrices += LAYERS * model.hidden_size * (heads + 3 * model.ffn)
    states = 3  # masters and two moments
    expected = 4 * (states * (matrices / GPUS + vectors) + 4 * tokens)
    assert report.arguments == pytest.approx(expected, rel=1e-4)
    assert report.outputs_not_aliased < 4096


@pytest.mark.parametrize(
    ("layout", "axis", "kind", "beside", "exposed"),
    [
        (SHARDED, "fsdp", "all-gather", 48.38, 8.98),
        (SHARDED, "fsdp", "reduce-scatter", 45.08, 6.65),
        (PIPED, "fsdp", "all-gather", 63.50, 7.61),
        (PIPED, "fsdp", "reduce-scatter", 36.28, 4.32),
        (PIPED, "tensor", "all-gather", 7.56, 9.97),
        (PIPED, "tensor", "reduce-scatter", 10.58, 7.92),
    ],
)
def test_products_beside_collectives(layout, axis, kind, beside, exposed):
    """At least so many TFLOP between start and end of a step's collectives; at most so many
    milliseconds that these products do not hide, by the rates of the benchmark."""
    config, _, program = llama_program(*layout)
    mesh = axis_sizes(config.parallel, GPUS)
    row = absent_exposed.exposure(program, mesh)[0][(axis,), kind]
    assert row.beside >= (1 - SLACK) * beside * 1e12
    assert row.exposed <= (1 + SLACK) * exposed * 1e-3


def outside_loops(row: Collective) -> bool:
    return row.runs == row.instructions


def test_pipelined_step_fits_and_sends_once_a_tick():
    """Sends are asynchronous, but XLA schedules no layer between their start and their end."""
    config, report, _ = llama_program(*PIPED)
    assert report.fits and report.total < CAPACITY
    sent = [row for row in report.collectives if row.kind == "collective-permute"]
    assert {row.axes for row in sent} == {("pipe",)}
    assert all(row.asynchronous and row.exposed == row.runs for row in sent)
    activation = 2 * config.data.sequence_length // 2 * config.model.hidden_size
    assert sum(row.runs for row in sent) == 2 * TICKS
    assert sum(row.volume for row in sent) == 2 * TICKS * activation
    assert report.kernels["__cudnn$fmhaSoftmax"] == LAYERS // STAGES * TICKS


def test_gradients_are_reduced_once_a_step():
    """Of replicated parameters: norms of layers, and the last norm, which all stages have. ZeRO-1
    keeps a piece of the last norm's state on each stage: its gradient is scattered over them. What
    waits in the last layer is scattered over fsdp."""
    _, report, _ = llama_program(*PIPED)
    sums = [row for row in report.collectives if row.kind in ("all-reduce", "reduce-scatter")]
    once = [row for row in sums if outside_loops(row) and row.volume > SCALARS]
    assert {(row.kind, row.axes) for row in once} == {
        ("all-reduce", ("fsdp", "tensor")),
        ("reduce-scatter", ("pipe",)),
        ("reduce-scatter", ("fsdp",)),
    }
    assert all(row.runs == 1 for row in once)
    loops = [row for row in sums if row.kind == "all-reduce" and not outside_loops(row)]
    assert not [row.axes for row in loops if "fsdp" in row.axes]


def test_backward_gathers_no_more_than_its_own():
    """A layer gathers the sequence twice forward; backward, the two gradients and for the weights
    the two inputs. Parameters are gathered once for each. The logits: once for each lane. ZeRO-1
    gathers the last norm, which all stages have, once a step."""
    config, report, _ = llama_program(*PIPED)
    model, layers = config.model, LAYERS // STAGES
    gathers = [row for row in report.collectives if row.kind == "all-gather"]
    assert {row.axes for row in gathers} == {("tensor",), ("fsdp",), ("pipe",)}
    (last_norm,) = (row for row in gathers if row.axes == ("pipe",))
    assert (last_norm.runs, last_norm.volume) == (1, 2 * model.hidden_size)
    sequences = [row for row in gathers if row.axes == ("tensor",)]
    assert sum(row.runs for row in sequences) <= (6 * layers + 2) * TICKS
    layer = model.hidden_size * (2 * (model.attention.num_heads + model.kv_heads) * model.head_size)
    layer = (layer + model.hidden_size * 3 * model.ffn) // config.parallel.tensor
    ends = 2 * model.vocab_size * model.hidden_size // (config.parallel.tensor * STAGES)
    volume = sum(row.volume for row in gathers if row.axes == ("fsdp",))
    assert volume <= 2 * TICKS * (2 * layers * layer + 2 * ends)


def test_a_program_that_does_not_fit_is_compiled_and_its_text_written(tmp_path):
    config = llama(1, fsdp=1)
    config.model = dataclasses.replace(config.model, num_layers=32)
    config.train.global_batch_size = 1
    text = tmp_path / "step.hlo.txt"
    report = compile_report(config, "a100", 1, str(text))
    assert text.read_text().startswith("HloModule jit_train_step")
    assert not report.fits and report.arguments > CAPACITY
    assert report.collectives == ()


def test_nothing_that_layers_keep_is_transposed(tmp_path):
    """XLA did so where the MLP has a bias and a microbatch one sample, as [1, L, F]."""
    train = TrainConfig(global_batch_size=MICROBATCHES, micro_batch_size=1)
    config = Config(parallel=ParallelConfig(pipe=STAGES), train=train)
    config = use_architecture(config, "345m")
    model, length = config.model, 512  # unlike any dimension of a weight
    config.data.sequence_length = length
    text = tmp_path / "step.hlo.txt"
    compile_report(config, "h100", STAGES, str(text))
    kept = {model.num_layers // STAGES, length, model.ffn}
    opcodes = set()
    for _, instruction, _ in hlo.parse(text.read_text()).instructions():
        if kept <= {int(size) for size in re.findall(r"\d+", instruction.shape)}:
            opcodes.add(instruction.opcode)
    assert "parameter" in opcodes and "transpose" not in opcodes


def with_experts(fields: dict) -> Config:
    """Two layers of experts on a node."""
    config = llama(1, expert=EXPERTS, fsdp=1)
    config.train.global_batch_size = EXPERTS
    experts = {"num_layers": 2, "layers": "*(attention,moe)", "moe.num_experts": EXPERTS}
    config.model = with_fields(config.model, experts | fields)
    return config


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> tuple[Config, Compiled, hlo.Program]:
    """With a shared expert."""
    config = with_experts({"moe.aux_loss": 0.01, "moe.shared_ffn_size": 4096})
    text = tmp_path_factory.mktemp("sparse") / "step.hlo.txt"
    report = compile_report(config, "h100", EXPERTS, str(text))
    return config, report, hlo.parse(text.read_text())


def test_only_kernels_multiply_experts(sparse):
    """XLA would multiply every token by every expert, 8 of them: five times the model's FLOPs."""
    config, report, _ = sparse
    model, tokens = config.model, config.data.sequence_length
    products = 2 * 3 * 3 * model.moe.top_k * model.hidden_size * model.ffn
    whole = training_flops(model, tokens, GPUS) / GPUS
    rest = whole - model.num_layers * tokens * products
    assert rest <= report.flops <= FLOPS * rest  # what kernels multiply is not in the text
    # Forward, both gradients, and up and gate once more where backward makes them again.
    assert report.kernels["mosaic_gpu_v2"] >= 3 * 3 * model.num_layers
    assert report.fits


def test_experts_send_the_least_that_the_buffer_allows(sparse):
    """Every copy's vector goes there and back and so do their gradients, with two numbers in one
    direction; the loop of further rounds is for uneven loads."""
    config, report, _ = sparse
    model, buffer = config.model, config.parallel.expert_buffer
    copies = buffer * config.data.sequence_length * model.moe.top_k * model.num_layers
    sent = [row for row in report.collectives if row.kind == "all-to-all" and not row.unbounded]
    assert {row.axes for row in sent} == {("expert",)}
    assert sum(row.volume for row in sent) == 4 * copies * 2 * model.hidden_size + 2 * copies * 8


@pytest.mark.parametrize(
    "fields",
    [{"moe.pad_to_capacity": True}, {"moe.backend": ExpertBackend.batched}],
    ids=lambda fields: next(iter(fields)),
)
def test_blocks_of_the_capacity_are_plain_products_and_one_exchange_each_way(fields):
    """FLOPs are of every expert's capacity, none of another expert's; nothing goes in rounds."""
    config = with_experts({"moe.capacity_factor": 1.25} | fields)
    report = compile_report(config, "h100", EXPERTS)
    model, tokens = config.model, config.data.sequence_length
    rows = EXPERTS * capacity_of(tokens, model.moe.top_k, EXPERTS, 1.25)
    copies = tokens * model.moe.top_k
    empty = 2 * 3 * 3 * (rows - copies) * model.hidden_size * model.ffn * model.num_layers
    whole = training_flops(model, tokens, GPUS) / GPUS + empty
    assert whole <= report.flops <= FLOPS * whole
    assert not any("mosaic" in name for name in report.kernels)
    sent = [row for row in report.collectives if row.kind == "all-to-all"]
    assert sum(row.runs for row in sent) == 6 * model.num_layers  # of vectors 4, of weights 2
    assert not any(row.unbounded for row in sent)
    volume = (4 * 2 * model.hidden_size + 2 * 4) * rows * model.num_layers
    assert sum(row.volume for row in sent) == volume


SMALL = {"vocab_size": 1024, "num_layers": 1, "hidden_size": 256, "attention.num_heads": 4}


def test_recomputation_stays_where_there_is_no_loop():
    """One layer, and that of a further token; XLA once merged recomputation with forward."""
    flops = {}
    for recompute in ("minimal", "full"):
        config = Config(parallel=ParallelConfig(fsdp=1), train=TrainConfig(global_batch_size=1))
        fields = {**SMALL, "mtp.num_layers": 1, "recompute": recompute}
        config.model = with_fields(ModelConfig(), fields)
        config.model.attention.backend = AttentionBackend.xla
        flops[recompute] = compile_report(config, "h100", 1).flops
    model, tokens = config.model, config.data.sequence_length
    scores = 2 * 2 * tokens**2 * model.hidden_size  # two products
    matrices = 2 * tokens * model.hidden_size * (4 * model.hidden_size + 2 * model.ffn)
    assert flops["full"] - flops["minimal"] == 2 * (scores + matrices)


def test_deterministic_programs_add_in_a_fixed_order(tmp_path):
    """Gradients of tables and of experts' biases are sorted and summed before they are scattered.
    Numbers of tokens are no scatters: of whole numbers only permutations are."""
    added = {}
    for deterministic in (False, True):
        train = TrainConfig(global_batch_size=2, micro_batch_size=1, deterministic=deterministic)
        config = Config(parallel=ParallelConfig(expert=2, fsdp=1), train=train)
        learned = {"position": Position.learned, "max_position": 512}
        experts = {
            "layers": "*(attention,moe)",
            "moe.num_experts": 4,
            "moe.ffn_size": 256,
            "mlp.bias": True,
        }
        config.model = with_fields(ModelConfig(), {**SMALL, **learned, **experts})
        config.data.sequence_length = 512
        text = tmp_path / "step.hlo.txt"
        compile_report(config, "h100", 2, str(text))
        scatters = [
            instruction
            for _, instruction, _ in hlo.parse(text.read_text()).instructions()
            if instruction.opcode == "scatter"
        ]
        places = [each for each in scatters if "s32[" in each.shape]
        assert places and all("unique_indices=true" in each.attributes for each in places)
        floats = [each for each in scatters if each not in places]
        unique = ["unique_indices=true" in each.attributes for each in floats]
        added[deterministic] = {each.shape.split("{")[0] for each in floats}, unique
    (shapes, atomic), (same, unique) = added[False], added[True]
    assert {"f32[1024,256]", "f32[512,256]"} <= shapes and shapes == same
    assert not any(atomic) and all(unique)


def test_shared_experts_run_beside_what_is_sent(sparse):
    """Products are scheduled between start and end of an exchange, in forward and in backward."""
    config, report, program = sparse
    model = config.model
    product = 2 * config.data.sequence_length * model.hidden_size * model.moe.shared_ffn_size
    vectors = [row for row in report.collectives if row.kind == "all-to-all" and not row.unbounded]
    assert any(row.asynchronous for row in vectors if row.volume > row.runs * MIB)
    beside = hlo.flops_beside(program)
    large = [
        instruction.name
        for _, instruction, _ in program.instructions()
        if instruction.opcode == "all-to-all-start"
        and sum(hlo.array_bytes(*a) for a in hlo.arrays(hlo.result_shape(instruction))) >= MIB
    ]
    assert sum(beside.get(name, 0) >= product for name in large) >= 2

"""The real train step, compiled for H100s that are not here: memory, collectives, kernels."""

import dataclasses
import functools
import re

import pytest

from maxmeg.config.model import ExpertBackend, Recompute
from maxmeg.config.schema import Config, ParallelConfig, TrainConfig
from maxmeg.models.registry import use_architecture
from maxmeg.ops.dispatch import capacity_of
from maxmeg.planning import hlo
from maxmeg.planning.compile import compile_report
from maxmeg.planning.flops import training_flops
from maxmeg.planning.hardware import parse_cluster
from maxmeg.planning.memory import head
from maxmeg.planning.report import Collective, Compiled
from maxmeg.planning.workload import workload

GPUS, LAYERS = 16, 8
EXPERTS = 8  # one a GPU
STAGES, MICROBATCHES = 4, 8
TICKS = MICROBATCHES + STAGES - 1  # of each lane, the bubble's included
CAPACITY = 80 * 10**9
MIB = 2**20
SCALARS = 256  # bytes: norms, counts and flags that are summed beside the gradients
FLOPS = 1.03  # compiled over model's where nothing is recomputed; cuDNN makes its scores again


def llama(microbatches: int, recompute: Recompute = Recompute.none, **parallel) -> Config:
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
def sharded() -> tuple[Config, Compiled]:
    config = llama(1, fsdp=GPUS)
    return config, compile_report(config, "h100", GPUS)


def test_sharded_step_fits_and_hides_its_communication():
    config, report = sharded()
    assert report.fits and report.total < report.capacity == parse_cluster("h100x16").capacity
    arrays = [row for row in report.collectives if row.volume > SCALARS * row.runs]
    assert {row.kind for row in arrays} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert all(row.axes == ("fsdp",) for row in report.collectives)
    assert all(row.asynchronous for row in arrays)
    assert report.kernels == {
        "__cudnn$fmhaSoftmax": LAYERS,
        "__cudnn$fmhaSoftmaxBackward": LAYERS,
    }
    assert 1 <= report.flops / model_flops(config) <= FLOPS


def test_arguments_are_the_state_and_the_batch():
    config, report = sharded()
    model, tokens = config.model, config.data.sequence_length
    vectors = (2 * LAYERS + 1) * model.hidden_size
    matrices = 2 * model.vocab_size * model.hidden_size
    heads = 2 * (model.num_heads + model.kv_heads) * model.head_size
    matrices += LAYERS * model.hidden_size * (heads + 3 * model.ffn)
    states = 3  # masters and two moments
    expected = 4 * (states * (matrices / GPUS + vectors) + 4 * tokens)
    assert report.arguments == pytest.approx(expected, rel=1e-4)
    assert report.outputs_not_aliased < 4096


def test_gathered_bytes_are_the_models_twice():
    """Every matrix is gathered in bfloat16 for forward and again for backward."""
    config, report = sharded()
    model = config.model
    layer = model.hidden_size * (2 * (model.num_heads + model.kv_heads) * model.head_size)
    layer += model.hidden_size * 3 * model.ffn
    gathered = sum(row.volume for row in report.collectives if row.kind == "all-gather")
    head = model.vocab_size * model.hidden_size
    assert 2 * 2 * LAYERS * layer <= gathered <= 2 * (2 * LAYERS * layer + 4 * head)


@functools.cache
def piped() -> tuple[Config, Compiled]:
    config = llama(MICROBATCHES, tensor=2, pipe=STAGES, fsdp=2)
    return config, compile_report(config, "h100", GPUS)


def outside_loops(row: Collective) -> bool:
    return row.runs == row.instructions


def test_pipelined_step_fits_and_sends_asynchronously():
    config, report = piped()
    assert report.fits and report.total < CAPACITY
    sent = [row for row in report.collectives if row.kind == "collective-permute"]
    assert {row.axes for row in sent} == {("pipe",)}
    assert all(row.asynchronous for row in sent)
    activation = 2 * config.data.sequence_length // 2 * config.model.hidden_size
    assert sum(row.runs for row in sent) == 2 * TICKS
    assert sum(row.volume for row in sent) == 2 * TICKS * activation
    assert report.kernels["__cudnn$fmhaSoftmax"] == LAYERS // STAGES * TICKS


def test_gradients_are_reduced_once_a_step():
    """Of replicated parameters: norms of layers, and the last norm, which all stages have."""
    _, report = piped()
    sums = [row for row in report.collectives if row.kind == "all-reduce"]
    once = [row for row in sums if outside_loops(row) and row.volume > SCALARS]
    assert {row.axes for row in once} == {("fsdp", "tensor"), ("pipe", "fsdp", "tensor")}
    assert all(row.runs == 1 for row in once)
    assert not [row.axes for row in sums if not outside_loops(row) and "fsdp" in row.axes]


def test_backward_gathers_no_more_than_its_own():
    """A layer gathers the sequence twice forward; backward, the two gradients and for the weights
    the two inputs. Parameters are gathered once for each. The logits: once for each lane."""
    config, report = piped()
    model, layers = config.model, LAYERS // STAGES
    gathers = [row for row in report.collectives if row.kind == "all-gather"]
    assert {row.axes for row in gathers} == {("tensor",), ("fsdp",)}
    sequences = [row for row in gathers if row.axes == ("tensor",)]
    assert sum(row.runs for row in sequences) <= (6 * layers + 2) * TICKS
    layer = model.hidden_size * (2 * (model.num_heads + model.kv_heads) * model.head_size)
    layer = (layer + model.hidden_size * 3 * model.ffn) // config.parallel.tensor
    ends = 2 * model.vocab_size * model.hidden_size // (config.parallel.tensor * STAGES)
    volume = sum(row.volume for row in gathers if row.axes == ("fsdp",))
    assert volume <= 2 * TICKS * (2 * layers * layer + 2 * ends)


def test_what_does_not_fit_is_compiled_too_and_its_text_is_written(tmp_path):
    config = llama(1, fsdp=1)
    config.model = dataclasses.replace(config.model, num_layers=32)
    config.train.global_batch_size = 1
    text = tmp_path / "step.hlo.txt"
    report = compile_report(config, "a100", 1, str(text))
    assert text.read_text().startswith("HloModule jit_train_step")
    assert not report.fits and report.arguments > CAPACITY
    assert report.collectives == ()


@pytest.mark.parametrize("stages", [1, 4])
def test_nothing_that_layers_keep_is_transposed(tmp_path, stages):
    """XLA did so where the MLP has a bias and a microbatch one sample, as [1, L, F]."""
    train = TrainConfig(global_batch_size=MICROBATCHES, micro_batch_size=1)
    config = Config(parallel=ParallelConfig(pipe=stages), train=train)
    config = use_architecture(config, "345m")
    model, length = config.model, 512  # unlike any dimension of a weight
    config.data.sequence_length = length
    text = tmp_path / "step.hlo.txt"
    compile_report(config, "h100", stages, str(text))
    kept = {model.num_layers // stages, length, model.ffn}
    opcodes = set()
    for _, instruction, _ in hlo.parse(text.read_text()).instructions():
        if kept <= {int(size) for size in re.findall(r"\d+", instruction.shape)}:
            opcodes.add(instruction.opcode)
    assert "parameter" in opcodes and "transpose" not in opcodes


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> tuple[Config, Compiled, hlo.Program]:
    """Two layers, of experts and a shared one, on a node."""
    config = llama(1, expert=EXPERTS, fsdp=1)
    config.train.global_batch_size = EXPERTS
    experts = {"num_layers": 2, "num_experts": EXPERTS, "router_aux_loss": 0.01}
    more = {"expert_backend": ExpertBackend.mosaic, "shared_ffn_size": 4096}
    config.model = dataclasses.replace(config.model, **experts, **more)
    text = tmp_path_factory.mktemp("sparse") / "step.hlo.txt"
    report = compile_report(config, "h100", EXPERTS, str(text))
    return config, report, hlo.parse(text.read_text())


def test_experts_are_multiplied_by_kernels_alone(sparse):
    """XLA would multiply every token by every expert, 8 of them: five times the model's FLOPs."""
    config, report, _ = sparse
    model, tokens = config.model, config.data.sequence_length
    products = 2 * 3 * 3 * model.experts_per_token * model.hidden_size * model.ffn
    whole = training_flops(model, tokens, GPUS) / GPUS
    rest = whole - model.num_layers * tokens * products
    assert rest <= report.flops <= FLOPS * rest  # what kernels multiply is not in the text
    # Forward, both gradients, and up and gate once more where backward makes them again.
    assert report.kernels["mosaic_gpu_v2"] >= 3 * 3 * model.num_layers
    assert report.fits


def test_what_experts_send_is_the_least_that_the_buffer_allows(sparse):
    """Every copy's vector goes there and back and so do their gradients, with two numbers in one
    direction; the loop of further rounds is for uneven loads."""
    config, report, _ = sparse
    model, buffer = config.model, config.parallel.expert_buffer
    copies = buffer * config.data.sequence_length * model.experts_per_token * model.num_layers
    sent = [row for row in report.collectives if row.kind == "all-to-all" and not row.unbounded]
    assert {row.axes for row in sent} == {("expert",)}
    assert sum(row.volume for row in sent) == 4 * copies * 2 * model.hidden_size + 2 * copies * 8


def test_padded_experts_are_plain_products_and_one_exchange_each_way():
    """FLOPs are of every expert's capacity, none of another expert's; nothing goes in rounds."""
    config = llama(1, expert=EXPERTS, fsdp=1)
    config.train.global_batch_size = EXPERTS
    experts = {"num_layers": 2, "num_experts": EXPERTS, "expert_capacity": 1.25, "expert_pad": True}
    config.model = dataclasses.replace(config.model, **experts)
    report = compile_report(config, "h100", EXPERTS)
    model, tokens = config.model, config.data.sequence_length
    rows = EXPERTS * capacity_of(tokens, model.experts_per_token, EXPERTS, 1.25)
    copies = tokens * model.experts_per_token
    empty = 2 * 3 * 3 * (rows - copies) * model.hidden_size * model.ffn * model.num_layers
    whole = training_flops(model, tokens, GPUS) / GPUS + empty
    assert whole <= report.flops <= FLOPS * whole
    assert not any("mosaic" in name for name in report.kernels)
    sent = [row for row in report.collectives if row.kind == "all-to-all"]
    assert sum(row.runs for row in sent) == 6 * model.num_layers  # of vectors 4, of weights 2
    assert not any(row.unbounded for row in sent)
    volume = (4 * 2 * model.hidden_size + 2 * 4) * rows * model.num_layers
    assert sum(row.volume for row in sent) == volume


def test_shared_experts_run_beside_what_is_sent(sparse):
    """Products are scheduled between start and end of an exchange, in forward and in backward."""
    config, report, program = sparse
    model = config.model
    product = 2 * config.data.sequence_length * model.hidden_size * model.shared_ffn_size
    vectors = [row for row in report.collectives if row.kind == "all-to-all" and not row.unbounded]
    assert any(row.asynchronous for row in vectors if row.volume > row.runs * MIB)
    beside = hlo.flops_beside(program, "all-to-all", MIB)
    assert sum(flops >= product for flops in beside) >= 2

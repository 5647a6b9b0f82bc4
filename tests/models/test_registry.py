"""Every named architecture has its published size, and a small model of each kind works."""

import functools
import json
import math
import re
import typing

import cached
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import FAMILIES, FOLDER, abstract_model, parameter_tree
from jax import lax
from tables import thinned

from maxmeg.config.model import ModelConfig
from maxmeg.hf.families.read import bindings, differences, model_config
from maxmeg.layers.context import Context
from maxmeg.models.hybrid_sizes import HYBRIDS
from maxmeg.models.linear_sizes import LINEAR
from maxmeg.models.lm import LM
from maxmeg.models.registry import ALIASES, ARCHITECTURES, architecture
from maxmeg.parallel.rules import RULES, is_variable, logical_axes
from maxmeg.planning.cost import parameters
from maxmeg.state import array_name

SAME = 1e-5  # absolute, of logits about 1: the order of sums differs
REPLICATED = 0.02  # of the parameters
VOCAB, LENGTH, FIRST = 37, 12, 6

# Numbers of the files on Hugging Face or of model cards, each parameter once; of the text part of
# Gemma 3. Falcon's files hold the tied table twice: 7,217,189,760 and 41,835,970,560. Moonlight's
# hold 64 numbers a layer more, of the rotation.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "phi3-mini-4k": 3_821_079_552,
    "phi3-mini-128k": 3_821_079_552,
    "phi3-medium-4k": 13_960_238_080,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "falcon-7b": 7_217_189_760 - 65024 * 4544,
    "falcon-40b": 41_835_970_560 - 65024 * 8192,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79_674_391_296,  # of Qwen3-Coder-Next's files, which are as large
    "kimi-linear-48b-a3b": 49_122_681_728,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,  # with the biases of its routers, without what predicts
    "moonlight-16b-a3b": 15_960_111_936 - 27 * 64,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "nemotron-3-nano-30b-a3b": 31_577_937_344 + 23 * 128,  # with the biases of its routers
    "granite-4.0-h-small": 32_207_337_984,
    "bert-base": 110_106_428,  # BertForPreTraining
    "bert-large": 336_226_108,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "modernbert-base": 149_655_232,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
}
# (number, its unit), as rounded in table D.1 of the paper of GPT-3, in those of the papers of
# Megatron-LM (BERT), sequence parallelism, Minitron and Nemotron-4, and on the pages of StarCoder
# 2's files and of hybrids.
ROUNDED = {
    "gpt3-125m": (125, 1e6),
    "gpt3-350m": (356, 1e6),
    "gpt3-760m": (760, 1e6),
    "gpt3-1.3b": (132, 1e7),
    "gpt3-2.7b": (265, 1e7),
    "gpt3-6.7b": (666, 1e7),
    "gpt3-13b": (1285, 1e7),
    "gpt3-175b": (17460, 1e7),
    "22b": (22, 1e9),
    "starcoder2-3b": (303, 1e7),
    "starcoder2-7b": (717, 1e7),
    "starcoder2-15b": (16, 1e9),
    "minitron-4b": (419, 1e7),
    "minitron-8b": (83, 1e8),
    "nemotron4-15b": (31 + 125, 1e8),  # embeddings and the rest
    "nemotron4-340b": (94 + 3316, 1e8),
    "nemotron-h-4b": (45, 1e8),
    "nemotron-h-8b": (81, 1e8),
    "nemotron-h-56b": (56, 1e9),
    "nemotron-nano-12b-v2": (123, 1e8),
    "bamba-9b": (978, 1e7),
    "mamba2-2.7b": (27, 1e8),
    "granite-4.0-h-micro": (3, 1e9),
    "granite-4.0-h-tiny": (7, 1e9),
    "falcon-h1-0.5b": (52, 1e7),
    "falcon-h1-7b": (759, 1e7),
    "modernbert-large": (396, 1e6),  # 395, cut off, on its page
    "megatron-bert-1.3b": (13, 1e8),
    "megatron-bert-3.9b": (39, 1e8),
}
# (number, its unit, layers that predict) where the publisher counts no embedding and no output:
# model cards of Qwen 3, papers of Moonlight and of GLM-4.5, which says that it counts what
# predicts in both of its models: with it, Air would have 108e9.
INNER = {
    "qwen3-30b-a3b": (299, 1e8, 0),
    "qwen3-235b-a22b": (234, 1e9, 0),
    "glm4.5-air": (106, 1e9, 0),
    "glm4.5": (355, 1e9, 1),
    "moonlight-16b-a3b": (1529, 1e7, 0),
}
# What their files hold: with the layer that predicts one more token. In COPIES it has an embedding
# and an output of its own that equal the model's. Qwen 3.5's hold a vision tower too.
COPIES = ("deepseek-v3", "glm4.5", "glm4.5-air")
IN_FILES = {
    "qwen3-next-80b-a3b": 81_324_862_720,
    "qwen3.5-0.8b": 873_438_784 - 100_592_896,
    "qwen3.5-2b": 2_274_069_824 - 331_416_576,
    "qwen3.5-4b": 4_659_865_088 - 333_514_240,
    "qwen3.5-9b": 9_653_104_368 - 456_010_480,
    "qwen3.5-27b": 27_781_427_952 - 460_730_096,
    "qwen3.5-35b-a3b": 35_951_822_704 - 446_571_248,
    "qwen3.5-122b-a10b": 125_086_497_008 - 451_290_864,
    "qwen3.5-397b-a17b": 403_397_928_944 - 456_010_480,
    "deepseek-v3": 684_489_845_504,
    "glm4.5": 358_337_791_296,
    "glm4.5-air": 110_468_824_832,
}
# Bytes of the tensors in files that are quantized: total_size of GPT-OSS's indices, and of all
# tensors of DeepSeek-V3, which are 684,531,386,000 numbers with the scales of blocks.
QUANTIZED = {
    "gpt-oss-20b": 13_761_264_768,
    "gpt-oss-120b": 65_248_815_744,
    "deepseek-v3": 688_574_839_360,
}
# What a token uses of a model with experts: (number, unit, how many of embedding and output are
# counted), as in its paper, model card or name.
ACTIVE = {
    "mixtral-8x7b": (129, 1e8, 2),
    "mixtral-8x22b": (39, 1e9, 2),
    "qwen1.5-moe-a2.7b": (27, 1e8, 2),
    "qwen2-57b-a14b": (14, 1e9, 2),
    "qwen3-30b-a3b": (33, 1e8, 2),
    "qwen3-235b-a22b": (22, 1e9, 2),
    "qwen3-next-80b-a3b": (3, 1e9, 0),
    "qwen3.5-35b-a3b": (3, 1e9, 1),
    "qwen3.5-122b-a10b": (10, 1e9, 2),
    "qwen3.5-397b-a17b": (17, 1e9, 2),
    "kimi-linear-48b-a3b": (3, 1e9, 0),
    "gpt-oss-20b": (361, 1e7, 1),
    "gpt-oss-120b": (513, 1e7, 1),
    "glm4.5-air": (12, 1e9, 0),
    "glm4.5": (32, 1e9, 0),
    "deepseek-v2-lite": (24, 1e8, 1),
    "deepseek-v2": (21, 1e9, 2),
    "deepseek-v3": (366, 1e8, 1),
    "moonlight-16b-a3b": (224, 1e7, 0),
    "nemotron-3-nano-30b-a3b": (35, 1e8, 2),
    "granite-4.0-h-tiny": (1, 1e9, 2),
    "granite-4.0-h-small": (9, 1e9, 2),
}
CUT = ("deepseek-v2-lite", "qwen3-30b-a3b")  # rounded down
CUT = (*CUT, "nemotron-3-nano-30b-a3b", "granite-4.0-h-tiny")


def num_parameters(model: LM) -> tuple[int, int]:
    """(all, those of routed experts)."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    sizes = {array_name(path): array.size for path, array in leaves}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()), routed


def test_few_layers_of_hybrids_are_compiled():
    """Units that repeat are compiled once. The most, 19 of 56, are Nemotron Nano 9B v2's."""
    for name in HYBRIDS | LINEAR:
        groups = architecture(name).groups
        assert sum(len(unit) for unit, _ in groups) <= 19, name


def num_by_formula(name: str) -> int:
    return parameters.num_parameters(architecture(name))[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_has_its_parameters(name: str):
    config = architecture(name)
    count = longer = num_by_formula(name)
    ends = 2 * config.vocab_size * config.hidden_size
    if name in IN_FILES:
        config.mtp.num_layers = 1
        longer, _ = parameters.num_parameters(config)
        assert longer + ends * (name in COPIES) == IN_FILES[name]
    if name in PUBLISHED:
        assert count == PUBLISHED[name]
    if name in INNER:
        number, unit, depths = INNER[name]
        assert round(((longer if depths else count) - ends) / unit) == number
    if name in ROUNDED:
        number, unit = ROUNDED[name]
        assert round(count / unit) == number
    assert name in {*PUBLISHED, *ROUNDED, *IN_FILES}


@pytest.mark.parametrize("family", thinned(FAMILIES, 6))
def test_formulas_count_the_arrays_of_each_family(family: str):
    """All of them, and those that a token uses."""
    config = architecture(FAMILIES[family])
    count, routed = num_parameters(abstract_model(FAMILIES[family], vocab_divisible_by=1))
    unused = routed * (config.moe.num_experts - config.moe.top_k) // max(config.moe.num_experts, 1)
    assert parameters.num_parameters(config) == (count, count - unused)


def stored_bytes(tensor: str, shape: tuple[int, ...], method: str) -> int:
    """Of a tensor in a file: what a matrix is quantized to, in blocks, and bfloat16."""
    size = math.prod(shape)
    if method == "mxfp4" and tensor.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return size // 2 + size // 32  # a scale of a byte for 32
    if method == "fp8" and re.search(r"\.(self_attn|mlp)\..*_proj", tensor):
        return size + 4 * math.prod(-(-length // 128) for length in shape)
    return (4 if tensor.endswith("e_score_correction_bias") else 2) * size


@pytest.mark.parametrize("name", QUANTIZED)
def test_tensors_of_quantized_files_have_as_many_bytes_as_published(name: str):
    said = json.loads((FOLDER / f"configs/{name}.json").read_text())
    method = said.pop("quantization_config")["quant_method"]
    model, family = model_config(said), said["architectures"][0]
    tensors = {b.theirs: b.shape for b in bindings(model, family)}
    count = sum(stored_bytes(tensor, shape, method) for tensor, shape in tensors.items())
    copies = 2 * math.prod(tensors["lm_head.weight"])  # for each layer that predicts
    assert count + 2 * copies * model.mtp.num_layers == QUANTIZED[name]


def test_every_architecture_with_experts_says_what_a_token_uses():
    assert ACTIVE.keys() == {name for name in ARCHITECTURES if architecture(name).has("moe")}


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_as_many_parameters_as_published(name: str):
    config, (number, unit, ends) = architecture(name), ACTIVE[name]
    _, count = parameters.num_parameters(config)
    count -= (2 - ends) * config.vocab_size * config.hidden_size
    rounded = math.floor if name in CUT else round
    assert rounded(count / unit) == number


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*FAMILIES.values()}))
def test_little_of_an_architecture_is_replicated(name: str):
    total = replicated = 0
    for variable in jax.tree.leaves(abstract_model(name), is_leaf=is_variable):
        axes = {axis for dim in logical_axes(variable) for axis in RULES[dim]}
        total += variable.size
        replicated += variable.size * (axes <= {"pipe"})
    assert replicated <= REPLICATED * total


def test_aliases_are_names_of_their_own():
    for alias, name in ALIASES.items():
        assert alias not in ARCHITECTURES
        assert architecture(alias) == architecture(name)


@pytest.mark.parametrize("family", thinned(FAMILIES, 3))
def test_parameter_tree_is_the_golden_one(family: str):
    """On purpose: python tests/models/golden.py --write"""
    assert parameter_tree(FAMILIES[family]) == (FOLDER / f"{family}.txt").read_text()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("configs/*.json")), ids=lambda path: path.stem)
def test_architecture_is_that_of_its_published_config(path):
    """Their config.json on Hugging Face, or where that is gated that of a model trained from it."""
    said = json.loads(path.read_text())
    said.pop("quantization_config", None)  # of the files, not of the model
    published = model_config(said)
    published.mtp.num_layers = 0  # a choice of training
    assert differences(architecture(path.stem), published) == []
    assert architecture(path.stem).init_std == pytest.approx(published.init_std)


def small(name: str) -> ModelConfig:
    """The architecture with all its options and small sizes."""
    config = architecture(name)
    groups = config.attention.num_heads // config.kv_heads
    config.vocab_size, config.vocab_divisible_by = VOCAB, 1
    config.layers = config.layers.replace("5(local,mlp)", "local,mlp").replace("3(", "2(")
    config.num_layers = {1: 2, 2: 3}.get(len(config.groups[0][0]), 3)  # units, and one cut short
    config.hidden_size, config.attention.num_heads, config.mlp.ffn_size = 64, 4, 96
    config.attention.num_kv_heads = {1: 4, 71: 1}.get(groups, 2)
    config.attention.head_dim = 12 if config.attention.head_dim else 0
    config.max_position = LENGTH
    config.attention.window = min(config.attention.window, 5)
    if config.embedding_scale != 1:
        config.embedding_scale = 8.0
    if config.rotary.original_length:
        config.rotary.original_length = FIRST - 1  # every row is longer
    config.rotary.short_factors = config.rotary.short_factors[: config.head_size // 2]
    config.rotary.long_factors = config.rotary.long_factors[: config.head_size // 2]
    return config


SMALL = {
    "gpt": "gpt3-175b",
    "llama": "llama3.2-1b",
    "qwen3": "qwen3-8b",
    "gemma3": "gemma3-4b",
    "olmo2": "olmo2-7b",
    "phi3": "phi3-mini-128k",
    "neox": "pythia-1.4b",
    "falcon": "falcon-7b",
    "starcoder2": "starcoder2-3b",
    "nemotron": "minitron-8b",
}


def random_model(config: ModelConfig) -> LM:
    """Every array is random, norms and biases too; made without compiling."""
    shapes = jax.eval_shape(lambda key: LM(key, config), jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(0.2 * rng.normal(size=a.shape), a.dtype), shapes)


class Found(typing.NamedTuple):
    loss: jax.Array
    seen_L: jax.Array
    forward_BLV: jax.Array
    decoded_BLV: jax.Array


def properties(model: LM, ids_BL: jax.Array) -> Found:
    """The loss; |gradient| of the output in the middle by every token's embedding; logits of tokens
    from FIRST - 1 on, of the whole rows and of prefill and decoding. One program: compiling costs.
    """
    forward_BLV = model(ids_BL)
    picked_BL = jnp.take_along_axis(forward_BLV[:, :-1], ids_BL[:, 1:, None], axis=-1)
    loss = (jax.nn.logsumexp(forward_BLV[:, :-1], axis=-1) - picked_BL[..., 0]).mean()

    def middle(rows_LD):
        changed = jax.tree.map(lambda a: a, model)
        changed.embedding = lambda _: rows_LD[None]
        positions_BL = jnp.arange(LENGTH)[None]
        return jnp.sin(changed.hidden(ids_BL[:1], Context(positions_BL))[0][0, FIRST]).sum()

    rows_LD = model.embedding.table[...][ids_BL[0]]
    seen_L = jnp.abs(jax.grad(middle)(rows_LD)).sum(-1)
    size = cached.size_of(len(ids_BL), LENGTH)
    forward_cached = functools.partial(cached.forward_cached, size=size)
    empty = model.stack.init_cache(size)
    first_BV, cache = forward_cached(model, ids_BL[:, :FIRST], jnp.int32(0), empty)

    def step(cache, i):
        token_B1 = lax.dynamic_slice_in_dim(ids_BL, i, 1, axis=1)
        logits_BV, cache = forward_cached(model, token_B1, i, cache)
        return cache, logits_BV

    _, rest_LBV = lax.scan(step, cache, jnp.arange(FIRST, LENGTH))
    decoded_BLV = jnp.concatenate([first_BV[None], rest_LBV]).swapaxes(0, 1)
    return Found(loss, seen_L, forward_BLV[:, FIRST - 1 :], decoded_BLV)


QUICK = ("gemma3", "phi3")  # of the others, test_lm.py has every option


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SMALL],
)
def test_a_small_model_trains_is_causal_and_decodes(family: str):
    model = random_model(small(SMALL[family]))
    ids_BL = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, VOCAB)
    actual = jax.jit(properties)(model, ids_BL)
    assert jnp.isfinite(actual.loss) and 1 < actual.loss < 100
    assert actual.seen_L[: FIRST + 1].all() and not actual.seen_L[FIRST + 1 :].any()
    assert float(jnp.std(actual.forward_BLV)) > 0.1
    np.testing.assert_allclose(actual.decoded_BLV, actual.forward_BLV, atol=SAME)

"""Every named architecture has its published size and settings. (Models work: test_lm.py.)"""

import json
import math

import jax
import pytest
from golden import FAMILIES, FOLDER, abstract_model, parameter_tree
from tables import thinned

from maxmeg.checkpoint.names import array_name
from maxmeg.config.architectures import ALIASES, ARCHITECTURES, architecture
from maxmeg.hf.families.read import differences, model_config
from maxmeg.models.lm import LM
from maxmeg.parallel.parameter import is_variable, logical_axes
from maxmeg.parallel.rules import RULES
from maxmeg.planning.cost import parameters
from maxmeg.planning.show import models

COUNTS = models.num_parameters()
CONFIGS = {path.stem: path for path in sorted(FOLDER.glob("configs/*.json"))}
# Of architectures whose whole config.json is not compared: numbers of the files on Hugging Face or
# of model cards, each parameter once; of the text part of Gemma 3. Falcon's files hold the tied
# table twice: 7,217,189,760.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma2-2b": 2_614_341_888,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-27b": 27_009_346_304,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "phi3-mini-4k": 3_821_079_552,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "falcon-7b": 7_217_189_760 - 65024 * 4544,
    "qwen3-next-80b-a3b": 79_674_391_296,  # of Qwen3-Coder-Next's files, which are as large
    "kimi-linear-48b-a3b": 49_122_681_728,
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
    "starcoder2-7b": (717, 1e7),
    "minitron-4b": (419, 1e7),
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
# What their files hold: with the layer that predicts one more token. Qwen 3.5's hold a vision tower
# too.
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
}
# What a token uses of a model with experts: (number, unit, how many of embedding and output are
# counted), as in its paper, model card or name.
ACTIVE = {
    "qwen3-next-80b-a3b": (3, 1e9, 0),
    "qwen3.5-35b-a3b": (3, 1e9, 1),
    "qwen3.5-122b-a10b": (10, 1e9, 2),
    "qwen3.5-397b-a17b": (17, 1e9, 2),
    "kimi-linear-48b-a3b": (3, 1e9, 0),
    "nemotron-3-nano-30b-a3b": (35, 1e8, 2),
    "granite-4.0-h-tiny": (1, 1e9, 2),
    "granite-4.0-h-small": (9, 1e9, 2),
    "gemma4-26b-a4b": (38, 1e8, 2),
}
CUT = ("nemotron-3-nano-30b-a3b", "granite-4.0-h-tiny")  # rounded down


def num_parameters(model: LM) -> tuple[int, int]:
    """(all, those of routed experts)."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    sizes = {array_name(path): array.size for path, array in leaves}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()), routed


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_has_its_parameters(name: str):
    config = architecture(name)
    count, _ = COUNTS[name]
    if name in IN_FILES:
        config.mtp.num_layers = 1
        assert parameters.num_parameters(config)[0] == IN_FILES[name]
    if name in PUBLISHED:
        assert count == PUBLISHED[name]
    if name in ROUNDED:
        number, unit = ROUNDED[name]
        assert round(count / unit) == number
    assert name in {*PUBLISHED, *ROUNDED, *IN_FILES, *CONFIGS}


@pytest.mark.parametrize("family", thinned(FAMILIES, 6))
def test_the_arrays_of_each_family_are_counted(family: str):
    """All of them, and those that a token uses."""
    config = architecture(FAMILIES[family])
    count, routed = num_parameters(abstract_model(FAMILIES[family], vocab_divisible_by=1))
    unused = routed * (config.moe.num_experts - config.moe.top_k) // max(config.moe.num_experts, 1)
    assert parameters.num_parameters(config) == (count, count - unused)
    assert tuple(COUNTS[FAMILIES[family]]) == (count, count - unused)


@pytest.mark.parametrize(
    "name", thinned([n for n in ARCHITECTURES if n not in (*PUBLISHED, *FAMILIES.values())], 6)
)
def test_the_arrays_of_sizes_without_a_published_number_are_counted(name: str):
    assert tuple(COUNTS[name]) == parameters.num_parameters(architecture(name))


def test_every_architecture_with_experts_says_what_a_token_uses():
    names = {name for name in ARCHITECTURES if architecture(name).has("moe")}
    assert ACTIVE.keys() <= names <= {*ACTIVE, *CONFIGS}


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_as_many_parameters_as_published(name: str):
    config, (number, unit, ends) = architecture(name), ACTIVE[name]
    _, count = COUNTS[name]
    count -= (2 - ends) * config.vocab_size * config.hidden_size
    rounded = math.floor if name in CUT else round
    assert rounded(count / unit) == number


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES.values())
def test_little_of_an_architecture_is_replicated(name: str):
    total = replicated = 0
    for variable in jax.tree.leaves(abstract_model(name), is_leaf=is_variable):
        axes = {axis for dim in logical_axes(variable) for axis in RULES[dim]}
        total += variable.size
        replicated += variable.size * (axes <= {"pipe"})
    assert replicated <= 0.02 * total


def test_aliases_are_names_of_their_own():
    for alias, name in ALIASES.items():
        assert alias not in ARCHITECTURES
        assert architecture(alias) == architecture(name)


@pytest.mark.parametrize("family", thinned(FAMILIES, 3))
def test_parameter_tree_is_the_golden_one(family: str):
    """On purpose: python tests/models/golden.py --write"""
    assert parameter_tree(FAMILIES[family]) == (FOLDER / f"{family}.txt").read_text()


@pytest.mark.parametrize("name", CONFIGS)
def test_architecture_is_that_of_its_published_config(name: str):
    """Their config.json on Hugging Face, or where that is gated that of a model trained from it."""
    said = json.loads(CONFIGS[name].read_text())
    said.pop("quantization_config", None)  # of the files, not of the model
    published = model_config(said)
    published.mtp.num_layers = 0  # a choice of training
    assert differences(architecture(name), published) == []
    assert architecture(name).init_std == pytest.approx(published.init_std)

"""Parameter trees as text, one architecture a family: python tests/models/golden.py --write

Names, shapes and axes are what checkpoints and tables of conversion hold: change them on purpose.
"""

import functools
import sys
from pathlib import Path

import jax

from maxmeg.checkpoint.names import array_name
from maxmeg.config.architectures import architecture
from maxmeg.models.lm import LM
from maxmeg.parallel.parameter import is_variable, logical_axes

FOLDER = Path(__file__).parents[1] / "golden"
FAMILIES = {
    "gpt": "gpt3-175b",
    "llama": "llama3-8b",
    "mistral": "mistral-7b-v0.3",
    "qwen2.5": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "gemma2": "gemma2-9b",
    "gemma3": "gemma3-4b",
    "olmo2": "olmo2-7b",
    "phi3": "phi3-medium-4k",
    "neox": "pythia-1.4b",
    "falcon": "falcon-40b",
    "starcoder2": "starcoder2-3b",
    "nemotron": "minitron-8b",
    "mixtral": "mixtral-8x7b",
    "qwen2-moe": "qwen2-57b-a14b",
    "qwen3-next": "qwen3-next-80b-a3b",
    "qwen3.5": "qwen3.5-9b",
    "qwen3.5-moe": "qwen3.5-35b-a3b",
    "kimi-linear": "kimi-linear-48b-a3b",
    "gpt-oss": "gpt-oss-20b",
    "glm4.5": "glm4.5",
    "deepseek": "deepseek-v3",
    "nemotron-h": "nemotron-3-nano-30b-a3b",
    "granite4": "granite-4.0-h-tiny",
    "falcon-h1": "falcon-h1-0.5b",
    "bert": "bert-base",
    "modernbert": "modernbert-base",
    "t5": "t5-base",
}


@functools.cache
def abstract_model(name: str, vocab_divisible_by: int = 128) -> LM:
    config = architecture(name)
    config.vocab_divisible_by = vocab_divisible_by
    return jax.eval_shape(lambda key: LM(key, config), jax.random.key(0))


def parameter_tree(name: str) -> str:
    """A line an array: name, shape, logical axes."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract_model(name), is_leaf=is_variable)
    lines = []
    for path, variable in leaves:
        axes = ",".join(axis or "-" for axis in logical_axes(variable))
        lines.append(f"{array_name(path)} {'x'.join(map(str, variable.shape))} {axes}\n")
    return "".join(sorted(lines))


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    for family, name in FAMILIES.items():
        (FOLDER / f"{family}.txt").write_text(parameter_tree(name))

"""Look at the activations of a model, and steer what it writes with one of them.

Command:  python examples/activations_and_steering.py
Time:     40 s on two CPU cores
Result:   the norms of the layers' outputs; a model that continues "the cat " in small letters, and
          mostly in capitals once the direction between the two is added to its MLPs
"""

import random

import jax.numpy as jnp
from flax import nnx

import maxmeg
from maxmeg.parallel.parameter import parameter

choose = random.Random(0).choice
words = "cat dog bird", "sees hears finds", "tree house river", "moon sun sky"
chosen = [[choose(each.split()) for each in words] for _ in range(400)]
pattern = "the {} {} the {} and the {}."
texts = [choose([str.lower, str.upper])(pattern.format(*each)) for each in chosen]
config = maxmeg.config(
    "gpt",
    **{
        "run_dir": "runs/steering",
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "data.sequence_length": 64,
        "train.num_steps": 150,
        "log.sample_prompt": "",
    },
)
run = maxmeg.train(config, texts)

small = run.activations("the dog hears", "layers.*.mlp")
capital = run.activations("THE DOG HEARS", "layers.*.mlp")
print({name: f"norm {jnp.linalg.norm(x_LD):.2f}" for name, x_LD in small.items()})
direction_ND = jnp.stack([(capital[name] - small[name]).mean(0) for name in small])


class Steered(nnx.Module):
    """A mixer that adds a vector to its output: one per layer, stacked like the weights."""

    def __init__(self, mixer, shift_ND):
        self.mixer, self.spec = mixer, mixer.spec
        self.shift = parameter(shift_ND, "norm")

    def __call__(self, h, ctx, cache=None):
        output, cache, aux = self.mixer(h, ctx, cache)
        return output + self.shift[...], cache, aux

    def init_cache(self, size):
        return self.mixer.init_cache(size)


print("as trained:", run.generate("the cat ", 30, temperature=0))
mixers = run.model.stack.groups[0].sublayers[1].mixers
mixers["mlp"] = Steered(mixers["mlp"], 1.6 * direction_ND)
steered = maxmeg.LanguageModel(run.model, run.config)
print("steered:   ", steered.generate("the cat ", 30, temperature=0))

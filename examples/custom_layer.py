"""Give a model a layer of your own, and train it by hand with optax.

Command:  python examples/custom_layer.py
Time:     20 s on two CPU cores
Result:   a loss that falls from about 5.5 to below 0.5 nats per byte
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import maxmeg
from maxmeg.models.lm import LM
from maxmeg.parallel.parameter import parameter


class Maxout(nnx.Module):
    """A feed-forward layer, out(max(a x, b x)). All layers' weights are stacked."""

    def __init__(self, key, mlp):
        N, D, F = mlp.up.weight.shape
        self.spec = mlp.spec
        pieces = 0.1 * jax.random.normal(key, (N, D, 2, F))
        self.pieces = parameter(pieces, "embed", None, "mlp")
        self.out = mlp.out

    def __call__(self, h_BLD, ctx, cache=None):
        h_BLPF = jnp.einsum("BLD,DPF->BLPF", h_BLD, self.pieces[...])
        return self.out(h_BLPF.max(axis=2), ctx), cache, {}


settings = {"num_layers": 2, "hidden_size": 64, "vocab_size": 257, "max_position": 64}
config = maxmeg.config("gpt", **{f"model.{name}": value for name, value in settings.items()})
model = jax.jit(lambda key: LM(key, config.model))(jax.random.key(0))
mixers = model.stack.groups[0].sublayers[1].mixers
mixers["mlp"] = Maxout(jax.random.key(1), mixers["mlp"])

text = jnp.frombuffer(b"Never odd or even. " * 3, jnp.uint8).astype(jnp.int32)[None]
optimizer = optax.adam(3e-3)


@jax.jit
def step(model, state):
    def loss(model):
        logits_BLV = model(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BLV, text[:, 1:]).mean()

    value, gradients = jax.value_and_grad(loss)(model)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(model, updates), state, value


state = optimizer.init(model)
for number in range(101):
    model, state, value = step(model, state)
    if number % 20 == 0:
        print(f"step {number:3}  loss {value:.3f}")

"""Latent attention of DeepSeek's sizes compiled for an H100 that is not here: cuDNN's kernels."""

from absent.compiled_kernels import MIB, output_of

LENGTH, WIDTH, HEADS, RANK = 4096, 1024, 16, 512
SIZES = (192, 192, 128, 128)  # of a head's query, key, value and output
KEPT = 3  # of a head's arrays as long as the sequence: themselves, their gradients, copies

COMPILE = f"""
from maxmeg.layers.context import Context
from maxmeg.layers.mla import Mla, MlaSpec
from maxmeg.ops.rope import RotarySpec

spec = MlaSpec({WIDTH}, {HEADS}, {HEADS}, 128, RotarySpec(interleaved=True), query_rank={RANK})
layer = jax.eval_shape(lambda key: Mla(key, spec), jax.random.key(0))
layer = jax.tree.map(lambda leaf: array(*leaf.shape), layer)
x_BLD = array(1, {LENGTH}, {WIDTH})

def gradients(layer, x_BLD):
    ctx = Context(jnp.arange({LENGTH})[None])
    out_BLD, pull = jax.vjp(lambda layer, x_BLD: layer(x_BLD, ctx)[0], layer, x_BLD)
    return pull(out_BLD)

with jax.set_mesh(mesh):
    program = compiled(gradients, layer, x_BLD)
text = program.as_text()
print(json.dumps(dict(
    forward=text.count('target="__cudnn$fmhaSoftmax"'),
    backward=text.count('target="__cudnn$fmhaSoftmaxBackward"'),
    temporaries=program.memory_analysis().temp_size_in_bytes,
)))
"""


def test_heads_of_192_and_128_are_cudnns():
    """As on a GPU that is here; nothing is as large as the scores of a block of queries."""
    (actual,) = output_of(COMPILE)
    assert (actual["forward"], actual["backward"]) == (1, 1)
    assert actual["temporaries"] <= KEPT * 2 * LENGTH * HEADS * sum(SIZES) + 16 * MIB

"""The engine's programs compiled for H100s that are not here: the cache is updated in place."""

import pytest
from absent.compiled_kernels import output_of

PAGES = 65_536  # a cache that is larger than all else that a program makes
LARGEST = 1 / 8  # temporaries, of the cache
# Logits are gathered over tensor, and what was sampled over data; in prefill also the logits of the
# prompt, if they are wanted, and the logits of an MTP layer. Weights are not gathered.
GATHERS = 2, 3

COMPILE = """
import re
from jax.sharding import NamedSharding, PartitionSpec as P
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.inference.load import Trained
from maxmeg.inference.programs import Programs
from maxmeg.config.architectures import use_architecture
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.mesh import BATCH_AXES, make_mesh
from maxmeg.config.validate import axis_sizes
from maxmeg.state import abstract_state

parallel = ParallelConfig(data=2, fsdp=1, tensor=2, zero1=False)
config = use_architecture(Config(parallel=parallel), "{name}")
config.model.num_layers = 3
config.model.mtp.num_layers = {mtp}
mesh = make_mesh(axis_sizes(parallel, 4), absent_gpus("h100", 4))
model = abstract_state(config, make_optimizer(config.optim), mesh).model
model = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, "bfloat16", sharding=a.sharding), model
)
tokenizer = load_tokenizer("null:100")
pages = {pages}
programs = Programs(Trained(model, config, tokenizer, 0, mesh), 16, pages, 64, 32, 256, {mtp})
cache, tokens = jax.eval_shape(programs.state, model)
arrays = jax.tree.leaves(cache)
stored = {{rf"{{n * pages}},64," for a in arrays for n in (a.shape[1],)}}
stored |= {{rf"{{a.shape[1]}},{{pages}},64," for a in arrays}}
changed = re.compile(rf"\\[(1,)?({{'|'.join(stored)}})[^=]*? (copy|copy-start|transpose)\\(")
for chunk, program in ((0, programs.decode_program), (256, programs.prefill_program)):
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    sent = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        for a in (programs.packed({{}}, chunk), programs.changes({{}}, chunk))
    ]
    lowered = program.trace(model, cache, tokens, *sent).lower(lowering_platforms=("cuda",))
    done = lowered.compile()
    memory, text = done.memory_analysis(), done.as_text()
    print(json.dumps(dict(
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        cache=sum(a.size * a.dtype.itemsize for a in arrays) // mesh.size,
        copies=len(changed.findall(text)),
        gathers=len(re.findall(r"all-gather(?:-start)?\\(", text)),
    )))
"""


@pytest.mark.parametrize(("name", "mtp"), [("llama3-8b", 0), ("deepseek-v2-lite", 1)])
def test_the_cache_is_updated_in_place(name, mtp):
    """Nothing of its size is made, whatever that is; no weight is gathered for a token."""
    rows = output_of(COMPILE.format(name=name, mtp=mtp, pages=PAGES))
    for row, gathers in zip(rows, GATHERS, strict=True):
        assert row["aliased"] >= row["cache"] and row["copies"] == 0
        assert row["temporaries"] <= LARGEST * row["cache"]
        assert row["gathers"] == gathers + mtp

"""`maxmeg doctor --kernels`, lowered for an H100 that is not here: no kernel refuses its cases."""

from compiled_kernels import output_of

from maxmeg.runtime.kernel_checks import cases

PROGRAM = """
import functools
from maxmeg.runtime.kernel_checks import cases, gradients

def placed(array):
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

key = placed(jax.eval_shape(lambda: jax.random.key(0)))
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    for case in cases(32):
        arrays = map(placed, jax.eval_shape(case.arrays, key))
        traced = {name: jax.jit(functools.partial(gradients, case, name)) for name in case.backends}
        arrays, texts = list(arrays), {}
        for name, function in traced.items():
            lowered = function.trace(key, *arrays).lower(lowering_platforms=("cuda",))
            texts[name] = lowered.as_text().count("mosaic_gpu")
        print(json.dumps([case.op, case.words, texts]), flush=True)
"""


def test_every_kernel_takes_the_cases_of_the_doctor(tmp_path):
    rows = output_of(PROGRAM, str(tmp_path))
    assert [row[:2] for row in rows] == [[case.op, case.words] for case in cases(32)]
    for _, words, texts in rows:
        assert texts["xla"] == 0, words
        assert texts.get("mosaic", 1) > 0, words

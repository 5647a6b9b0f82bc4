"""Speed of every backend of every op, as ratios to cuDNN's or XLA's in the same run."""

import functools
from collections.abc import Callable, Iterator

from gpu_parts.timing import Item, Sizes, compare, interleaved, random, with_gradients


def context(size: Sizes) -> Iterator[Item]:
    """What the device reaches at best: a matrix product (also our own loop's), and a copy."""
    import jax
    import jax.numpy as jnp

    def matmul() -> dict:
        n = size.matmul
        a, b = random([(n, n)] * 2)
        multiply = jax.jit(jnp.matmul)
        calls: dict[str, Callable] = {"xla": lambda: multiply(a, b)}
        if size.on_gpu:
            from maxmeg.ops.backend import kernel_module

            ours = jax.jit(kernel_module("matmul").matmul)
            calls["mosaic"] = lambda: ours(a, b)
        return compare(calls, 2 * n**3, "tflops", size, ("xla",)) | {"size": n}

    def copy() -> dict:
        x = jnp.zeros(size.copy_elements, jnp.bfloat16)
        add = jax.jit(lambda x: x + 1)
        seconds = interleaved({"x": lambda: add(x)}, size.rounds, size.repeats)["x"]
        return {"tb_per_s": 2 * x.nbytes / seconds / 1e12}

    yield "bf16 matmul", matmul
    yield "copy", copy


def attention(size: Sizes) -> Iterator[Item]:
    """Causal attention, dense, packed and windowed, forward and with backward."""
    for length, heads, groups, head_dim in size.attention:
        name = f"L{length} H{heads}/{groups} D{head_dim}"
        shape = (max(1, size.tokens // length), length, heads, groups, head_dim)
        yield name, functools.partial(measure_attention, size, shape, {}, 1)
    length, heads, groups, head_dim = size.attention[0 if len(size.attention) < 5 else 4]
    shape = (max(1, size.tokens // length), length, heads, groups, head_dim)
    share = f"L{length} H{heads}/{groups} D{head_dim}"
    yield f"8 documents, {share}", functools.partial(measure_attention, size, shape, {}, 8)
    window = {"window": length // 4}
    yield (
        f"window of a quarter, {share}",
        functools.partial(measure_attention, size, shape, window, 1),
    )


def measure_attention(size: Sizes, shape: tuple, masks: dict, documents: int) -> dict:
    """TFLOP/s count the scores of the causal triangle, of its documents, or of the window."""
    import jax
    import jax.numpy as jnp

    from maxmeg.ops.attention.call import BACKENDS, Operands, ScoreSpec
    from maxmeg.ops.attention.call import attention as attend

    batch, length, heads, groups, head_dim = shape
    *qkv, slope = random(
        [
            (batch, length, heads, head_dim),
            *[(batch, length, groups, head_dim)] * 2,
            (batch, length, heads, head_dim),
        ]
    )
    ids = jnp.broadcast_to(jnp.arange(length) * documents // length, (batch, length))
    operands = Operands(segments_BL=ids if documents > 1 else None)
    spec, window = ScoreSpec(**masks), masks.get("window", length)
    scores = documents * (length // documents) ** 2 / 2 if documents > 1 else length**2 / 2
    scores -= (length - window) ** 2 / 2
    flops = 4 * batch * heads * scores * head_dim
    forward: dict[str, Callable] = {}
    both: dict[str, Callable] = {}
    for backend in size.backends("attention", tuple(BACKENDS)):
        call = functools.partial(attend, spec=spec, operands=operands, backend=backend)
        forward[backend] = functools.partial(jax.jit(call), *qkv)
        both[backend] = functools.partial(with_gradients(call), tuple(qkv), slope)
    found: dict = {"documents": documents, **masks}
    return found | rates(size, {"forward": (forward, flops), "both": (both, 3.5 * flops)})


def rounds(size: Sizes) -> Iterator[Item]:
    """Attention calls of one device of 8 that share a sequence, as parallel.context makes them."""
    length, heads, groups, head_dim = size.shared
    name = f"L{length} H{heads}/{groups} D{head_dim}, context 8"
    yield f"a round of a ring, {name}", functools.partial(measure_round, size)
    yield f"gathered keys, {name}", functools.partial(measure_gathered, size)


def measure_round(size: Sizes) -> dict:
    """Two pairs of halves of pieces, every query with every key; backward from the output and
    log-sum-exp of all rounds."""
    import jax

    from maxmeg.ops.attention.call import (
        BACKENDS,
        Operands,
        ScoreSpec,
        attention_with_lse,
        block_gradients,
    )

    length, heads, groups, head_dim = size.shared
    half = length // 16
    queries, keys = (2, half, heads, head_dim), (2, half, groups, head_dim)
    q, k, v, slope = random([queries, keys, keys, queries])
    spec = ScoreSpec(causal=False, merged=True)
    flops = 4 * 2 * heads * half**2 * head_dim
    forward: dict[str, Callable] = {}
    backward: dict[str, Callable] = {}
    for backend in size.backends("attention", tuple(BACKENDS)):
        run = jax.jit(functools.partial(attention_with_lse, spec=spec, backend=backend))
        forward[backend] = functools.partial(run, q, k, v)

        def pull(q, k, v, out, lse, slope, backend=backend):
            return block_gradients((q, k, v, spec, Operands()), out, lse, slope, backend=backend)

        backward[backend] = functools.partial(jax.jit(pull), q, k, v, *run(q, k, v), slope)
    return rates(size, {"forward": (forward, flops), "backward": (backward, 2.5 * flops)})


def measure_gathered(size: Sizes) -> dict:
    """Queries of 8 chunks of a sequence that are apart, with all keys; TFLOP/s of what they see."""
    import jax
    import jax.numpy as jnp

    from maxmeg.ops.attention.call import BACKENDS, Operands, attention
    from maxmeg.parallel.sequence import chunk_places

    length, heads, groups, head_dim = size.shared
    piece, chunk = length // 8, length // 64
    queries, keys = (1, piece, heads, head_dim), (1, length, groups, head_dim)
    q, k, v, slope = random([queries, keys, keys, queries])
    places_BL = chunk_places(jnp.arange(3, 64, 8)[None], chunk)
    operands = Operands(places_BL - jnp.arange(piece))
    flops = 4 * heads * float(jnp.sum(places_BL + 1)) * head_dim
    forward: dict[str, Callable] = {}
    both: dict[str, Callable] = {}
    for backend in size.backends("attention", tuple(set(BACKENDS) - {"cudnn"})):
        call = functools.partial(attention, operands=operands, backend=backend)
        forward[backend] = functools.partial(jax.jit(call), q, k, v)
        both[backend] = functools.partial(with_gradients(call), (q, k, v), slope)
    return rates(size, {"forward": (forward, flops), "both": (both, 3.5 * flops)})


def rates(size: Sizes, directions: dict[str, tuple[dict, float]]) -> dict:
    """TFLOP/s of calls by backend, for each direction (its calls, its FLOPs)."""
    found: dict = {}
    for name, (calls, amount) in directions.items():
        measured = compare(calls, amount, "tflops", size, ("cudnn", "xla"))
        found |= {f"{name} {key}": value for key, value in measured.items()}
    return found


def loss(size: Sizes) -> Iterator[Item]:
    """Linear + cross entropy, forward and backward; TFLOP/s of the three products needed."""
    for tokens, vocab, width in size.losses:
        name = f"T{tokens} V{vocab} D{width}"
        yield name, functools.partial(measure_loss, size, tokens, vocab, width)


def measure_loss(size: Sizes, tokens: int, vocab: int, width: int) -> dict:
    import jax
    import jax.numpy as jnp

    from maxmeg.ops.cross_entropy.call import BACKENDS, CrossEntropySpec, linear_cross_entropy

    h_TD, w_VD = random([(tokens, width), (vocab, width)])
    w_VD = w_VD / width**0.5
    targets_T = jax.random.randint(jax.random.key(3), (tokens,), 0, vocab)
    weights_T = jnp.full(tokens, 1 / tokens)
    calls: dict[str, Callable] = {}
    for backend in size.backends("loss", tuple(BACKENDS)):
        for chunk in (2048, 4096) if backend == "xla" else (2048,):
            spec = CrossEntropySpec(vocab, chunk=chunk)

            def mean(h_TD, w_VD, spec=spec, backend=backend):
                given = (targets_T, weights_T, spec)
                return linear_cross_entropy(h_TD, w_VD, *given, backend=backend)[0]

            name = backend if chunk == 2048 else f"{backend}, chunks of {chunk}"
            run = with_gradients(mean)
            calls[name] = functools.partial(run, (h_TD, w_VD), jnp.ones(()))
    return compare(calls, 6 * tokens * vocab * width, "tflops", size, ("xla",))


def memory_bound(size: Sizes) -> Iterator[Item]:
    """What XLA makes of norms, gated activations and rotations; bytes that cannot be avoided."""
    for width in size.widths:
        for name in MEMORY_BOUND:
            yield f"{name}, D{width}", functools.partial(measure_memory_bound, size, name, width)


def rms(x, weight):
    from maxmeg.ops.norm import norm

    return norm(x, weight, None, 1e-5, centred=False)


def residual_rms(x, y, weight):
    added = x + y
    return added, rms(added, weight)


def layer(x, weight, bias):
    from maxmeg.ops.norm import norm

    return norm(x, weight, bias, 1e-5, centred=True)


def swiglu(gate, up):
    from maxmeg.ops.activation import activate

    return activate("swiglu", gate, up)


def gelu(x):
    from maxmeg.ops.activation import activate

    return activate("gelu_tanh", x)


def rope(x):
    import jax.numpy as jnp

    from maxmeg.ops.rope import rotate, rotation

    heads = x.reshape(8, x.shape[0] // 8, -1, 64)
    positions_BL = jnp.broadcast_to(jnp.arange(heads.shape[1]), heads.shape[:2])
    return rotate(heads, rotation(positions_BL, heads.shape[-1]))


# function, arrays in, vectors of parameters, arrays out
MEMORY_BOUND = {
    "rms norm": (rms, 1, 1, 1),
    "residual and rms norm": (residual_rms, 2, 1, 2),
    "layer norm": (layer, 1, 2, 1),
    "swiglu": (swiglu, 2, 0, 1),
    "gelu": (gelu, 1, 0, 1),
    "rope": (rope, 1, 0, 1),
}


def measure_memory_bound(size: Sizes, name: str, width: int) -> dict:
    """Forward reads its arrays and writes its results; backward reads arrays and slopes."""
    import jax

    function, arrays, vectors, results = MEMORY_BOUND[name]
    given = random([(size.tokens, width)] * arrays + [(width,)] * vectors)
    slopes = jax.tree.map(lambda x: x, jax.jit(function)(*given))
    array = 2 * size.tokens * width
    forward = {"xla": functools.partial(jax.jit(function), *given)}
    backward = {"xla": functools.partial(with_gradients(function), tuple(given), slopes)}
    needs = arrays if name != "rope" else 0  # a rotation's gradient needs no input
    found = {}
    for kind, calls, count in (
        ("forward", forward, arrays + results),
        ("backward", backward, needs + results + arrays),
    ):
        rates = compare(calls, count * array, "tb_per_s", size, ())
        found |= {f"{kind} {key}": value for key, value in rates.items()}
    return found


def grouped(size: Sizes) -> Iterator[Item]:
    """Products of experts' weights with uneven groups of tokens, and all their gradients; our
    kernel also with blockwise scaling, quantization of both operands included."""
    for experts, tokens, width, out in size.experts:
        name = f"E{experts} T{tokens} {width}x{out}"
        yield name, functools.partial(measure_grouped, size, experts, tokens, width, out)


def measure_grouped(size: Sizes, experts: int, tokens: int, width: int, out: int) -> dict:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from maxmeg.ops.experts.grouped_matmul import BACKENDS, grouped_matmul
    from maxmeg.ops.quantized import BLOCK, E4M3, Recipe

    shares = np.random.default_rng(0).dirichlet(np.full(experts, 4.0))
    bounds = np.round(np.cumsum(shares) * tokens).astype(np.int32)
    sizes_E = jnp.asarray(np.diff(bounds, prepend=0), jnp.int32)
    x_TD, w_EDF, slope_TF = random([(tokens, width), (experts, width, out), (tokens, out)])
    dense = jax.jit(jnp.matmul)  # one expert's weights for all: what the hardware can do
    forward: dict[str, Callable] = {"one matmul": lambda: dense(x_TD, w_EDF[0])}
    both: dict[str, Callable] = {}
    backends = size.backends("grouped", tuple(BACKENDS))
    blockwise = Recipe(backward=E4M3, block=BLOCK, square=True, backend="mosaic")
    kinds = {backend: (backend, None) for backend in backends}
    if "mosaic" in backends:
        kinds["mosaic blockwise"] = ("mosaic", blockwise)
    for name, (backend, recipe) in kinds.items():
        if backend == "xla" and experts > 8:
            continue  # it multiplies every token with every expert

        def product(x_TD, w_EDF, backend=backend, recipe=recipe):
            codes = recipe and recipe.weights(jax.lax.stop_gradient(w_EDF), None)
            how = {"codes": codes, "recipe": recipe, "backend": backend}
            return grouped_matmul(x_TD, w_EDF, sizes_E, **how)

        forward[name] = functools.partial(jax.jit(product), x_TD, w_EDF)
        both[name] = functools.partial(with_gradients(product), (x_TD, w_EDF), slope_TF)
    flops = 2 * tokens * width * out
    found: dict = {}
    for name, calls, amount in (("forward", forward, flops), ("both", both, 3 * flops)):
        rates = compare(calls, amount, "tflops", size, ("one matmul", "xla"))
        found |= {f"{name} {key}": value for key, value in rates.items()}
    return found


def block_matmul(size: Sizes) -> Iterator[Item]:
    """A projection with its gradients and quantization by blockwise scaling's backends, and in
    bfloat16; and our kernel alone, with the scales of weights and with those of rows."""
    for width in size.widths if size.on_gpu else (128,):
        name = f"T{size.tokens} {width}x{4 * width}"
        yield name, functools.partial(measure_block_matmul, size, width, 4 * width)


def measure_block_matmul(size: Sizes, width: int, out: int) -> dict:
    import jax
    import jax.numpy as jnp

    from maxmeg.ops import block_matmul as op
    from maxmeg.ops.backend import kernel_module
    from maxmeg.ops.quantized import BLOCK, Recipe, matmul

    x_TI, w_IO, slope_TO = random([(size.tokens, width), (width, out), (size.tokens, out)])
    e4m3, flops = "float8_e4m3fn", 2 * size.tokens * width * out
    both = {"bf16": functools.partial(with_gradients(jnp.matmul), (x_TI, w_IO), slope_TO)}
    for backend in size.backends("block-matmul", tuple(op.BACKENDS)):
        recipe = Recipe(backward=e4m3, block=BLOCK, square=True, backend=backend)
        codes = recipe.weights(w_IO, None)[0]

        def product(x_TI, w_IO, codes=codes, recipe=recipe):
            return matmul(x_TI, w_IO, codes, codes, recipe)

        both[backend] = functools.partial(with_gradients(product), (x_TI, w_IO), slope_TO)
    found = compare(both, 3 * flops, "tflops", size, ("bf16", "xla"))
    found = {f"both {key}": value for key, value in found.items()}
    if op.MOSAIC not in size.backends("block-matmul", (op.MOSAIC,)):
        return found
    right_OI, scales = w_IO.T.astype(e4m3), [size.tokens, out, out // BLOCK]
    x_scale, row_scale, block_scale = (jnp.ones((1, n, width // BLOCK)) for n in scales)
    kernel = jax.jit(kernel_module("fp8_blockwise").block_matmul)
    operands = x_TI.astype(e4m3)[None], right_OI[None], x_scale
    calls = {
        name: functools.partial(kernel, *operands, scale)
        for name, scale in (("weights", block_scale), ("rows", row_scale))
    }
    return found | compare(calls, flops, "tflops", size, ())


def decode(size: Sizes) -> Iterator[Item]:
    """One new token a row over a paged cache; TB/s of the cache."""
    for rows, tokens, page in size.caches:
        name = f"B{rows} M{tokens} pages of {page}"
        yield name, functools.partial(measure_decode, size, rows, tokens, page)


def measure_decode(size: Sizes, rows: int, tokens: int, page: int) -> dict:
    import jax
    import jax.numpy as jnp

    from maxmeg.ops.decode_attention.call import BACKENDS, PagedCache, decode_attention

    head_dim, groups = 128 if size.on_gpu else 16, size.heads // 4
    pages = rows * -(-tokens // page)
    q_BLHK, *kv = random([(rows, 1, size.heads, head_dim)] + [(pages, page, groups, head_dim)] * 2)
    table_BN = jax.random.permutation(jax.random.key(5), pages).reshape(rows, -1)
    lengths_B = jnp.full(rows, tokens, jnp.int32)
    cache = PagedCache(*kv, table_BN.astype(jnp.int32), lengths_B)
    calls: dict[str, Callable] = {}
    for backend in size.backends("decode", tuple(BACKENDS)):
        call = functools.partial(decode_attention, backend=backend)
        calls[backend] = functools.partial(jax.jit(call), q_BLHK, cache)
    amount = 2 * 2 * rows * tokens * groups * head_dim
    return compare(calls, amount, "tb_per_s", size, ("xla",))


def scan(size: Sizes) -> Iterator[Item]:
    """Mamba-2's chunked scan, forward and with backward."""
    yield from scans(size, "scan")


def delta_scan(size: Sizes) -> Iterator[Item]:
    """The gated delta rule's chunked scan, forward and with backward."""
    yield from scans(size, "delta-scan")


def scans(size: Sizes, op: str) -> Iterator[Item]:
    for shape in size.scans if op == "scan" else size.delta_scans:
        name = "L{} H{}/{} N{} P{}".format(*shape)
        yield name, functools.partial(measure_scan, size, op, shape)


def measure_scan(size: Sizes, op: str, shape: tuple[int, ...]) -> dict:
    """TFLOP/s count the products of chunks of 128 tokens, with scores shared by a group's heads; of
    the delta rule those of 64, with scores of keys and queries, the inverses left out."""
    import jax
    import jax.numpy as jnp

    from maxmeg.ops.chunk_scan import BACKENDS, ScanSpec, chunk_scan

    length, heads, groups, state, value = shape
    keys, values, chunk = (1, length, groups, state), (1, length, heads, value), 128
    q_BLGN, k_BLGN, v_BLHP, y_slope = random([keys, keys, values, values])
    log_decay_BLH = -jax.nn.softplus(random([(1, length, heads)], "float32")[0])
    inputs = q_BLGN, k_BLGN, v_BLHP, log_decay_BLH
    flops = 2 * groups * chunk * state + 2 * heads * chunk * value + 4 * heads * state * value
    if op == "delta-scan":
        chunk, lengths = 64, jnp.linalg.norm(k_BLGN.astype(jnp.float32), axis=-1, keepdims=True)
        k_BLGN = (k_BLGN / lengths).astype(k_BLGN.dtype)
        inputs = q_BLGN, k_BLGN, v_BLHP, log_decay_BLH, jnp.exp(log_decay_BLH)
        flops = 4 * groups * chunk * state + 4 * heads * chunk * value + 6 * heads * state * value
    slopes = y_slope, jnp.zeros((1, heads, state, value))
    forward: dict[str, Callable] = {}
    both: dict[str, Callable] = {}
    for backend in size.backends(op, tuple(BACKENDS)):
        call = functools.partial(chunk_scan, spec=ScanSpec(chunk, backend))
        forward[backend] = functools.partial(jax.jit(call), *inputs)
        both[backend] = functools.partial(with_gradients(call), inputs, slopes)
    flops *= length
    return rates(size, {"forward": (forward, flops), "both": (both, 3 * flops)})

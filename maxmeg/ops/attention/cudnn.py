"""Attention by cuDNN's fused kernels, through the function behind jax.nn.dot_product_attention.

Unlike the public function it returns the float32 log-sum-exp and supports values with another head
dim than keys; it is the same in jax 0.10 to 0.12. The kernels multiply the masked weights, zeros,
with the values of a tile: NaN or inf in a value can reach queries that do not see it.

Masks other than causal ones and windows (documents, chunks) are a bias of 0 and a large negative
number, one for all heads, as in jax.nn.dot_product_attention(mask=...): every head reads it, and
masked blocks are computed. jax's packed layout (offsets of documents) is not used: jax 0.10.2
computes wrong offsets of keys when there are fewer key heads than query heads. The layout also
needs a maximum number of documents per row, and stores log-sum-exps for that many.

Sinks are merged into the output and the log-sum-exp after the kernel. Its backward then takes the
merged ones, with which its formulas are those of attention with sinks.
"""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as fused

from maxmeg.ops.attention.flash import sink_gradient, with_sinks
from maxmeg.ops.attention.mask import visible
from maxmeg.ops.attention.spec import NEGATIVE, Operands, ScoreSpec
from maxmeg.ops.backend import BLACKWELL, HOPPER, Device, refuses_older_gpus, target_device

SUPPORTS = (
    "bfloat16 and float16 on CUDA GPUs of capability 8.0 and newer, even lengths, causal "
    "attention with equally many queries and keys from position 0 (with a window) or all keys, "
    "log-sum-exp, sinks, head dims that are multiples of 8 up to 128, on Hopper up to 256, on "
    "Blackwell 192 with values of 128; other values shorter than keys are padded; on Ampere and "
    "Hopper with heads up to 128 documents and chunks of queries that are also the keys, or of "
    "rounds over context"
)
MLA = (192, 128)  # head dims of queries and keys, and of values
MLA_VERSION = 91000  # of cuDNN, as jax counts it
OLDEST_VERSION = 91200  # of pyproject.toml
LARGEST_MASKED = 128  # head dim with a mask of documents
RULE_ARRAYS = (
    *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"),
    *("page_table_k", "page_table_v", "score_mod_args"),
)
RULE_SETTINGS: dict[str, Any] = {  # of jax 0.10 to 0.12, with the values of a call
    **{"scale": 1.0, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False)},
    **{"mask_type": None, "layout": fused.AttentionLayout.BTNH.value, "score_mod": None},
    **{"sliding_window_length": None, "cudnn_version": 0, "is_training": 0},
    "return_residual": True,
}
DETERMINISTIC_VERSION = 91801  # first version with a deterministic backward on Blackwell


def has_capability(capability: str) -> bool:
    """Whether the target GPU has at least this compute capability, such as "9.0"."""
    return target_device().capability >= tuple(map(int, capability.split(".")))


@functools.cache
def compile_for_absent_gpus() -> None:
    """Let jax check the target GPU: without a local GPU it refuses large heads and MLA."""
    fused.check_compute_capability = has_capability


def refuses(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands, device: Device) -> str:
    """Why cuDNN cannot run this call; empty if it can."""
    if reason := refuses_older_gpus(device):
        return reason
    if q_BLHK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {q_BLHK.dtype} is neither bfloat16 nor float16"
    if k_BMGK.dtype != q_BLHK.dtype or v_BMGV.dtype != q_BLHK.dtype:
        return f"dtypes {q_BLHK.dtype}, {k_BMGK.dtype} and {v_BMGV.dtype} differ"
    if reason := refuses_heads(q_BLHK.shape[-1], v_BMGV.shape[-1], device):
        return reason
    if operands.dropout is not None:
        return (
            "attention dropout is not supported: cuDNN draws from a seed that XLA compiles in and "
            "a count of its calls, so steps that are recomputed or resumed would draw others"
        )
    if operands.bias_NH is not None:
        return "relative position bias is not supported"
    if spec.softcap:
        return f"softcap={spec.softcap} is not supported"
    if operands.sinks_H is not None and (reason := refuses_rules()):
        return reason
    lengths = q_BLHK.shape[1], k_BMGK.shape[1]
    if reason := refuses_lengths(*lengths, spec, operands.offset):
        return reason
    if needs_mask(spec, operands):
        return refuses_mask(lengths, q_BLHK.shape[-1], spec, operands, device)
    return ""


def needs_mask(spec: ScoreSpec, operands: Operands) -> bool:
    """Whether the mask is neither causal nor a causal window nor empty, and becomes a bias."""
    both_sides = spec.window > 0 and not spec.causal
    return operands.segments_BL is not None or spec.chunk > 0 or both_sides


def refuses_mask(
    lengths: tuple[int, int], head_dim: int, spec: ScoreSpec, operands: Operands, device: Device
) -> str:
    """Why a bias cannot be the mask: a query that sees no key would get the mean of all values, and
    the bias as its log-sum-exp."""
    major = device.capability[0]
    square = lengths[0] == lengths[1] and isinstance(operands.offset, int) and operands.offset == 0
    if not spec.merged and (not square or operands.key_segments_BM is not None):
        return "documents and chunks need queries that are also the keys, from position 0"
    if major >= BLACKWELL:
        return f"documents and chunks are untested on GPUs of compute capability {major}.x"
    if head_dim > LARGEST_MASKED:
        return f"documents and chunks are untested with head dim {head_dim} > {LARGEST_MASKED}"
    return refuses_rules()


def refuses_rules() -> str:
    """Why jax's rules for forward and backward cannot be called; empty if they are known."""
    names = {*RULE_SETTINGS, *RULE_ARRAYS, "res", "grad_output"}
    rules = (fused._dot_product_attention_fwd_rule, fused._dot_product_attention_bwd_rule)
    unknown = {n for rule in rules for n in inspect.signature(rule).parameters if n not in names}
    if unknown:
        return f"jax {jax.__version__} calls cuDNN with unknown settings {', '.join(unknown)}"
    return ""


def refuses_heads(head_dim: int, value_dim: int, device: Device) -> str:
    """Why the head dims are not supported, by the rules of jax and of NVIDIA's cudnn-frontend."""
    major = device.capability[0]
    if major in (HOPPER, BLACKWELL) and takes_unpadded(head_dim, value_dim):
        return ""
    if value_dim > head_dim:
        return f"head dim {value_dim} of values is more than {head_dim} of keys"
    limit = 256 if major == HOPPER else 128
    if head_dim % 8 or head_dim > limit:
        return f"head dim {head_dim} is not a multiple of 8 up to {limit}"
    return ""


def takes_unpadded(head_dim: int, value_dim: int) -> bool:
    """Whether values with a smaller head dim need no padding."""
    return (head_dim, value_dim) == MLA and cudnn_version() >= MLA_VERSION


def cudnn_version() -> int:
    """The installed version, as jax counts it; without one, as where a CPU plans for GPUs, the
    oldest that pyproject.toml installs."""
    try:
        return fused.check_cudnn_version()
    except RuntimeError:
        return OLDEST_VERSION


def refuses_determinism(device: Device) -> str:
    """Why backward cannot be deterministic on the device; empty if it can.

    XLA asks cuDNN for its deterministic algorithm if the flag for deterministic ops is set.
    """
    if not device.is_cuda or device.capability[0] < BLACKWELL:
        return ""
    version = fused.check_cudnn_version()
    if version >= DETERMINISTIC_VERSION:
        return ""
    return (
        f"cuDNN's deterministic backward on Blackwell GPUs needs version {DETERMINISTIC_VERSION}, "
        f"found {version}"
    )


def refuses_lengths(length: int, keys: int, spec: ScoreSpec, offset) -> str:
    if length % 2 or keys % 2:
        return f"{length} queries and {keys} keys: backward needs even lengths"
    square = length == keys and isinstance(offset, int) and offset == 0
    if spec.causal and not square and not is_band(length, keys, spec, offset):
        return "causal attention needs queries and keys of one length, from position 0"
    return ""


def is_band(length: int, keys: int, spec: ScoreSpec, offset) -> bool:
    """Whether as many queries follow the keys directly, of which they see what a window reaches."""
    follows = length == keys and isinstance(offset, int) and offset == length
    return spec.merged and spec.causal and follows and 0 <= length + 1 - spec.window <= 1


@dataclasses.dataclass(frozen=True)
class Band:
    """A band as causal attention: query i sees keys j >= i + late, the order of both is reversed.

    late: 0 or 1. The last `late` queries see nothing, and are the first ones here.
    """

    late: int

    def queries(self, x: jax.Array) -> jax.Array:
        return jnp.roll(x[:, ::-1], -self.late, axis=1)

    def back(self, x: jax.Array, unseen=None) -> jax.Array:
        """The inverse of `queries`; unseen: instead of the values of queries that see nothing."""
        x = jnp.roll(x, self.late, axis=1)[:, ::-1]
        return x if unseen is None or not self.late else x.at[:, -self.late :].set(unseen)

    def call(self, q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands) -> tuple:
        queries, keys = operands.segments_BL, operands.key_segments_BM
        if queries is not None and keys is not None:
            queries, keys = self.queries(queries), keys[:, ::-1]
        spec = dataclasses.replace(spec, window=0)
        operands = operands._replace(offset=0, segments_BL=queries, key_segments_BM=keys)
        return self.queries(q_BLHK), k_BMGK[:, ::-1], v_BMGV[:, ::-1], spec, operands


def band_of(q_BLHK, k_BMGK, spec: ScoreSpec, operands: Operands) -> Band | None:
    lengths = q_BLHK.shape[1], k_BMGK.shape[1]
    if not is_band(*lengths, spec, operands.offset):
        return None
    return Band(lengths[0] + 1 - spec.window)


def block_gradients(call: tuple, out_BLHV, lse_BLH, d_out_BLHV) -> tuple:
    """As ops.attention.call.block_gradients."""
    if band := band_of(*call[:2], *call[3:]):
        lse_BLH = band.queries(lse_BLH).at[:, lse_BLH.shape[1] - band.late :].set(-NEGATIVE)
        results = band.queries(out_BLHV), lse_BLH, band.queries(d_out_BLHV)
        d_q, *d_kv = block_gradients(band.call(*call), *results)
        return band.back(d_q), *(d[:, ::-1] for d in d_kv)
    q_BLHK, k_BMGK, v_BMGV, spec, _ = call
    spec = dataclasses.replace(spec, scale=spec.scale or q_BLHK.shape[-1] ** -0.5)
    bias_B1LM, size = dense_mask(call), v_BMGV.shape[-1]
    values = (padded(x, q_BLHK.shape[-1]) for x in (v_BMGV, out_BLHV, d_out_BLHV))
    v_BMGV, out_BLHV, d_out_BLHV = values
    arrays = q_BLHK, k_BMGK, v_BMGV, bias_B1LM
    d_q, d_k, d_v = gradients_by_rule(spec, arrays, out_BLHV, lse_BLH, d_out_BLHV)
    return d_q, d_k, d_v[..., :size]


def padded(values: jax.Array, head_dim: int) -> jax.Array:
    """Values padded to the head dim of keys, where they need it."""
    padding = head_dim - values.shape[-1]
    if not padding or takes_unpadded(head_dim, values.shape[-1]):
        return values
    return jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, padding)))


def attend(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands):
    """Output [B, L, H, V] and log-sum-exp [B, L, H]; with sinks also that without them."""
    if band := band_of(q_BLHK, k_BMGK, spec, operands):
        out_BLHV, lse_BLH, *_ = attend(*band.call(q_BLHK, k_BMGK, v_BMGV, spec, operands))
        return band.back(out_BLHV), band.back(lse_BLH, NEGATIVE)
    assert operands.dropout is None
    spec = dataclasses.replace(spec, scale=spec.scale or q_BLHK.shape[-1] ** -0.5)
    bias_B1LM = dense_mask((q_BLHK, k_BMGK, v_BMGV, spec, operands))
    sinks_H, size = operands.sinks_H, v_BMGV.shape[-1]
    v_BMGV = padded(v_BMGV, q_BLHK.shape[-1])
    out_BLHV, lse_BHL = fused_attention(spec, q_BLHK, k_BMGK, v_BMGV, bias_B1LM, sinks_H)
    lse_BLH: Any = jnp.swapaxes(lax.stop_gradient(lse_BHL), 1, 2)
    lse_BLH = with_gradient(spec, q_BLHK, k_BMGK, bias_B1LM, lse_BLH)
    if sinks_H is None:
        return out_BLHV[..., :size], lse_BLH
    all_BLH = jnp.logaddexp(lse_BLH, sinks_H.astype(lse_BLH.dtype))
    return out_BLHV[..., :size], all_BLH, lse_BLH


def dense_mask(call: tuple) -> jax.Array | None:
    """The bias of call = (q, k, v, spec, operands): 0 where a query sees a key, else a large
    negative number; None if cuDNN knows the mask. q and k may be shapes."""
    q_BLHK, k_BMGK, _, spec, operands = call
    if operands.mask_B1LM is not None or not needs_mask(spec, operands):
        return operands.mask_B1LM
    queries, keys = operands.segments_BL, operands.key_segments_BM
    keys, places_1L = queries if keys is None else keys, jnp.arange(q_BLHK.shape[1])[None]
    is_visible_BLM = visible(spec, places_1L, jnp.arange(k_BMGK.shape[1]), queries, keys)
    unseen = fused.get_large_negative_number(q_BLHK.dtype)
    return jnp.where(is_visible_BLM, jnp.zeros((), q_BLHK.dtype), unseen)[:, None]


def fused_attention(
    spec: ScoreSpec, q_BLHK, k_BMGK, v_BMGV, bias_B1LM=None, sinks_H=None
) -> tuple[jax.Array, jax.Array]:
    """Output [B, L, H, V], and log-sum-exp [B, H, L] without the sinks, whose cotangent backward
    ignores."""
    if jax.default_backend() != "gpu":
        compile_for_absent_gpus()
    if bias_B1LM is not None or sinks_H is not None:
        return by_rules(spec, q_BLHK, k_BMGK, v_BMGV, bias_B1LM, sinks_H)
    out_and_lse: Any = fused.dot_product_attention(
        q_BLHK,
        k_BMGK,
        v_BMGV,
        scale=spec.scale,
        mask_type=fused.MaskType.CAUSAL if spec.causal else fused.MaskType.NO_MASK,
        sliding_window_length=spec.window or None,
        return_residual=True,
    )
    return out_and_lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_rules(spec: ScoreSpec, q_BLHK, k_BMGK, v_BMGV, bias_B1LM, sinks_H):
    """`fused_attention` by jax's rules for forward and backward.

    The public function computes a gradient of the bias (jax 0.10), and does not let backward take
    an output and a log-sum-exp with sinks.
    """
    return rules_forward(spec, q_BLHK, k_BMGK, v_BMGV, bias_B1LM, sinks_H)[0]


def rules_forward(spec, q_BLHK, k_BMGK, v_BMGV, bias_B1LM, sinks_H):
    arrays = rule_arrays(q_BLHK, k_BMGK, v_BMGV, bias_B1LM)
    settings = rule_settings(spec, bias_B1LM is not None) | {"return_residual": True}
    (out, lse_BHL), _ = call_rule(fused._dot_product_attention_fwd_rule, arrays | settings)
    out, all_BLH = with_sinks(out, jnp.swapaxes(lse_BHL, 1, 2), sinks_H)
    return (out, lse_BHL), ((q_BLHK, k_BMGK, v_BMGV, bias_B1LM), all_BLH, out, sinks_H)


def rules_backward(spec, residuals, cotangents):
    """With weights P = exp(score - lse), dS = P (dO v - dO O), also where O and lse have sinks; the
    gradient of a sink is that of a score whose value is 0."""
    arrays, all_BLH, out_BLHV, sinks_H = residuals
    d_out_BLHV = cotangents[0]
    gradients = gradients_by_rule(spec, arrays, out_BLHV, all_BLH, d_out_BLHV)
    if sinks_H is None:
        return *gradients, None, None
    return *gradients, None, sink_gradient(sinks_H, out_BLHV, all_BLH, d_out_BLHV)


by_rules.defvjp(rules_forward, rules_backward)


def gradients_by_rule(spec: ScoreSpec, call: tuple, out_BLHV, lse_BLH, d_out_BLHV) -> tuple:
    """Gradients of q, k and v of call = (q, k, v, bias or None)."""
    rule, arrays = fused._dot_product_attention_fwd_rule, rule_arrays(*call)
    saved = [arrays[name] for name in inspect.signature(rule).parameters if name in arrays]
    residuals = (*saved, jnp.swapaxes(lse_BLH, 1, 2), out_BLHV)
    settings = rule_settings(spec, call[3] is not None) | {"return_residual": False}
    arguments = {"res": residuals, "grad_output": d_out_BLHV} | settings
    return tuple(call_rule(fused._dot_product_attention_bwd_rule, arguments)[:3])


def rule_arrays(q_BLHK, k_BMGK, v_BMGV, bias_B1LM) -> dict[str, Any]:
    unused = jnp.zeros(0, q_BLHK.dtype)
    arrays = dict.fromkeys(RULE_ARRAYS, unused) | {"score_mod_args": ()}
    arrays |= {"query": q_BLHK, "key": k_BMGK, "value": v_BMGV}
    return arrays | ({} if bias_B1LM is None else {"bias": bias_B1LM})


def rule_settings(spec: ScoreSpec, has_bias: bool) -> dict[str, Any]:
    """Settings of jax's rules. A window beside a bias is in the bias."""
    version = fused.check_cudnn_version()
    return RULE_SETTINGS | {
        "scale": spec.scale,
        "variadic_args": (has_bias, False),  # has a bias, whose gradient is not computed
        "mask_type": fused.MaskType.CAUSAL if spec.causal else fused.MaskType.NO_MASK,
        "sliding_window_length": None if has_bias else spec.window or None,
        "cudnn_version": version,
        "is_training": version,  # the name of the same parameter in backward before jax 0.12
    }


def call_rule(rule, arguments: dict[str, Any]):
    """Call rule by position with those of `arguments` whose names are in its signature."""
    return rule(*[arguments[name] for name in inspect.signature(rule).parameters])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_gradient(spec: ScoreSpec, q_BLHK, k_BMGK, bias_B1LM, lse_BLH) -> jax.Array:
    """The log-sum-exp, differentiable; costs nothing if the result is not used.

    With weights P and cotangent c: dq = scale c (P k) and dk = scale P' (c q): attention with the
    keys as values, and the gradient of its values.
    """
    return lse_BLH


def forward(spec, q_BLHK, k_BMGK, bias_B1LM, lse_BLH):
    return lse_BLH, (q_BLHK, k_BMGK, bias_B1LM)


def backward(spec, residuals, slope_BLH):
    q_BLHK, k_BMGK, bias_B1LM = residuals

    def mean(values):
        return fused_attention(spec, q_BLHK, k_BMGK, values, bias_B1LM)[0]

    mean_BLHK, transpose = jax.vjp(mean, k_BMGK)
    slope_BLH1 = spec.scale * slope_BLH[..., None]
    (dk_BMGK,) = transpose((slope_BLH1 * q_BLHK).astype(q_BLHK.dtype))
    return (slope_BLH1 * mean_BLHK).astype(q_BLHK.dtype), dk_BMGK, None, None


with_gradient.defvjp(forward, backward)

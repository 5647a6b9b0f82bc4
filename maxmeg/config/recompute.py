"""Which activations are kept for backward, by name; the others are recomputed. No JAX."""

import functools

from maxmeg.config.hints import nearest_few

# Outputs of matrix products: expensive to recompute for their size.
_PRODUCTS = (
    "norm_mean",
    "norm_scale",
    "query",
    "key",
    "value",
    "query_down",  # latents of multi-latent attention
    "kv_down",
    "conv_input_gate",
    "conv_output_gate",
    "conv_value",
    "ssm_gate",  # of Mamba-2 and the delta rule, whose other projections are query, key and value
    "ssm_step",
    "ssm_beta",  # the factor of what the delta rule writes to its state
    "mlp_up",  # also of the expert that all tokens go to
    "mlp_gate",
    "shared_expert_gate",
    "expert_latent",
    "expert_up",
    "expert_gate",
    "context_output",  # of attention in rounds over context, and its log-sum-exp: communication
    "context_lse",
    "context_state",  # before each half of a scan over context
    "mixer_output",  # what a sublayer adds to the residual stream, summed over tensor
)
# Large, or cheap to recompute from those above.
_ATTENTION = (
    "attention_output",
    "attention_weights",  # of short sequences, where XLA computes attention
    "attention_lse",  # log-sum-exp of the scores
    "scan_output",  # of the recurrence of Mamba-2 and of the delta rule
    "query_up",  # what multi-latent attention projects latents to
    "key_up",
    "value_up",
    "dispatched_tokens",  # rows that experts received from other devices
)
NAMES = (*_PRODUCTS, *_ATTENTION)

# The least recomputation first. Norms, activation functions, rotations, gathered sequences and
# parameters have no name and are always recomputed; where copies of tokens go to experts, small
# arrays, never.
POLICIES = {
    "minimal": frozenset(NAMES),
    "selective": frozenset(_PRODUCTS),
    "full": frozenset[str](),
}


OFFLOAD = "offload:"  # before a name: the activation is kept in pinned host memory


@functools.cache
def kept_names(recompute: str) -> frozenset[str]:
    """Return the activations that `model.recompute`, policies or names, keeps."""
    words = (word.removeprefix(OFFLOAD) for word in recompute.split(","))
    return frozenset[str]().union(*(POLICIES.get(word, {word}) for word in words))


@functools.cache
def offloaded_names(recompute: str) -> frozenset[str]:
    """Return those of `kept_names` that are kept in host memory."""
    words = recompute.split(",")
    return kept_names(",".join(word for word in words if word.startswith(OFFLOAD)) or "full")


def offloaded_alone(recompute: str) -> frozenset[str]:
    """Return the activations that `model.recompute` offloads by their own names."""
    words = (word.removeprefix(OFFLOAD) for word in recompute.split(",") if OFFLOAD in word)
    return frozenset(words) & set(NAMES)


def recompute_problems(recompute: str) -> list[str]:
    """Return a message for each word of `model.recompute` that is not a policy or a name."""
    words = (*POLICIES, *NAMES)
    return [
        f"model.recompute={recompute}: {word!r} is neither a policy ({', '.join(POLICIES)}) nor an "
        f"activation that can be kept; nearest are {nearest_few(word, words)}, and activations are "
        f"{', '.join(NAMES)}"
        for word in recompute.split(",")
        if word.removeprefix(OFFLOAD) not in words
    ]

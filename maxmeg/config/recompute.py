"""Which activations backward reads from memory, by name; it computes the others again. No JAX."""

import functools

from maxmeg.config.hints import nearest_few

# Cheap to keep for what it takes to compute them again: outputs of matrix products.
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
    "mlp_up",  # also of the expert that all tokens go to
    "mlp_gate",
    "shared_expert_gate",
    "expert_latent",
    "expert_up",
    "expert_gate",
    "dispatch_order",  # where the router sends each copy of a token: small integers
    "dispatch_counts",
    "dispatch_rounds",
    "mixer_output",  # what a sublayer adds to the residual stream, summed over tensor
)
# Large, or short to compute from what is kept.
_ATTENTION = (
    "attention_output",
    "attention_weights",  # of short sequences, where XLA computes attention
    "attention_lse",  # log-sum-exp of the scores
    "query_up",  # what multi-latent attention projects latents to
    "key_up",
    "value_up",
    "dispatched_tokens",  # rows that experts received from other devices
    "dispatched_weights",
)
NAMES = (*_PRODUCTS, *_ATTENTION)

# The least recomputation first. What is in no policy (norms, activations, rotations, gathered
# sequences and parameters) has no name and is always computed again.
POLICIES = {
    "minimal": frozenset(NAMES),
    "selective": frozenset(_PRODUCTS),
    "full": frozenset[str](),
}


@functools.cache
def kept_names(recompute: str) -> frozenset[str]:
    """Names of the activations that `model.recompute` keeps: the union of its words, each a policy
    or a name."""
    return frozenset[str]().union(*(POLICIES.get(word, {word}) for word in recompute.split(",")))


def recompute_problems(recompute: str) -> list[str]:
    """One message for each word of `model.recompute` that is neither a policy nor a name."""
    known = (*POLICIES, *NAMES)
    return [
        f"model.recompute={recompute}: {word!r} is neither a policy ({', '.join(POLICIES)}) nor an "
        f"activation that can be kept; nearest are {nearest_few(word, known)}, and activations are "
        f"{', '.join(NAMES)}"
        for word in recompute.split(",")
        if word not in known
    ]

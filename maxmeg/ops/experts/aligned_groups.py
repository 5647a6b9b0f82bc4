"""Groups of rows that begin at multiples of a number, for blocks of scales along the rows."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def aligned_sizes(sizes_E: Int[Array, " E"], multiple: int) -> Int[Array, " E"]:
    """The sizes, rounded up to multiples."""
    return (sizes_E.astype(jnp.int32) + (multiple - 1)) // multiple * multiple


def align_groups(
    x_TD: Float[Array, "T D"], sizes_E: Int[Array, " E"], multiple: int
) -> Float[Array, "R D"]:
    """Append zeros to each group of rows up to `aligned_sizes`; zeros after the last group, also in
    place of x's rows there. R: the most rows that groups of any sizes need."""
    (tokens, _), groups = x_TD.shape, sizes_E.shape[0]
    most = (tokens + groups * (multiple - 1)) // multiple * multiple
    padded_E = aligned_sizes(sizes_E, multiple)
    ends_E = jnp.cumsum(padded_E)
    rows_R = jnp.arange(most, dtype=jnp.int32)
    group_R = jnp.searchsorted(ends_E, rows_R, side="right", method="compare_all")
    group_R = jnp.minimum(group_R, groups - 1)
    within_R = rows_R - (ends_E - padded_E)[group_R]
    first_E = jnp.cumsum(sizes_E) - sizes_E
    source_R = jnp.where(within_R < sizes_E[group_R], first_E[group_R] + within_R, tokens)
    return x_TD.at[source_R].get(mode="fill", fill_value=0)

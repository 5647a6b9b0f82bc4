"""The two compiled programs of an engine, and the arrays that stay on the devices.

prefill: reads a chunk of one prompt per replica; after its last chunk it samples the first token.
decode: feeds the last token of every lane, and samples the next one. Both update the cache and the
tokens of each lane in place. In a step the host sends one array (`rows.step_inputs`), and reads
one; biases and grammars are a second array, which is sent only for steps that have any.
"""

import dataclasses
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from maxmeg.config.schema import Config
from maxmeg.inference.load import Trained
from maxmeg.inference.rows import Fields, change_inputs, step_inputs, step_results
from maxmeg.inference.sampling import TOP, Changes, Rows, choose, scores_of
from maxmeg.inference.speculation import Newest, mtp_drafts
from maxmeg.layers.context import Context, Source
from maxmeg.layers.moe import Moe
from maxmeg.models.lm import LM
from maxmeg.ops.cache import CachePlaces, CacheSize
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import BATCH_AXES, MESH_AXES, batch_shards
from maxmeg.parallel.rules import reductions, storage_specs
from maxmeg.parallel.spmd import spmd
from maxmeg.weights.transforms import enter, whole_weights

SCORED = 64  # tokens of a prompt whose logits exist at a time
PER_DEVICE = P(MESH_AXES)  # a leading dimension of one on each device
CPU_CACHE, GPU_CACHE = 2**30, 0.85  # bytes on a CPU; share of the free memory of a GPU


class Read(typing.NamedTuple):
    """What a step returns: arrays [rows, samples], [rows, samples, TOP] for the most likely tokens,
    and for each sample [rows, samples, drafts] what MTP layers propose after the last taken one."""

    tokens: np.ndarray
    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray
    drafts: np.ndarray


class Programs:
    """The programs for a model; `allocate` makes their arrays.

    lanes, pages: numbers of them on one replica; pages=0: as many as lanes and memory allow. slots:
    number of tokens per page. row_pages: largest number of pages that a request can have. chunk:
    number of prompt tokens that one prefill step reads. proposals: number of proposed tokens that
    one decode step checks in each lane; the first MTP layers make them, if the model has any.
    """

    def __init__(
        self,
        trained: Trained,
        lanes: int,
        pages: int,
        slots: int,
        row_pages: int,
        chunk: int,
        proposals: int = 0,
    ) -> None:
        self.mesh, self.row_pages, self.chunk = trained.mesh, row_pages, chunk
        self.before_step: Callable[..., None] = lambda *arrays: None  # gets what `start` gets
        self.leads = False  # whether other processes follow this one (`followers`)
        self.proposals = proposals
        self.drafts = min(proposals, len(trained.model.mtp.depths))
        self.replicas = batch_shards(self.mesh)
        source_pages = row_pages if trained.config.model.has_source else 0
        self.source = source_pages * slots  # most tokens of an encoder-decoder's source
        model = dropless(trained.model)
        self._reductions = reductions(model, self.mesh, trained.config.parallel.zero1)
        dtype = jnp.dtype(trained.config.model.dtype.value)
        self.model = prepared(model, self._reductions, self.mesh, dtype)
        self._specs = jax.tree.map(lambda array: array.sharding.spec, self.model)
        rest = slots, lanes, source_pages
        if not pages:
            one, two = (self._cache_bytes(CacheSize(n, *rest)) for n in (1, 2))
            most = (free_bytes(self.mesh) - (2 * one - two)) // max(two - one, 1)
            pages = max(min(lanes * row_pages, most), 1)
        self.size = CacheSize(pages, *rest)
        sharding = NamedSharding(self.mesh, PER_DEVICE)
        self.state = jax.jit(self._state(self.size), out_shardings=sharding)
        vocab, num_ahead = trained.config.model.vocab_size, max(1, self.drafts)
        sizes = {chunk: (chunk + num_ahead, self.source), 0: (proposals, 0)}
        self.inputs = {n: step_inputs(lanes, row_pages, *size) for n, size in sizes.items()}
        self.change_inputs = change_inputs(vocab)
        self.results = step_results(min(TOP, vocab), self.drafts)
        self.decode_program = self._jitted(self._decode_rows, 1)
        self.prefill_program = self._jitted(self._prefill_rows, 2)

    def allocate(self) -> None:
        self.cache, self.tokens = self.state(self.model)
        self._unchanged = {chunk: self._sent(self.changes({}, chunk)) for chunk in (0, self.chunk)}

    @property
    def has_states(self) -> bool:
        """Whether a mixer keeps a state that does not lie in pages."""
        (groups, mtp_groups), _ = jax.eval_shape(self.state, self.model)
        units = [*groups, *mtp_groups]  # of MTP layers
        mixers = [c for unit in units for sublayer in unit for c in sublayer.values()]
        return any(cache is not None and not isinstance(cache, tuple) for cache in mixers)

    def packed(self, rows: Fields, chunk: int = 0) -> np.ndarray:
        """The values of `rows` as the array that a step takes, laid out by `inputs`."""
        array = self.inputs[chunk].filled(rows, self._count(chunk))
        array["scores"] = array["scores"].max(initial=0)
        return array.view(np.int32).reshape(len(array), -1)

    def changes(self, rows: Fields, chunk: int = 0) -> np.ndarray:
        """The values of `rows` as a step's second array, laid out by `change_inputs`."""
        array = self.change_inputs.filled(rows, self._count(chunk))
        return array.view(np.int32).reshape(len(array), -1)

    def _count(self, chunk: int) -> int:
        """Number of rows of a step."""
        return self.replicas * (1 if chunk else self.size.lanes)

    def decode(self, rows: Fields) -> tuple[jax.Array, ...]:
        """Start a step of lanes; `read` waits for what it returns."""
        return self._run(rows, 0)

    def prefill(self, rows: Fields) -> tuple[jax.Array, ...]:
        """Start to read a chunk of a prompt for replicas. Returns arrays for `read`, of the tokens
        sampled after them, and of the chunk's tokens if any row has "scores"."""
        return self._run(rows, self.chunk)

    def start(
        self, chunk: int, packed: np.ndarray, changes: np.ndarray | None
    ) -> tuple[jax.Array, ...]:
        """Start a step with arrays of `packed` and `changes`, None for one without changes."""
        program = self.prefill_program if chunk else self.decode_program
        second = self._unchanged[chunk] if changes is None else self._sent(changes)
        state = self.cache, self.tokens
        self.cache, self.tokens, *arrays = program(self.model, *state, self._sent(packed), second)
        return tuple(arrays)

    def read(self, array: jax.Array) -> Read:
        return Read(**self.results.parted(np.asarray(array)))

    def compiled(self) -> int:
        """Number of programs compiled so far."""
        return self.decode_program._cache_size() + self.prefill_program._cache_size()

    def _sent(self, array: np.ndarray) -> jax.Array:
        sharding = NamedSharding(self.mesh, P(BATCH_AXES))
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    def _run(self, rows: Fields, chunk: int) -> tuple[jax.Array, ...]:
        changes = any(row.get("is_biased") or row.get("is_masked") for row in rows.values())
        arrays = self.packed(rows, chunk), self.changes(rows, chunk) if changes else None
        self.before_step(chunk, *arrays)
        return self.start(chunk, *arrays)

    def _jitted(self, function: Callable, arrays: int) -> Callable:
        """arrays: number of arrays to read that the function returns, each [rows, ...]."""

        def local(model, cache, tokens, sent, changes):
            model = self._local(model)
            cache, tokens = jax.tree.map(lambda array: array[0], (cache, tokens))
            cache, tokens, *read = function(model, cache, tokens, sent, changes)
            read = [collectives.gather(array, BATCH_AXES, 0) for array in read]
            return *jax.tree.map(lambda array: array[None], (cache, tokens)), *read

        arguments = (self._specs, PER_DEVICE, PER_DEVICE, P(BATCH_AXES), P(BATCH_AXES))
        results = PER_DEVICE, PER_DEVICE, *(P() for _ in range(arrays))
        shardings = tuple(NamedSharding(self.mesh, spec) for spec in results)  # else XLA's choice
        program = spmd(local, self.mesh, arguments, results)
        return jax.jit(program, donate_argnums=(1, 2), out_shardings=shardings)

    def _local(self, model: LM) -> LM:
        """The model in a program, without the dimension that `prepared` adds."""

        def one(array, place):
            return array if place.kv_slice is None else array[0]

        return jax.tree.map(one, model, self._reductions)

    def _state(self, size: CacheSize) -> Callable:
        """The function of the model that makes (empty cache, room for the tokens of each lane)."""
        room = size.lanes, self.row_pages * size.slots

        def local(model):
            model = self._local(model)
            mtp_caches = model.mtp.init_cache(size, self.drafts)
            state = (model.stack.init_cache(size), mtp_caches), jnp.zeros(room, jnp.int32)
            return jax.tree.map(lambda array: array[None], state)

        return spmd(local, self.mesh, (self._specs,), PER_DEVICE)

    def _cache_bytes(self, size: CacheSize) -> int:
        """Bytes of the cache on one device."""
        arrays = jax.tree.leaves(jax.eval_shape(self._state(size), self.model)[0])
        return sum(array.size * array.dtype.itemsize for array in arrays) // self.mesh.size

    def _decode_rows(self, model: LM, caches, tokens_BM, sent, changes):
        fields = self.inputs[0].parted(sent) | self.change_inputs.parted(changes)
        proposed_BK = fields["tokens"]
        source = source_of(fields) if self.source else None
        lanes_B, starts_B = fields["lane"], fields["start"]
        last_B = tokens_BM[jnp.arange(len(tokens_BM)), starts_B]
        first_B = jnp.where(fields["token"] < 0, last_B, fields["token"])
        ids_BL = jnp.concatenate([first_B[:, None], proposed_BK], axis=1)
        tokens_BM = with_tokens(tokens_BM, ids_BL, fields)
        ctx = context_of(ids_BL, fields, source)
        h_BLD, cache, _ = model.hidden(ids_BL, ctx, caches[0])  # pyright: ignore
        sampled_BLX = self._sampled(model, h_BLD, fields, starts_B + 1, tokens_BM)
        next_BL = sampled_BLX[..., 0]
        if not self.proposals:  # else the host tells which tokens were taken
            tokens_BM = tokens_BM.at[lanes_B, starts_B + 1].set(next_BL[:, 0], mode="drop")
        is_proposed_BK = jnp.arange(self.proposals) < fields["count"][:, None] - 1
        is_taken_BK = is_proposed_BK & (next_BL[:, :-1] == proposed_BK)
        num_taken_B = jnp.cumprod(is_taken_BK, axis=1).sum(axis=1)
        newest = Newest(next_BL, num_taken_B, fields["step"] + num_taken_B)
        sampled_BLX, drafts = self._drafted(model, h_BLD, sampled_BLX, newest, fields, ctx, caches)
        return (cache, drafts), tokens_BM, sampled_BLX

    def _prefill_rows(self, model: LM, caches, tokens_BM, sent, changes):
        fields = self.inputs[self.chunk].parted(sent) | self.change_inputs.parted(changes)
        ids_PX = fields["tokens"]
        source = source_of(fields) if self.source else None
        ids_PC, later_PX = ids_PX[:, : self.chunk], ids_PX[:, 1:]
        tokens_BM = with_tokens(tokens_BM, ids_PC, fields)
        ctx = context_of(ids_PC, fields, source)
        h_PCD, cache, _ = model.hidden(ids_PC, ctx, caches[0])  # pyright: ignore
        final_P = jnp.maximum(fields["count"] - 1, 0)
        h_P1D = jnp.take_along_axis(h_PCD, final_P[:, None, None], axis=1)
        lanes_P, ends_P = fields["lane"], fields["start"] + fields["count"]
        sampled_P1X = self._sampled(model, h_P1D, fields, ends_P, tokens_BM[lanes_P])
        is_last_P, first_P = fields["is_last"] > 0, sampled_P1X[:, 0, 0]
        lanes_P = jnp.where(is_last_P, lanes_P, self.size.lanes)
        tokens_BM = tokens_BM.at[lanes_P, ends_P].set(first_P, mode="drop")
        scores = self._scored(model, h_PCD, later_PX[:, : self.chunk], fields["scores"])
        places_P = jnp.where(is_last_P, final_P, later_PX.shape[1] + self.drafts)
        later_PX = later_PX.at[jnp.arange(len(final_P)), places_P].set(first_P, mode="drop")
        newest = Newest(later_PX, places_P, fields["step"])
        sampled_P1X, drafts = self._drafted(model, h_PCD, sampled_P1X, newest, fields, ctx, caches)
        return (cache, drafts), tokens_BM, sampled_P1X, scores

    def _sampled(
        self, model: LM, h_BLD: jax.Array, fields: dict, lengths_B, tokens_BM
    ) -> Int[Array, "B L X"]:
        """`results` of a token sampled after each token. lengths_B: of the row's tokens up to the
        first of them."""
        B, L, _ = h_BLD.shape
        rows = Rows(*(jnp.repeat(array, L) for array in rows_of(fields)))
        rows = rows._replace(steps_B=rows.steps_B + jnp.tile(jnp.arange(L), B))
        changes = Changes(
            fields["penalises"],
            fields["repetition"],
            fields["frequency"],
            fields["presence"],
            tokens_BM,
            lengths_B,
            fields["prompt_length"],
            fields["is_biased"],
            fields["biased"],
            fields["biases"],
            fields["is_masked"],
            fields["allowed"],
        )
        logits_RV = model.logits(h_BLD).reshape(B * L, -1)
        chosen = self.results.joined(*choose(logits_RV, rows, changes, fields["wants_top"] > 0))
        return chosen.reshape(B, L, -1)

    def _scored(self, model: LM, h_PCD: jax.Array, next_PC: jax.Array, requests_P: jax.Array):
        """`results` of the tokens after those of a chunk; zeros if no row asks for them."""
        P, C, D = h_PCD.shape
        block = math.gcd(C, SCORED)

        def score(values):
            h_PbD, ids_Pb = values
            return self.results.joined(ids_Pb, *scores_of(model.logits(h_PbD), ids_Pb))

        def blocks():
            h, ids = h_PCD.reshape(P, -1, block, D), next_PC.reshape(P, -1, block)
            scores = lax.map(score, (jnp.moveaxis(h, 1, 0), jnp.moveaxis(ids, 1, 0)))
            return jnp.moveaxis(scores, 0, 1).reshape(P, C, -1)

        shape = jax.eval_shape(blocks)
        return lax.cond((requests_P > 0).any(), blocks, lambda: jnp.zeros(shape.shape, shape.dtype))

    def _drafted(self, model: LM, h_BLD, sampled_BLX, newest: Newest, fields, ctx, caches):
        """(`sampled_BLX` with what MTP layers propose after the newest tokens, their cache)."""
        if not self.drafts:
            return sampled_BLX, []
        drafts_BK, cache = mtp_drafts(model, h_BLD, newest, rows_of(fields), ctx, caches[1])
        drafts_BLK = jnp.broadcast_to(drafts_BK[:, None], (*sampled_BLX.shape[:2], self.drafts))
        return jnp.concatenate([sampled_BLX, drafts_BLK], axis=-1), cache


def jitted(
    function: Callable, config: Config, mesh: Mesh, model: LM, axes: tuple[str, ...] = ()
) -> Callable:
    """Return the jitted function(model, *arguments) for a model on `mesh`. Weights are cast to the
    compute dtype. axes: the rows of all arguments and of the result are divided among the devices
    along these; every device along the others has all of them."""
    by_parameter, dtype = reductions(model, mesh, config.parallel.zero1), config.model.dtype.value
    transforms = whole_weights(by_parameter, jnp.dtype(dtype))
    specs = jax.tree.map(lambda array: array.sharding.spec, model)

    def local(model, values):
        return function(enter(transforms, model), *values)

    rows = P(axes) if axes else P()
    program = spmd(local, mesh, (specs, rows), rows)
    return jax.jit(lambda model, *values: program(model, values))


def dropless(model: LM) -> LM:
    """The model without capacity of experts: a token must not be dropped for others' sake."""
    model = jax.tree.map(lambda array: array, model)
    units = [*model.stack.groups, *(depth.layer for depth in model.mtp.depths)]
    for mixer in (m for unit in units for one in unit.sublayers for m in one.mixers.values()):
        if isinstance(mixer, Moe):
            spec = dataclasses.replace(mixer.spec, capacity=0.0, pad=False)
            mixer.spec = mixer.experts.spec = spec
    return model


def free_bytes(mesh: Mesh) -> int:
    """Of a device's memory, for the cache: the least of all devices of the mesh."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    if not all("bytes_limit" in each for each in stats):
        return CPU_CACHE
    free = min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    if mesh.is_multi_process:
        free = multihost_utils.process_allgather(np.float32(free)).min()
    return int(GPU_CACHE * free)


def prepared(model: LM, reductions_of_model, mesh: Mesh, dtype) -> LM:
    """The model with weights in the compute dtype, without the cuts of ZeRO-1, and with each
    device's key/value head where there are fewer than devices along tensor (these have a leading
    dimension of one). Other arrays are not copied.
    """
    leaves, tree = jax.tree.flatten(model)
    ways, storage = map(jax.tree.leaves, (reductions_of_model, storage_specs(model, mesh, False)))
    numbers = [
        i
        for i, (array, way) in enumerate(zip(leaves, ways, strict=True))
        if way.kv_slice or way.cut or not (way.exact or array.dtype == dtype)
    ]
    if not numbers:
        return model
    transforms = whole_weights([ways[i] for i in numbers], dtype)
    sliced = [ways[i].kv_slice is not None for i in numbers]
    specs = tuple(leaves[i].sharding.spec for i in numbers)

    def local(*arrays):
        weights = enter(transforms, list(arrays))
        return [array[None] if cut else array for array, cut in zip(weights, sliced, strict=True)]

    outputs = [PER_DEVICE if ways[i].kv_slice else storage[i] for i in numbers]
    program = spmd(local, mesh, specs, outputs)
    for i, array in zip(numbers, jax.jit(program)(*(leaves[i] for i in numbers)), strict=True):
        leaves[i] = array
    return jax.tree.unflatten(tree, leaves)


def source_of(fields: dict) -> Source:
    """The tokens of sources, before their padding; none (S = 0) once they have been read."""
    ids_BS = fields["source_tokens"]
    is_token_BS = jnp.arange(ids_BS.shape[1]) < fields["source"][:, None]
    return Source.of(ids_BS, is_token_BS.astype(jnp.int32))


def context_of(ids_BL: Int[Array, "B L"], fields: dict, source: Source | None) -> Context:
    """Of tokens that follow cached ones."""
    starts_B = fields["start"]
    places = fields["pages"], starts_B, fields["count"], fields["lane"]
    return Context(
        starts_B[:, None] + jnp.arange(ids_BL.shape[1]),
        source=source,
        cache_places=CachePlaces(*places, sources_B=fields["source"]),
        adapters_B=fields["adapter"],
        row_lengths_B=fields["row_length"],
        sequence_sharded=False,
    )


def rows_of(fields: dict) -> Rows:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "number", "step")
    return Rows(*(fields[name] for name in names))


def with_tokens(tokens_BM: Int[Array, "B M"], ids_RL: Int[Array, "R L"], fields: dict):
    """The tokens of lanes with those of rows, from their starts on."""
    places_L = jnp.arange(ids_RL.shape[1])
    places_RL = fields["start"][:, None] + places_L
    places_RL = jnp.where(places_L < fields["count"][:, None], places_RL, tokens_BM.shape[1])
    return tokens_BM.at[fields["lane"][:, None], places_RL].set(ids_RL, mode="drop")

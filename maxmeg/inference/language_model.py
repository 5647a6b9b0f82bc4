"""A model with its settings and its tokenizer, as Python programs use it."""

import copy
import dataclasses
import functools
import os
import shutil
import tempfile
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from maxmeg.checkpoint.disk import orders_of, to_tree
from maxmeg.checkpoint.initialize import base_of
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.names import VOCABULARY_TABLES, to_arrays
from maxmeg.config import files, values
from maxmeg.config.files import checkpoint_folder
from maxmeg.config.model import DType
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config
from maxmeg.data import run_folder
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.hf.convert import Report, export_model
from maxmeg.hf.matching import small_files
from maxmeg.hf.trained import CARRIED, carried_folder
from maxmeg.inference.activations import capture
from maxmeg.inference.classification import Text, class_probabilities, logits
from maxmeg.inference.embeddings import Embedder, Pooling, embedders
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import Trained, cast
from maxmeg.inference.mesh import local_mesh
from maxmeg.inference.programs import jitted
from maxmeg.inference.prompts import encoded
from maxmeg.inference.requests import Request, check_alone, check_ids
from maxmeg.inference.sampling import Sampling
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM, language_model
from maxmeg.parallel.mesh import sizes_of
from maxmeg.parallel.rules import storage_specs
from maxmeg.parallel.trainable import trained
from maxmeg.planning.cost.parameters import num_parameters

Messages = Sequence[Mapping[str, typing.Any]]  # [{"role": "user", "content": ...}, ...]
Prompt = str | Messages


class LanguageModel:
    """A model with its settings and its tokenizer: what maxmeg.load and maxmeg.train return.

    LanguageModel(model, config) is one for a model that was trained by hand. model: a pytree of
    arrays. config: a copy, with the layout of `mesh` in config.parallel. step: number of training
    steps. ValueError where the model's arrays are not those that config.model describes.
    """

    def __init__(
        self,
        model: LM,
        config: Config,
        tokenizer: Tokenizer | None = None,
        step: int = 0,
        mesh: Mesh | None = None,
        metadata: dict[str, typing.Any] | None = None,
    ) -> None:
        """tokenizer: default that of config.data.tokenizer. mesh: default one device. metadata: of
        the checkpoint that the model is from."""
        mesh = local_mesh() if mesh is None else mesh
        config = copy.deepcopy(config)
        sizes: dict[str, typing.Any] = {**sizes_of(mesh)}
        config.parallel = ParallelConfig(**sizes, zero1=False)
        tokenizer = tokenizer or load_tokenizer(config.data.tokenizer)
        self.trained = Trained(placed(model, mesh), config, tokenizer, step, mesh, metadata or {})
        self._captures: dict[tuple[str, ...], Callable] = {}

    @classmethod
    def of(cls, trained: Trained) -> "LanguageModel":
        rest = (trained.tokenizer, trained.step, trained.mesh, trained.metadata)
        model = cls(trained.model, trained.config, *rest)
        model.trained = dataclasses.replace(model.trained, longrope=trained.longrope)
        return model

    @property
    def model(self) -> LM:
        """The pytree of weights: in the compute dtype if loaded without `master_weights`, else as
        they were given. LoRA's frozen base is always in the compute dtype."""
        return self.trained.model

    @property
    def config(self) -> Config:
        return self.trained.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self.trained.tokenizer

    def __repr__(self) -> str:
        arrays, devices = to_arrays(self.model), self.trained.mesh.size
        count = num_parameters(self.config.model)[0]
        count += sum(array.size for name, array in arrays.items() if "lora" in name.split("."))
        where = f"{self.config.run_dir}, step {self.trained.step}"
        place = f"{devices} device{'s' * (devices > 1)}"
        return f"LanguageModel({where}, {count:,} parameters on {place})"

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return the token ids of a chat, or of a text with special tokens (`prompt_tokens`)."""
        record = {"prompt" if isinstance(prompt, str) else "messages": prompt}
        return encoded(self.tokenizer, self.config, [record])[0]

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Return the continuation of a text, the answer to a chat, or what an encoder-decoder
        writes for a source.

        temperature: 0 always takes the most likely token. top_k: sample from the k most likely
        tokens (0: all); top_p: from the most likely ones with this total probability. A text ends
        before an end-of-text token. ValueError for a prompt that exceeds the context.
        """
        request = self.request(max_new_tokens, Sampling(temperature, top_k, top_p))
        return self.generate_batch([prompt], request, seed)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], request: Request, seed: int = 0
    ) -> list[str]:
        """Return what `generate` returns, for each of several texts or chats."""
        replies = self.engine.generate([*map(self.encode, prompts)], request, seed)
        return [reply.text for reply in replies]

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[str]:
        """Yield the text that `generate` returns in pieces, as soon as they are known."""
        request = self.request(max_new_tokens, Sampling(temperature, top_k, top_p))
        return self.engine.stream(self.encode(prompt), request, seed)

    @functools.cached_property
    def engine(self) -> Engine:
        """What generates text. It has a copy of master weights in the compute dtype."""
        return Engine(self.trained)

    def request(self, max_new_tokens: int, sampling: Sampling) -> Request:
        """Return what to generate, up to one of the model's end tokens."""
        return Request(max_new_tokens, sampling, self.engine.ends)

    def logits(self, prompt: Prompt | np.ndarray) -> Float[Array, "L V"]:
        """Return the float32 logits of each next token, for a prompt or an array of token ids.

        Row i belongs to the token after prompt token i (`encode`). Compiled once per length.
        """
        return self._forward(self.model, self._row(prompt))[0]

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        pooling: Pooling | None = None,
        truncate: bool = False,
        queries: bool = False,
    ) -> Float[np.ndarray, "N D"]:
        """Return a vector of length 1 for each text, from the hidden states of its tokens: their
        mean, that of the first token, or the pooler's output for that. truncate: cut texts that
        exceed the context, instead of a ValueError. queries: of a biencoder with two encoders, use
        that of queries."""
        return self._embedders[queries](texts, pooling, truncate)

    @functools.cached_property
    def _embedders(self) -> tuple[Embedder, Embedder]:
        return embedders(self.trained)

    def classify(
        self, examples: Sequence[Text | Sequence[Text]], truncate: bool = False
    ) -> list[Float[np.ndarray, "..."]]:
        """Return the probabilities of the classes of each example, in the order of data.labels: a
        text or a pair of texts; a list of words with data.objective=tag; a list of choices, texts
        or pairs of choice and context, with choose. truncate: cut examples that exceed the
        context, instead of a ValueError."""
        return class_probabilities(self.trained, self._class_logits, examples, truncate)

    @functools.cached_property
    def _class_logits(self) -> Callable:
        return jitted(logits, self.config, self.trained.mesh, self.model)

    def activations(
        self, prompt: Prompt | np.ndarray, *patterns: str
    ) -> dict[str, Float[Array, "L ..."]]:
        """Return the activations of a prompt by name: activations(text, "layers.*.mlp").

        inference/activations.py lists the names. Compiled once per length and patterns.
        """
        if patterns not in self._captures:
            self._captures[patterns] = make_capture(self.config, patterns)
        return self._captures[patterns](self._computing, self._row(prompt))

    @functools.cached_property
    def _computing(self) -> LM:
        """The model with its weights in the compute dtype: a copy of master weights."""
        return cast(self.model, self.config.model.dtype)

    @functools.cached_property
    def _forward(self) -> Callable:
        def forward(model: LM, ids_BL: Int[Array, "B L"]) -> Float[Array, "B L V"]:
            positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1]), ids_BL.shape)
            ctx = Context(positions_BL, sequence_sharded=False)
            return model.logits(model.hidden(ids_BL, ctx)[0])

        return jitted(forward, self.config, self.trained.mesh, self.model)

    def _row(self, prompt: Prompt | np.ndarray) -> Int[Array, "1 L"]:
        ids = prompt if isinstance(prompt, np.ndarray) else self.encode(prompt)
        if ids.ndim != 1 or not ids.size:
            raise ValueError(f"the prompt has shape {ids.shape}: give at least one token, in a row")
        check_alone(self.config.model)
        check_ids(ids, self.config.model.vocab_size, tokenizer=self.tokenizer)
        return jnp.asarray(ids[None], jnp.int32)

    def save(self, folder: str | os.PathLike) -> None:
        """Write a run folder that generate, evaluate, convert and maxmeg.load read.

        It holds the model, and no state of an optimizer: training begins from it with
        --config=finetune:FOLDER, or checkpoint.init_from. LoRA adapters are saved
        without their frozen base. ValueError for a folder that is not empty, and for a model with
        arrays that the settings do not describe or weights that are not float32.
        """
        check_unrounded(self.model)
        self._save(folder)

    def _save(self, folder: str | os.PathLike) -> None:
        target = Path(folder).absolute()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{target} exists and is not empty: choose another folder")
        check_described(self.model, self.config)
        config, metadata = copy.deepcopy(self.config), self.trained.metadata
        carried = carried_folder(config.run_dir, config)
        config.run_dir, config.checkpoint.dir = str(target), ""
        metadata = {"consumed_samples": 0, "base": base_of(config)} | metadata
        metadata["config"] = files.to_dict(run_folder.stored(config))
        metadata["tokenizer"] = self.tokenizer.identity
        state = {"model": jax.tree.map(lambda leaf: leaf.astype(jnp.float32), self.model)}
        checkpointer = Checkpointer(checkpoint_folder(config), asynchronous=False)
        checkpointer.save(self.trained.step, to_tree(state), metadata, orders_of(state))
        checkpointer.check()
        run_folder.write(config)
        if carried.is_dir():
            (target / CARRIED).mkdir()
        for path in small_files(carried):
            shutil.copyfile(path, target / CARRIED / path.name)

    def to_huggingface(self, folder: str | os.PathLike, dtype: str = "bfloat16") -> Report:
        """Write a folder that transformers' from_pretrained loads, with LoRA adapters merged.

        dtype: of the weights, bfloat16 or float32. The model is saved beside the folder meanwhile.
        ValueError for float32 if the model's weights are not.
        """
        chosen = values.convert("dtype", dtype, DType)
        if chosen is DType.float32:
            check_unrounded(self.model)
        parent = Path(folder).absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent) as temporary:
            run = Path(temporary) / "run"
            self._save(run)
            return export_model(run, folder, chosen)


def make_capture(config: Config, patterns: tuple[str, ...]) -> Callable:
    """Return the jitted (model, ids [1, L]) -> activations [L, ...] by name."""

    def forward(model: LM, ids_1L: Int[Array, "1 L"]) -> dict[str, jax.Array]:
        captured = capture(model, config.model, ids_1L, patterns)
        return {name: x[0] for name, x in captured.items()}

    return jax.jit(forward)


def placed(model: LM, mesh: Mesh) -> LM:
    """Return the model with every array in its sharding on `mesh`."""
    specs = storage_specs(model, mesh, zero1=False)

    def place(array: jax.Array, spec) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, spec))

    return jax.tree.map(place, model, specs)


def check_unrounded(model: LM) -> None:
    """ValueError for weights that are not float32, the dtype of a run's checkpoints."""
    dtypes = {str(array.dtype) for array in jax.tree.leaves(trained(model))} - {"float32"}
    if dtypes:
        raise ValueError(
            f"the weights are {', '.join(dtypes)}, and float32 is written: load the run with "
            "maxmeg.load(folder, master_weights=True), which keeps the digits of its checkpoint, "
            "or cast the weights"
        )


def check_described(model: LM, config: Config) -> None:
    """ValueError where the arrays of a model are not those that its settings describe."""
    make = functools.partial(language_model, config=config)
    described = to_arrays({"model": jax.eval_shape(make, jax.random.key(0))})
    arrays = to_arrays({"model": model})
    problems = [f"{name} is missing" for name in described.keys() - arrays.keys()]
    problems += [f"{name} is not in config.model" for name in arrays.keys() - described.keys()]
    for name in described.keys() & arrays.keys():
        first = int(name.endswith(VOCABULARY_TABLES))  # the vocabulary's padding may differ
        expected, shape = described[name].shape, arrays[name].shape
        if expected[first:] != shape[first:]:
            problems.append(f"{name} has shape {shape}, config.model {expected}")
    if problems:
        examples = "; ".join(sorted(problems)[:3])
        raise ValueError(
            f"the model is not the one that config.model describes, and a run of it could not be "
            f"loaded: {examples}"
        )

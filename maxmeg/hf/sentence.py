"""Export of biencoders for sentence-transformers: a transformers BERT, and modules that turn its
hidden states into a text's vector."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.config.head import Biencoder, name_in_two
from maxmeg.config.setting import with_fields
from maxmeg.hf.families import read as families
from maxmeg.hf.families.binding import Binding, Place
from maxmeg.hf.folder import MASTER
from maxmeg.hf.formats.safetensors import SafetensorsWriter
from maxmeg.hf.trained import TrainedModel

FAMILIES = {"BertModel": True, "MegatronBertModel": True, "RobertaModel": True}  # with a pooler?
FAMILIES |= {"ModernBertModel": False}
POOLER, PROJECTION = "bert.pooler", "classifier.linear"
ACTIVATIONS = {POOLER: "torch.nn.modules.activation.Tanh"}
IDENTITY = "torch.nn.modules.linear.Identity"
TYPES = "sentence_transformers.models."


class SentenceEncoder:
    """One encoder of a biencoder, with the interface of TrainedModel.

    queries: with two encoders, take that of the queries. A pooler that the class has, and the
    biencoder has not, is written as zeros. ValueError if no class can express the layers.
    """

    def __init__(self, trained: TrainedModel, queries: bool) -> None:
        self.trained, self.config = trained, trained.config
        self.is_separate = trained.model.head.biencoder is Biencoder.separate
        self.queries, self.one = queries, trained.model.one_encoder
        plain = {"head.biencoder": Biencoder.none, "head.projection": 0}
        self.family, problems = "", []
        for family, has_pooler in FAMILIES.items():
            model = with_fields(self.one, plain | {"bert.pooler": has_pooler})
            try:
                families.hf_config(model, family)
            except ValueError as error:
                problems.append(str(error))
                continue
            self.family, self.model = family, model
        if not self.family:
            raise ValueError("\n".join(problems))

    @property
    def adds_pooler(self) -> bool:
        return self.model.bert.pooler and not self.one.bert.pooler

    def bindings(self) -> list[Binding]:
        """Return the bindings of the layers' tensors to arrays of the checkpoint."""
        return [
            dataclasses.replace(
                binding, ours=tuple(p._replace(name=self._saved(p.name)) for p in binding.ours)
            )
            for binding in families.bindings(self.model, self.family)
        ]

    def read(self, place: Place) -> np.ndarray:
        """As TrainedModel.read."""
        if place.name.startswith(POOLER) and self.adds_pooler:
            return np.zeros(families.array_shapes(self.model)[place.name], np.float32)
        return self.trained.read(place._replace(name=self._saved(place.name)))

    def words(self, table: str) -> Iterator[np.ndarray]:
        """As TrainedModel.words."""
        return self.trained.words(self._saved(table))

    def _saved(self, name: str) -> str:
        """The name of an array in the checkpoint."""
        return name_in_two(name, self.queries) if self.is_separate else name

    def write_modules(self, folder: Path) -> None:
        """Write the modules after the layers: first-token pooling, pooler and projection."""
        width = self.one.hidden_size
        pooling = {"word_embedding_dimension": width, "pooling_mode_cls_token": True}
        pooling |= {"pooling_mode_mean_tokens": False, "include_prompt": True}
        parts = [("", "Transformer", None), ("1_Pooling", "Pooling", pooling)]
        names = [POOLER] * self.one.bert.pooler + [PROJECTION] * bool(self.one.head.projection)
        for number, name in enumerate(names, 2):
            path = f"{number}_Dense"
            parts.append((path, "Dense", self._write_dense(folder / path, name)))
        modules = [
            {"idx": number, "name": str(number), "path": path, "type": f"{TYPES}{kind}"}
            for number, (path, kind, _) in enumerate(parts)
        ]
        longest = {"max_seq_length": self.one.max_position - self.one.bert.position_offset}
        files = {"modules.json": modules, "sentence_bert_config.json": longest}
        files |= {f"{path}/config.json": values for path, _, values in parts if values}
        for path, values in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(json.dumps(values, indent=2) + "\n", "utf-8")

    def _write_dense(self, folder: Path, name: str) -> dict:
        """Write a dense module in float32. Returns its config."""
        weight = self.read(Place(f"{name}.weight")).T
        tensors = {"linear.weight": weight}
        if name == POOLER or self.one.head.bias:
            tensors["linear.bias"] = self.read(Place(f"{name}.bias"))
        infos = {key: TensorInfo(MASTER, array.shape) for key, array in tensors.items()}
        with SafetensorsWriter(folder, infos) as writer:
            for key, array in tensors.items():
                writer.write(key, np.ascontiguousarray(array))
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
        activation = ACTIVATIONS.get(name, IDENTITY)
        return {**sizes, "bias": len(tensors) > 1, "activation_function": activation}


def encoders_of(trained: TrainedModel) -> dict[str, SentenceEncoder]:
    """Return the encoders of a biencoder by subfolder of the export; empty for other models."""
    kind = trained.model.head.biencoder
    if kind is Biencoder.none:
        return {}
    if kind is Biencoder.shared:
        return {"": SentenceEncoder(trained, queries=False)}
    return {name: SentenceEncoder(trained, name == "query") for name in ("query", "text")}

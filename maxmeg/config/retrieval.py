"""Rules of biencoders, and of the objectives that train them. No JAX."""

from collections.abc import Iterator

from maxmeg.config.data import Objective, Packing
from maxmeg.config.head import Biencoder
from maxmeg.config.schema import Config

SMALLEST = 8  # tokens of a text beside a query, at least


def problems(config: Config) -> Iterator[str]:
    """Yield the broken rules between the objective and the model's text vectors."""
    data, train, biencoder = config.data, config.train, config.model.head.biencoder
    name, is_retrieval = data.objective.value, data.objective.is_retrieval
    able = ", ".join(o.value for o in Objective if o.is_retrieval)
    if is_retrieval != (biencoder is not Biencoder.none):
        if is_retrieval:
            yield (
                f"data.objective={name} needs a biencoder: set model.head.biencoder=shared, as "
                "--config=retrieval does"
            )
        else:
            yield (
                f"model.head.biencoder={biencoder.name} replaces the vocabulary's logits, which "
                f"data.objective={name} needs: choose {able}, or set biencoder=none"
            )
    is_separate = biencoder is Biencoder.separate
    if is_retrieval and data.separate_queries != is_separate:
        yield (
            f"data.separate_queries={str(data.separate_queries).lower()} does not go with "
            f"model.head.biencoder={biencoder.name}: set it to {str(is_separate).lower()}"
        )
    if train.score_scaling and not is_retrieval:
        yield f"train.score_scaling=true is for data.objective={able}: leave it out"
    if not is_retrieval:
        return
    if data.text_tokens < SMALLEST:
        yield (
            f"data.sequence_length={data.sequence_length} with data.query_length="
            f"{data.query_length} and {1 + data.negatives} texts a query leaves {data.text_tokens} "
            f"tokens for each, of at least {SMALLEST}: raise sequence_length"
        )
    if data.objective is Objective.retrieve and not (data.paths or data.train_paths):
        yield "data.objective=retrieve needs pairs of texts: set data.paths=FILE.jsonl"
    if data.objective is Objective.retrieve and data.blend:
        yield "data.blend is not for data.objective=retrieve: leave it out"
    if data.objective is Objective.retrieve and data.packing is not Packing.none:
        yield f"data.packing={data.packing.value} is not for data.objective=retrieve: leave it out"
    for field in ("z_loss", "label_smoothing"):
        if value := getattr(train, field):
            yield f"train.{field}={value} is not for data.objective={name}: set it to 0"

"""Rules of the settings of the data, apart from the model and the mesh."""

from collections.abc import Iterator

from maxmeg.config.data import Builtin, DataConfig, DataOrder, Objective, Packing
from maxmeg.config.values import text


def untrained_problems(data: DataConfig) -> Iterator[str]:
    """The rule for runs that compute a loss."""
    if not data.objective.is_trained:
        yield (
            f"data.objective={data.objective.value} cannot be trained yet: `maxmeg preprocess "
            "inspect --config=NAME` shows what a run would read"
        )


def objective_problems(data: DataConfig) -> Iterator[str]:
    """Rules between the objective and the other settings of the data."""
    objective, name = data.objective, data.objective.value
    is_chat = objective in (Objective.sft, Objective.preferences)
    is_image_text = objective is Objective.image_text
    sentences = (Objective.masked, Objective.span_corruption, Objective.ict)
    is_masked = objective in sentences
    is_pairs = objective in (Objective.seq2seq, Objective.retro)
    is_packed = data.packing is not Packing.none
    is_labelled = objective.is_labelled or objective is Objective.retrieve
    is_whole = is_image_text or is_chat or is_masked or is_packed or is_pairs or is_labelled
    if is_chat and data.blend:
        yield (
            "data.blend is for .bin/.idx files: name chats by data.paths with data.objective="
            f"{name}"
        )
    if is_chat and not (data.paths or data.train_paths):
        yield f"data.objective={name} needs chats: set data.paths=FILE.jsonl"
    if is_image_text and not data.names_corpus:
        yield (
            "data.objective=image_text needs images with texts: set data.paths=PREFIX of `maxmeg "
            "preprocess image-text`"
        )
    if len(data.image_size) != 2 or min(data.image_size) < 1:
        yield f"data.image_size={text(data.image_size)} must be HEIGHT,WIDTH in pixels, both >= 1"
    is_alone = is_masked or is_pairs or is_image_text or objective is Objective.preferences
    if is_alone and is_packed:
        yield f"data.packing={data.packing.value} is not for data.objective={name}: leave it out"
    if (is_masked or not objective.is_trained) and data.order is not DataOrder.megatron:
        yield f"data.order={data.order.value} is not for data.objective={name}: set order=megatron"
    if is_masked and not (data.names_corpus or data.builtin is Builtin.sentences):
        source = "of `maxmeg preprocess --split_sentences`, or data.builtin=sentences"
        yield f"data.objective={name} needs a corpus of sentences: set data.paths=PREFIX {source}"
    if objective is Objective.seq2seq and (data.blend or not (data.paths or data.train_paths)):
        yield "data.objective=seq2seq needs aligned corpora: set data.paths=SOURCE,TARGET"
    if data.blend_changes and is_whole:
        yield (
            "data.blend_changes is for blends of .bin/.idx files with data.objective=gpt and "
            "packing=none: leave it out"
        )
    if data.mock and (is_whole or data.blend_changes):
        yield "data.mock=True is for data.objective=gpt, without packing and blend_changes"
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if is_whole and getattr(data, name):
            yield (
                f"data.{name}=True is for samples that are cut through documents (data.objective="
                "gpt, packing=none); all others keep documents apart: leave it out"
            )


def fim_problems(data: DataConfig):
    if data.fim_rate and len(data.fim_tokens) != 4:
        yield (
            f"data.fim_rate={data.fim_rate} needs data.fim_tokens, not {data.fim_tokens}: name "
            "prefix, middle, suffix and padding, as <fim_prefix>,<fim_middle>,<fim_suffix>,"
            "<fim_pad>"
        )
    if data.fim_rate and (data.objective is not Objective.gpt or data.packing is not Packing.none):
        yield (
            f"data.fim_rate={data.fim_rate} is for samples that are cut through documents "
            "(data.objective=gpt, packing=none): leave it out"
        )

"""Which models can be initialized with the weights of a saved model. No JAX."""

from maxmeg.config.head import OUTPUT_FIELDS, Biencoder
from maxmeg.config.layers import layer_text
from maxmeg.config.mixers import MoeConfig
from maxmeg.config.model import ModelConfig, Position
from maxmeg.config.setting import get, walk, with_fields

# Fields that change how a model trains or runs, but not the function that it computes.
FREE = {path for path, _, field in walk(ModelConfig()) if field.metadata["effect"] == "none"}
# Fields that may change, because training adapts to them: longer context, more words.
ADAPTED = {path for path, _, field in walk(ModelConfig()) if field.metadata["effect"] == "adapted"}


def changes(saved: ModelConfig, new: ModelConfig, folder: str) -> list[str]:
    """Return the changes, "rotary.factor 1.0 -> 8.0"; ValueError if training cannot adapt."""
    grown = []
    if begins_twice(saved, new):
        new = new.one_encoder  # both encoders begin with the saved one's weights
    if new.head.replaces_output:  # a new head for the layers
        if saved.head != new.head:
            grown = ["vectors of texts"]
        if new.head.num_classes and saved.head != new.head:
            grown = [f"a new classifier of {new.head.num_classes} classes"]
        names = ("tied", "bert.pooler", *OUTPUT_FIELDS)
        saved = with_fields(saved, {"head": new.head, **{n: get(new, n) for n in names}})
    if new.has("moe") and not saved.has("moe"):
        if min(saved.mtp.num_layers, new.mtp.num_layers):
            raise ValueError(
                f"checkpoint.init_from={folder} is dense, and MTP layers get no experts from it: "
                f"set model.mtp.num_layers=0 (it is {new.mtp.num_layers})"
            )
        copied, new = upcycled(saved, new, folder)
        grown += copied
    if saved.num_layers == new.num_layers and (text := first_difference(saved, new)):
        raise ValueError(f"checkpoint.init_from={folder} is another model: {text}")
    before = {path: value for path, value, _ in walk(saved)} | {"layers": new.layers}
    texts = {
        path: f"{getattr(before[path], 'name', before[path])} -> {getattr(value, 'name', value)}"
        for path, value, _ in walk(new)
        if path not in FREE and before[path] != value
    }
    able = ADAPTED - ({"max_position"} if new.position is Position.learned else set())
    fixed = [path for path in texts if path not in able]
    if fixed:
        raise ValueError(
            f"checkpoint.init_from={folder} is another model: "
            + ", ".join(f"{path} {texts[path]}" for path in fixed)
            + "; take its own architecture (--config=finetune:FOLDER), or only change "
            "the vocabulary, mtp.num_layers and what positions and windows depend on"
        )
    if new.vocab_size < saved.vocab_size:
        raise ValueError(
            f"model.vocab_size={new.vocab_size} is less than the {saved.vocab_size} of "
            f"checkpoint.init_from={folder}: words can be added, not taken away"
        )
    return [*grown, *(f"{path} {text}" for path, text in texts.items())]


def begins_twice(saved: ModelConfig, new: ModelConfig) -> bool:
    """Whether both encoders of a biencoder start from the weights of a single encoder."""
    kinds = saved.head.biencoder, new.head.biencoder
    return Biencoder.separate is kinds[1] is not kinds[0]


def upcycled(saved: ModelConfig, new: ModelConfig, folder: str) -> tuple[list[str], ModelConfig]:
    """Return what a dense model becomes, as text, and `new` without experts.

    ValueError where experts cannot be cut from the dense model's MLP.
    """
    moe = new.moe
    slices, left = divmod(saved.ffn, new.expert_ffn)
    experts, chosen, of_group = moe.num_experts, moe.top_k, moe.num_experts // moe.num_groups
    if left or any(number % max(slices, 1) for number in (experts, chosen, of_group)):
        raise ValueError(
            f"checkpoint.init_from={folder} is dense, and its MLP of width {saved.ffn} cannot "
            f"become moe.num_experts={experts} of width {new.expert_ffn}, top_k={chosen} and "
            f"num_groups={moe.num_groups}: an expert's width must divide the MLP's, and that many "
            "times make the numbers of experts (also of a group) and of those chosen"
        )
    unable = [
        f"model.moe.{name}={getattr(moe, name)}"
        for name in ("shared_ffn_size", "latent_size")
        if getattr(moe, name)
    ]
    if unable:
        raise ValueError(
            f"checkpoint.init_from={folder} is dense and has no weights for {', '.join(unable)}: "
            "leave them out; only routed experts can begin as copies of an MLP"
        )
    copies = experts // slices
    layers = new.layers.replace("moe", "mlp")
    text = f"moe in model.layers: {copies} cop{'ies' if copies > 1 else 'y'} of each MLP, "
    text += f"each cut into {slices} experts" if slices > 1 else "one per expert"
    return [text], with_fields(new, {"moe": MoeConfig(), "layers": layers})


def first_difference(saved: ModelConfig, new: ModelConfig) -> str:
    """Describe the first layer in which two models differ, or ""; one may have more layers."""
    pairs = zip(saved.layer_kinds, new.layer_kinds, strict=False)
    for number, (before, now) in enumerate(pairs):
        if before != now:
            return (
                f"layer {number} is {layer_text(now)} in model.layers={new.layers!r}, and "
                f"{layer_text(before)} there ({saved.layers!r})"
            )
    return ""

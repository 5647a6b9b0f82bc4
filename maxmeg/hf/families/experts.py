"""Keys of config.json that describe the experts and the router of mixture-of-experts layers."""

import dataclasses
import typing

from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import ModelConfig
from maxmeg.config.setting import get
from maxmeg.hf.families.keys import Fields, Json, Key, Keys, Part, checked, refused


@dataclasses.dataclass(frozen=True)
class Flag(Part):
    """A boolean key, and the field's value for each of its values."""

    name: str
    field: str
    default: bool
    values: tuple[typing.Any, typing.Any]  # for false, for true

    def read(self, keys: Keys, fields: Fields) -> None:
        fields[self.field] = self.values[keys.read(self.name, self.default, bool)]

    def write(self, model: ModelConfig) -> Json:
        return {self.name: get(model, self.field) == self.values[True]}


# The top-k of a softmax over all experts, normalized, are a softmax over the top-k.
NORMALIZED_SOFTMAX = "norm_topk_prob", "moe.softmax_before_topk", False, (True, False)
MTP_LAYERS = Key(
    "num_nextn_predict_layers", "mtp.num_layers", 1, zero=True, aliases=("num_mtp_layers",)
)


@dataclasses.dataclass(frozen=True)
class MtpAttention(Part):
    """The number of MTP layers, which have attention and what the model has as feed-forward layers
    (Qwen)."""

    name: str

    def read(self, keys: Keys, fields: Fields) -> None:
        count = keys.read(self.name, 0, int, zero=True)
        if count > 1:
            raise refused(self.name, count, "one is supported: several would share a projection")
        if count:
            fields["mtp.num_layers"] = count
            fields["mtp.layers"] = attention_and("moe.num_experts" in fields)

    def write(self, model: ModelConfig) -> Json:
        return {self.name: model.mtp.num_layers}


def attention_and(experts: bool) -> str:
    return "attention,moe" if experts else "attention,mlp"


HEAD_NORM = Flag("use_qk_norm", "attention.qk_norm", False, (QkNorm.none, QkNorm.head))


@dataclasses.dataclass(frozen=True)
class Normalized(Part):
    """Whether the weights of the chosen experts are divided by their sum, for sigmoid scores."""

    default: bool = True

    def read(self, keys: Keys, fields: Fields) -> None:
        name = "norm_topk_prob"
        value = keys.read(name, self.default, bool)
        if value and fields["moe.top_k"] == 1:
            remedy = "with num_experts_per_tok=1 every weight would be 1; only false is supported"
            raise refused(name, value, remedy)
        fields["moe.normalize_weights"] = value

    def write(self, model: ModelConfig) -> Json:
        return {"norm_topk_prob": model.moe.normalize_weights and model.moe.top_k > 1}


@dataclasses.dataclass(frozen=True)
class Groups(Part):
    """Group-limited routing: experts are chosen from the best groups, a group's score being the sum
    of its `score_topk` highest scores. groups, topk_groups: default numbers of groups and of best
    groups.
    """

    score_topk: int
    groups: int | None = 1
    topk_groups: int | None = 1

    def read(self, keys: Keys, fields: Fields) -> None:
        count = keys.read("n_group", self.groups, int, null=1)
        topk_groups = keys.read("topk_group", self.topk_groups, int, null=1)
        if count == 1:
            if topk_groups != 1:
                raise refused("topk_group", topk_groups, "with n_group=1 it must be 1")
            return
        fields |= {"moe.num_groups": count, "moe.topk_groups": topk_groups}
        fields["moe.group_score_topk"] = self.score_topk

    def write(self, model: ModelConfig) -> Json:
        return {"n_group": model.moe.num_groups, "topk_group": model.moe.topk_groups}


@dataclasses.dataclass(frozen=True)
class SharedExperts(Part):
    """The number of shared experts, which together are one MLP of that many experts' widths."""

    default: int | None
    name: str = "n_shared_experts"

    def read(self, keys: Keys, fields: Fields) -> None:
        count = keys.read(self.name, self.default, int)
        fields["moe.shared_ffn_size"] = count * fields["moe.ffn_size"]

    def write(self, model: ModelConfig) -> Json:
        count, rest = divmod(model.moe.shared_ffn_size, model.expert_ffn)
        if rest or not count:
            raise ValueError(
                f"model.moe.shared_ffn_size={model.moe.shared_ffn_size} is not a multiple of "
                f"moe.ffn_size={model.expert_ffn}"
            )
        return {self.name: count}


class DenseLayers(Part):
    """Layers with an MLP in place of experts: the listed ones, and all but every n-th layer."""

    def read(self, keys: Keys, fields: Fields) -> None:
        step = keys.read("decoder_sparse_step", 1, int)
        layers = keys.take("mlp_only_layers")
        layers = [] if layers is None else layers
        if not isinstance(layers, list) or not all(type(i) is int and i >= 0 for i in layers):
            raise refused("mlp_only_layers", layers, "it must be a list of layer numbers")
        numbers = range(fields["num_layers"])
        fields["dense"] = {i for i in numbers if i in layers or (i + 1) % step}

    def write(self, model: ModelConfig) -> Json:
        dense = [i for i in range(model.num_layers) if "moe" not in model.mixers(i)]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


@dataclasses.dataclass(frozen=True)
class FirstDense(Part):
    """Number of first layers that have an MLP in place of experts."""

    default: int
    name: str = "first_k_dense_replace"

    def read(self, keys: Keys, fields: Fields) -> None:
        count = keys.read(self.name, self.default, int, zero=True)
        fields["dense"] = {*range(min(count, fields["num_layers"]))}

    def write(self, model: ModelConfig) -> Json:
        moe = [layer for layer in range(model.num_layers) if "moe" in model.mixers(layer)]
        return {self.name: moe[0] if moe else model.num_layers}


class ListedDense(FirstDense):
    """Layers with an MLP in place of experts: listed, or a number of first ones
    (Kimi, GLM-4.7-Flash)."""

    types, kinds = "mlp_layer_types", ("dense", "sparse")

    def read(self, keys: Keys, fields: Fields) -> None:
        super().read(keys, fields)
        types = keys.take(self.types)
        if types is None:
            return
        if not isinstance(types, list) or not all(kind in self.kinds for kind in types):
            raise refused(self.types, types, f"it must be a list of {' and '.join(self.kinds)}")
        fields["dense"] = {i for i, kind in enumerate(types) if kind == self.kinds[0]}

    def write(self, model: ModelConfig) -> Json:
        layers = range(model.num_layers)
        return {self.types: [self.kinds["moe" in model.mixers(i)] for i in layers]}


class MoeLayers(Part):
    """The first and the last layer with experts, and every how many layers have them (ERNIE)."""

    names: tuple[str, ...] = (
        "moe_layer_start_index",
        "moe_layer_end_index",
        "moe_layer_interval",
    )

    def read(self, keys: Keys, fields: Fields) -> None:
        first, last, step = (
            keys.take(n, default) for n, default in zip(self.names, (1, -1, 1), strict=True)
        )
        first, step = (
            checked(self.names[0], first, int, zero=True),
            checked(self.names[2], step, int),
        )
        last = (
            fields["num_layers"] - 1 if last == -1 else checked(self.names[1], last, int, zero=True)
        )
        numbers = range(fields["num_layers"])
        fields["dense"] = {i for i in numbers if (i + 1) % step or not first <= i <= last}

    def write(self, model: ModelConfig) -> Json:
        moe = [layer for layer in range(model.num_layers) if "moe" in model.mixers(layer)]
        if not moe:
            return dict(zip(self.names, (model.num_layers, -1, 1), strict=True))
        step = moe[1] - moe[0] if len(moe) > 1 else moe[0] + 1
        entries = dict(zip(self.names, (moe[0], moe[-1], step), strict=True))
        fields: Fields = {"num_layers": model.num_layers}
        self.read(Keys(entries), fields)
        if {*range(model.num_layers)} - fields["dense"] != {*moe}:
            raise ValueError(f"layers {moe} have experts: {', '.join(self.names)} cannot say it")
        return entries


class ScaledStd(Part):
    """The initial standard deviation; null: 2 / sqrt(5 hidden_size) (Youtu)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        default = 2 / (5 * fields["hidden_size"]) ** 0.5
        fields["init_std"] = keys.read("initializer_range", default, float, True, default)

    def write(self, model: ModelConfig) -> Json:
        return {"initializer_range": model.init_std}


class RoutingMethod(Part):
    """Whether experts are chosen among all, or among those of the best groups (DeepSeek-V2)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        method = keys.take("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise refused("topk_method", method, "it must be greedy or group_limited_greedy")
        if method == "greedy":
            keys.read_names.update(("n_group", "topk_group"))
            return
        Groups(1).read(keys, fields)

    def write(self, model: ModelConfig) -> Json:
        grouped = model.moe.num_groups > 1
        method = "group_limited_greedy" if grouped else "greedy"
        return {"topk_method": method, **Groups(1).write(model)}


class AuxAlpha(Part):
    """DeepSeek's coefficient of the load-balancing loss, per sequence or over all tokens."""

    def read(self, keys: Keys, fields: Fields) -> None:
        alpha = keys.read("aux_loss_alpha", 0.0, float, zero=True)
        by_sequence = keys.read("seq_aux", True, bool)
        fields["moe.sequence_aux_loss" if by_sequence else "moe.aux_loss"] = alpha

    def write(self, model: ModelConfig) -> Json:
        by_sequence = bool(model.moe.sequence_aux_loss or not model.moe.aux_loss)
        alpha = model.moe.sequence_aux_loss if by_sequence else model.moe.aux_loss
        return {"aux_loss_alpha": alpha, "seq_aux": by_sequence}


def num_experts(default: int | None, top_k: int | None, name: str, *aliases: str) -> list[Key]:
    """The keys of the number of experts, which has other names in some files, and of the top-k."""
    return [
        Key(name, "moe.num_experts", default, aliases=aliases),
        Key("num_experts_per_tok", "moe.top_k", top_k),
    ]


@dataclasses.dataclass(frozen=True)
class AuxLoss(Part):
    """The coefficient of the load-balancing loss, which counts where output_router_logits is true.

    transformers balances all layers together, maxmeg each layer by itself.
    """

    default: float = 0.001

    def read(self, keys: Keys, fields: Fields) -> None:
        coefficient = keys.read("router_aux_loss_coef", self.default, float, zero=True)
        is_on = keys.read("output_router_logits", False, bool)
        fields["moe.aux_loss"] = coefficient if is_on else 0.0

    def write(self, model: ModelConfig) -> Json:
        if not (coefficient := model.moe.aux_loss):
            return {"output_router_logits": False}
        return {"output_router_logits": True, "router_aux_loss_coef": coefficient}

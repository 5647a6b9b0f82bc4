"""Keys of config.json that describe experts and their router, as parts (see keys.py)."""

import dataclasses
import typing

from maxmeg.config.model import ModelConfig, QkNorm
from maxmeg.hf.keys import Found, Keys, checked, refused


@dataclasses.dataclass(frozen=True)
class Flag:
    """A key that is true or false, and what the field is then."""

    name: str
    field: str
    default: bool
    values: tuple[typing.Any, typing.Any]  # of false, of true

    def read(self, keys: Keys, found: Found) -> None:
        value = keys.take(self.name, self.default)
        found[self.field] = self.values[checked(self.name, value, bool)]

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        return {self.name: getattr(model, self.field) == self.values[True]}


# Those chosen of a softmax, divided by their sum, are the softmax over them.
NORMALIZED_SOFTMAX = "norm_topk_prob", "router_over_all", False, (True, False)
HEAD_NORM = Flag("use_qk_norm", "qk_norm", False, (QkNorm.none, QkNorm.head))


@dataclasses.dataclass(frozen=True)
class Normalized:
    """Whether the weights of the chosen, each of which has a score by itself, add up to one."""

    default: bool = True

    def read(self, keys: Keys, found: Found) -> None:
        name = "norm_topk_prob"
        value = checked(name, keys.take(name, self.default), bool)
        if value and found["experts_per_token"] == 1:
            remedy = "with num_experts_per_tok=1 every weight would be 1; only false is supported"
            raise refused(name, value, remedy)
        found["router_normalize"] = value

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        return {"norm_topk_prob": model.router_normalize and model.experts_per_token > 1}


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of experts, of which a token's best are kept: as good as their `best` best."""

    best: int
    groups: int | None = 1
    kept: int | None = 1

    def read(self, keys: Keys, found: Found) -> None:
        count, kept = keys.take("n_group", self.groups), keys.take("topk_group", self.kept)
        count = 1 if count is None else checked("n_group", count, int)
        kept = 1 if kept is None else checked("topk_group", kept, int)
        if count == 1:
            if kept != 1:
                raise refused("topk_group", kept, "n_group=1 has one group to keep")
            return
        found |= {"router_groups": count, "router_groups_kept": kept}
        found["router_group_best"] = self.best

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        return {"n_group": model.router_groups, "topk_group": model.router_groups_kept}


@dataclasses.dataclass(frozen=True)
class SharedExperts:
    """Experts that every token goes to, one beside the other: as wide as so many others."""

    default: int

    def read(self, keys: Keys, found: Found) -> None:
        name = "n_shared_experts"
        count = checked(name, keys.take(name, self.default), int)
        found["shared_ffn_size"] = count * found["expert_ffn_size"]

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        count, rest = divmod(model.shared_ffn_size, model.expert_ffn)
        if rest or not count:
            raise ValueError(
                f"model.shared_ffn_size={model.shared_ffn_size} is no multiple of "
                f"expert_ffn_size={model.expert_ffn}"
            )
        return {"n_shared_experts": count}


class DenseLayers:
    """Layers with an MLP in place of experts: those that are named, and all but every n-th."""

    def read(self, keys: Keys, found: Found) -> None:
        step = checked("decoder_sparse_step", keys.take("decoder_sparse_step", 1), int)
        named, count = keys.take("mlp_only_layers"), found["num_layers"]
        named = [] if named is None else named
        if not isinstance(named, list) or not all(type(i) is int and i >= 0 for i in named):
            raise refused("mlp_only_layers", named, "it must be a list of numbers of layers")
        dense = {i for i in range(count) if i in named or (i + 1) % step}
        if dense == {*range(len(dense))}:
            found["first_dense_layers"] = len(dense)
        else:
            found["expert_pattern"] = tuple(int(i not in dense) for i in range(count))

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        dense = [i for i in range(model.num_layers) if not model.has_experts(i)]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


class Methods:
    """How DeepSeek-V2 chooses experts: among all, or among those of the best groups."""

    def read(self, keys: Keys, found: Found) -> None:
        method = keys.take("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise refused("topk_method", method, "it must be greedy or group_limited_greedy")
        if method == "greedy":
            keys.known.update(("n_group", "topk_group"))
            return
        Groups(1).read(keys, found)

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        grouped = model.router_groups > 1
        method = "group_limited_greedy" if grouped else "greedy"
        return {"topk_method": method, **Groups(1).write(model)}


class AuxAlpha:
    """The coefficient of DeepSeek's loss of uneven loads, over sequences or over all tokens."""

    def read(self, keys: Keys, found: Found) -> None:
        alpha = checked("aux_loss_alpha", keys.take("aux_loss_alpha", 0.0), float, zero=True)
        each = checked("seq_aux", keys.take("seq_aux", True), bool)
        found["router_sequence_aux_loss" if each else "router_aux_loss"] = alpha

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        each = model.router_sequence_aux_loss or not model.router_aux_loss
        alpha = model.router_sequence_aux_loss if each else model.router_aux_loss
        return {"aux_loss_alpha": alpha, "seq_aux": bool(each)}


class SwitchedWindow:
    """A switch, and the window of every layer (Qwen 3 with experts)."""

    def read(self, keys: Keys, found: Found) -> None:
        on = checked("use_sliding_window", keys.take("use_sliding_window", False), bool)
        window = keys.take("sliding_window", 4096)
        used = on and window is not None
        found["attention_window"] = checked("sliding_window", window, int) if used else 0

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        window = model.attention_window
        return {"use_sliding_window": bool(window), "sliding_window": window or None}


@dataclasses.dataclass(frozen=True)
class NumExperts:
    """How many experts there are and how many a token goes to; names: in files of different
    years, the first is written."""

    names: tuple[str, ...]
    default: int
    per_token: int | None

    def read(self, keys: Keys, found: Found) -> None:
        given = [(name, keys.take(name)) for name in self.names]
        given = [pair for pair in given if pair[1] is not None] or [(self.names[0], self.default)]
        for name, value in given:
            found["num_experts"] = checked(name, value, int)
            if value != given[0][1]:
                raise refused(name, value, f"{given[0][0]}={given[0][1]} contradicts it: keep one")
        name = "num_experts_per_tok"
        found["experts_per_token"] = checked(name, keys.take(name, self.per_token), int)

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        count, chosen = model.num_experts, model.experts_per_token
        return {self.names[0]: count, "num_experts_per_tok": chosen}


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Layers after the last one that predict further tokens; names: of different years."""

    default: int = 1
    names: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")

    def read(self, keys: Keys, found: Found) -> None:
        given = [(name, keys.take(name)) for name in self.names]
        given = [pair for pair in given if pair[1] is not None] or [(self.names[0], self.default)]
        for name, value in given:
            found["mtp_depths"] = checked(name, value, int, zero=True)

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        return {self.names[0]: model.mtp_depths}


@dataclasses.dataclass(frozen=True)
class AuxLoss:
    """A coefficient, which counts where a switch is on; theirs balances all layers together, ours
    each by itself."""

    default: float = 0.001

    def read(self, keys: Keys, found: Found) -> None:
        name, switch = "router_aux_loss_coef", "output_router_logits"
        coefficient = checked(name, keys.take(name, self.default), float, zero=True)
        on = checked(switch, keys.take(switch, False), bool)
        found["router_aux_loss"] = coefficient if on else 0.0

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        coefficient = model.router_aux_loss
        there = {"router_aux_loss_coef": coefficient} if coefficient else {}
        return {"output_router_logits": bool(coefficient), **there}

"""Hybrid models in Megatron-LM's checkpoints: their patterns, arguments and tensors.

A layer is one mixer with its norm. The projections that Mamba-2 and Gated DeltaNet fuse are stored
apart (`mixer.in_proj.weight.z`): a rank has its own rows of each of them.
"""

import re
import typing
from collections.abc import Iterable

from maxmeg.config.layers import HYBRID, Layer
from maxmeg.config.model import ModelConfig
from maxmeg.hf.families.mamba_tables import mamba, mamba_arrays
from maxmeg.megatron.experts import Arguments

KNOWN = {letter: HYBRID[letter] for letter in "MG*-E"}
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")  # the second is the older name
RATIOS = {"*": "hybrid_attention_ratio", "-": "hybrid_mlp_ratio"}
DELTA = ("query", "key", "value", "gate", "beta", "step")
MODULES = {
    **mamba("mixer"),
    tuple(f"gated_delta.{name}" for name in DELTA): "self_attention.in_proj",
    tuple(f"gated_delta.{name}_conv" for name in DELTA[:3]): "self_attention.conv1d",
    "gated_delta.gated_norm": "self_attention.out_norm",
    "gated_delta.out": "self_attention.out_proj",
}
ARRAYS = {
    **mamba_arrays("mixer"),
    "gated_delta.decay_log": "self_attention.A_log",
    "gated_delta.step_bias": "self_attention.dt_bias",
}
CONVOLVED = ("x", "B", "C")
# End of a tensor's name -> the ends of the names of the tensors that it is stored as.
PARTS = {
    "mixer.in_proj.weight": ("z", *CONVOLVED, "dt"),
    "mixer.conv1d.weight": CONVOLVED,
    "mixer.conv1d.bias": CONVOLVED,
    "self_attention.in_proj.weight": (*DELTA[:3], "z", "beta", "alpha"),
    "self_attention.conv1d.weight": DELTA[:3],
}
NORM_EPS = 1e-5  # of Mamba-2's gated norm, whatever norm_epsilon is
# Start of the names of a layer's tensors -> the letter of the layer, by the first that fits.
STARTS = {"mixer.": "M", "self_attention.linear_qkv.": "*", "mlp.router.": "E", "mlp.": "-"}
STARTS |= {"self_attention.in_proj.": "G"}


def pattern(arguments: Arguments) -> tuple[str, str]:
    """Return the argument that places the layers of a hybrid model, and their letters without |.

    ("", "") for other models.
    """
    for name in PATTERNS:
        if arguments.get(name):
            return name, arguments[name].replace("|", "")
    shares = {letter: arguments.get(name) or 0.0 for letter, name in RATIOS.items()}
    if not any(shares.values()) and not arguments.get("is_hybrid_model"):
        return "", ""
    letters = "M" * arguments["num_layers"]
    for letter, share in shares.items():
        count, others = round(len(letters) * share), letters.count("M")
        # Attention lies between equal runs of other layers, MLPs at the ends of such runs.
        run = (others - count) / (count + 1 if letter == "*" else max(count, 1))
        letters = spread(letters, letter, run) if count else letters
    return " and ".join(RATIOS.values()), letters


def spread(letters: str, letter: str, run: float) -> str:
    """Put a letter in place of an M after each `run` that stay, on average."""
    left, placed = run, ""
    for letter_there in letters:
        is_placed = letter_there == "M" and left < 0.5
        left += 0 if letter_there != "M" else run if is_placed else -1
        placed += letter if is_placed else letter_there
    return placed


def hybrid_fields(
    arguments: Arguments, local: list[bool] | None, refused: list[str]
) -> dict[str, typing.Any]:
    """Return fields of ModelConfig, none unless the model is a hybrid; append what is not supported
    to `refused`. local: whether each layer's attention has a sliding window."""
    name, letters = pattern(arguments)
    if not letters:
        return {}
    setting = f"{name}={letters!r}"
    if "/" in letters:
        refused.append(f"{setting} has MTP layers (after /), which are not imported with hybrids")
        return {}
    if unknown := [letter for letter in dict.fromkeys(letters) if letter not in KNOWN]:
        supported = ", ".join(f"{letter} ({mixer})" for letter, mixer in KNOWN.items())
        refused.append(f"{setting} has the letters {' '.join(unknown)} (supported are {supported})")
        return {}
    if len(letters) != arguments["num_layers"]:
        count = f"num_layers={arguments['num_layers']}"
        refused.append(f"{setting} has {len(letters)} layers, and {count} (they must be equal)")
        return {}
    eps = arguments.get("norm_epsilon", NORM_EPS)
    if "M" in letters and eps != NORM_EPS:
        refused.append(f"norm_epsilon={eps} beside Mamba-2, whose norm has {NORM_EPS}")
    return {
        "kinds": layers(letters, local),
        **(delta_fields(arguments, refused) if "G" in letters else {}),
        "mamba.num_heads": arguments.get("mamba_num_heads") or 0,
        "mamba.head_dim": arguments.get("mamba_head_dim") or 64,
        "mamba.num_groups": arguments.get("mamba_num_groups") or 8,
        "mamba.state_size": arguments.get("mamba_state_dim") or 128,
    }


def delta_fields(arguments: Arguments, refused: list[str]) -> dict[str, typing.Any]:
    """Return the sizes of Gated DeltaNet, whose norm and activation are those of the model."""
    required = {"normalization": "RMSNorm", "swiglu": True, "apply_layernorm_1p": False}
    wrong = {
        n: arguments.get(n) for n, value in required.items() if (arguments.get(n) or False) != value
    }
    if wrong:
        settings = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        refused.append(
            f"{settings} beside G (gated_delta), whose norm is RMSNorm and activation SiLU"
        )
    names = {"value_heads": "num_heads", "key_heads": "num_key_heads"}
    sizes = {f"delta.{ours}": f"linear_num_{theirs}" for theirs, ours in names.items()}
    sizes |= {"delta.key_size": "linear_key_head_dim", "delta.value_size": "linear_value_head_dim"}
    sizes |= {"delta.kernel_size": "linear_conv_kernel_dim"}
    defaults = (32, 16, 128, 128, 4)
    return {
        ours: arguments.get(theirs) or default
        for (ours, theirs), default in zip(sizes.items(), defaults, strict=True)
    }


def parts(name: str) -> list[str]:
    """Return the names of the tensors that a projection of Mamba-2 is stored as; else []."""
    ends = next((ends for end, ends in PARTS.items() if name.endswith(end)), ())
    return [f"{name}.{end}" for end in ends]


def layers(letters: str, local: list[bool] | None) -> tuple[Layer, ...]:
    names = [KNOWN[letter] for letter in letters]
    if local:
        windows = zip(names, local, strict=True)
        names = ["local" if n == "attention" and has_window else n for n, has_window in windows]
    return tuple(((name,),) for name in names)


def check_layers(model: ModelConfig, tensors: Iterable[str], layer: str) -> None:
    """ValueError if the names of the tensors tell other layers than the model's.

    layer: the prefix of the layers' names.
    """
    stored = stored_letters(tensors, layer)
    kinds = tuple(
        tuple(tuple(n.replace("local", "attention") for n in names) for names in kind)
        for kind in model.layer_kinds
    )
    if stored and kinds != layers(stored, None):
        raise ValueError(
            f"model.layers={model.layers!r} with model.num_layers={model.num_layers} is not the "
            f"checkpoint's pattern, which its tensors tell: set model.layers={stored!r} and "
            f"model.num_layers={len(stored)}"
        )


def stored_letters(tensors: Iterable[str], layer: str) -> str:
    """Return the letters of the layers by their tensors' names; "" unless all are hybrid ones."""
    kinds: dict[int, set[str]] = {}
    for name in tensors:
        if matched := re.match(re.escape(layer) + r"(\d+)\.(.*)", name):
            letter = next(
                (end for start, end in STARTS.items() if matched[2].startswith(start)), ""
            )
            kinds.setdefault(int(matched[1]), set()).add(letter)
    letters = ["".join(sorted(kinds[number])).replace("-E", "E") for number in sorted(kinds)]
    return "".join(letters) if all(len(letter) == 1 for letter in letters) else ""

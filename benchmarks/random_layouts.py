"""Random models on random meshes against one device: `python benchmarks/random_layouts.py`.

Each run draws a model, settings of its training and a mesh of eight CPU devices. Loss and gradients
must equal those of one device but for rounding; with optim.offload, so must the losses of three
steps. Layers are of every mixer, rows are packed or not, and matrix products in any of RECIPES,
latent attention over context included. Left out are settings whose meaning depends on the layout:
the balance loss over a microbatch, capacity, and means over microbatches.

--runs=60 --seed=0; --only=NUMBER repeats one. A draw that the training step refuses is drawn
again. A process that XLA's CPU runtime aborts, because its threads wait for each other (NOTES.md),
is started once more. The exit code is 1 if a run differs.
"""

import argparse
import itertools
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import conftest  # noqa: F401  sets XLA's flags of the tests
import numpy as np
from layouts import (
    BATCH,
    LENGTH,
    assert_equal_but_rounding,
    controls,
    mesh_of,
    model_gradients,
    tiny,
    tiny_batch,
    tiny_state,
)
from test_random_layouts import FLIPPED, FLOOR, SAME_LOSS, TOLERANCE, documents

from maxmeg.config.layers import SHARED
from maxmeg.config.mixers import Activation, ExpertBackend, ExpertExchange, QkNorm, RouterScore
from maxmeg.config.model import ModelConfig, Norm, NormPlace, Position
from maxmeg.config.parallel import LaneOrder, Schedule
from maxmeg.config.quantization import QuantizationConfig, QuantizationRecipe
from maxmeg.config.schema import Config, LossBackend
from maxmeg.config.setting import with_fields
from maxmeg.step import make_train_step

STEPS = 3
FLAGS = " --xla_cpu_collective_call_terminate_timeout_seconds=120"
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
SIZES = itertools.product((1, 2, 4), *[(1, 2, 4, 8)] * 2, (1, 2, 4), (1, 2, 4), (1, 2, 4))
MESHES = [dict(zip(AXES, sizes, strict=True)) for sizes in SIZES if math.prod(sizes) == 8]
BOTH = (False, True)
RECIPES = [recipe for recipe in QuantizationRecipe if not recipe.value.startswith("qat")]
# Of weights, whole on every device: widths are multiples of them.
BLOCKS = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16, "mxfp4": 32}
COARSE = 0.6  # as FLIPPED, with 4-bit codes, whose scales and signs are of a device's tokens
TRAIN = {"z_loss": (0.0, 1e-3), "label_smoothing": (0.0, 0.1)}
TRAIN |= {"loss_backend": (LossBackend.xla, LossBackend.tiled)}
GENERAL = {
    **{"norm": Norm, "norm_place": NormPlace, "norm_one_plus": BOTH},
    **{
        "embedding_scale": (1.0, 3.0),
        "dropout_embedding": (0.0, 0.1),
        "dropout_hidden": (0.0, 0.2),
    },
    "position": tuple(p for p in Position if p is not Position.relative),  # of encoder-decoders
    **{"tied": BOTH, "logit_softcap": (0.0, 5.0), "mtp.num_layers": (0, 0, 1)},
    **{
        "mup.base_hidden_size": (0, 16),
        "recompute": ("minimal", "selective", "full", "query,mlp_up"),
    },
}
SCORES = {
    **dict.fromkeys(("attention.bias_qkv", "attention.bias_out", "attention.sinks"), BOTH),
    **{"attention.softcap": (0.0, 5.0), "attention.dropout": (0.0, 0.1)},
}
HEADS = SCORES | {"attention.num_kv_heads": (0, 1, 2, 4), "attention.qk_norm": QkNorm}
MLA = SCORES | {"mla.kv_rank": (16,), "mla.query_rank": (0, 16), "mla.rotary_size": (2, 4)}
WINDOW = {"attention.window": (5, 9)}
MLP = {"mlp.ffn_size": (64,), "mlp.activation": Activation, "mlp.bias": BOTH}
MOE = MLP | {
    **{"moe.num_experts": (8,), "moe.top_k": (2, 3), "moe.score": RouterScore},
    **{"moe.ffn_size": (32,), "moe.shared_ffn_size": (0, 32), "moe.latent_size": (0, 16)},
    **{"moe.sequence_aux_loss": (0.0, 0.1), "moe.z_loss": (0.0, 0.01), "moe.jitter": (0.0, 0.1)},
    **{"moe.normalize_weights": BOTH, "moe.bias_balancing": BOTH, "moe.logit_bias": BOTH},
}
CONV = {"conv.kernel_size": (1, 3), "conv.bias": BOTH}
MAMBA = {
    **{"mamba.num_groups": (1, 4), "mamba.head_dim": (16,), "mamba.state_size": (6,)},
    **{"mamba.kernel_size": (2, 3), "mamba.chunk": (4,), "mamba.min_step": (0.0, 0.01)},
    **dict.fromkeys(("mamba.bias", "mamba.conv_bias", "mamba.norm"), BOTH),
}
KDA = {"delta.num_heads": (8,), "delta.key_size": (6,), "delta.kernel_size": (2, 3)}
KDA |= {"delta.chunk": (4,), "delta.rank": (3,)}
DELTA = {name: values for name, values in KDA.items() if name != "delta.rank"}
DELTA |= {"delta.value_size": (0, 4), "delta.num_key_heads": (0, 4)}
READ: dict[str, dict[str, Iterable]] = {"mamba": MAMBA, "gated_delta": DELTA, "kda": KDA}
READ |= {"attention": HEADS, "local": HEADS | WINDOW, "mla": MLA, "local_mla": MLA | WINDOW}
READ |= {"conv": CONV, "mlp": MLP, "moe": MOE, "wide_mlp": MLP}
READ |= {"layer_embedding": {"layer_embedding.size": (6,), "vocab_size": (64,)}}
READ |= {name: READ[origin] for name, origin in SHARED.items()}
KINDS = (
    ("attention", "local", "conv", "mamba", "gated_delta"),
    ("mla", "local_mla", "conv", "mamba", "kda"),
)
SHARED_MIXER = re.compile(r"\b(attention|local)\b")
WITHOUT_SCORES = {"conv", "mamba", "gated_delta", "kda"}


class Draw:
    """One run: settings of the model, of training, and of the mesh."""

    def __init__(self, seed: str):
        self.random = random.Random(seed)
        self.mesh: dict[str, Any] = dict(self.one_of(MESHES))
        self.unit = self.layers_of_a_unit()
        self.draw_mesh()
        self.train: dict[str, Any] = {name: self.one_of(v) for name, v in TRAIN.items()}
        self.model = self.draw_model()
        self.draw_recipe()
        self.is_packed = self.one_of(BOTH)
        self.offload = self.one_of((False, False, True))

    def one_of(self, values: Iterable) -> Any:
        return self.random.choice(list(values))

    def layers_of_a_unit(self) -> list[str]:
        kinds, unit = self.one_of(KINDS), []
        for number in range(self.one_of((1, 2))):
            needs_experts = self.mesh["expert"] > 1 and number == 0
            feed = "moe" if needs_experts else self.one_of(("mlp", "moe"))
            unit.append(self.one_of(kinds) + ("," if feed == "moe" else self.one_of(",+")) + feed)
        return unit

    def draw_mesh(self) -> None:
        """The settings that go with the sizes of the axes."""
        mesh, context = self.mesh, self.mesh["context"]
        mixers = {mixer for layer in self.unit for mixer in layer.replace("+", ",").split(",")}
        if context > 1:
            mesh["fsdp_context"] = self.one_of(BOTH)
            strategies = ("auto", "ring", "exchange", "gather", *("hierarchy",) * (context > 2))
            mesh["context_strategy"] = self.one_of(strategies)
            if mesh["expert"] > 1 or ("moe" in mixers and self.one_of(BOTH)):
                mesh["expert"] *= context  # experts lie along context too
        if mesh.get("context_strategy") in ("auto", "gather") and not mixers & WITHOUT_SCORES:
            mesh["context_chunks"] = self.one_of((0, 4))
        if mesh["expert"] > 1:
            mesh["expert_exchange"] = self.one_of(ExpertExchange)
            if mesh["expert_exchange"] is not ExpertExchange.gather:
                mesh["expert_buffer"] = self.one_of((1.0, 1.5, 3.0))
            if mesh["tensor"] > 1 and self.one_of(BOTH):  # experts lie along tensor too
                mesh["expert_tensor"] = mesh["tensor"] // 2
                mesh["expert"] *= 2
        mesh["zero1"] = self.one_of(BOTH)
        if mesh["pipe"] > 1:
            mesh["schedule"] = self.one_of(Schedule)
            if mesh["schedule"] is Schedule.one_f_one_b:
                mesh["chunks"] = self.one_of((1, 2))
            mesh["pad_layers"] = self.one_of(BOTH)

    def draw_model(self) -> dict[str, Any]:
        mesh, repeats, first = self.mesh, self.one_of((1, 2, 3)), []
        replicas = math.prod(mesh[name] for name in ("data", "fsdp"))
        rounds = 1
        if mesh["pipe"] > 1:
            rounds = mesh["pipe"] if mesh.get("chunks", 1) > 1 else 1
            repeats = mesh["pipe"] * mesh.get("chunks", 1) * 2 - mesh["pad_layers"]
            if not mesh["pad_layers"] and self.one_of(BOTH):  # stages balanced by cost
                first = ["mlp"]
        rows = max(BATCH // (replicas * mesh["expert"]), 1)
        sizes = [n for n in range(1, rows + 1) if rows % (n * rounds) == 0] or [1]
        self.train["micro_batch_size"] = self.one_of(sizes)
        if self.train["micro_batch_size"] < rows:
            mesh["lanes"] = self.one_of(LaneOrder)
        if self.one_of((False, False, True)):
            self.unit = [layer + ",layer_embedding" for layer in self.unit]
        shared = [SHARED_MIXER.sub(r"shared_\1", layer) for layer in self.unit]
        if shared != self.unit and self.one_of(BOTH):
            shared = [re.sub(r"\bmlp", "wide_mlp", layer) for layer in shared]
            first, self.unit = [*first, *self.unit], shared
        layers = [*first, f"*({' '.join(self.unit)})"]
        model: dict[str, Any] = {"layers": " ".join(layers)}
        model["num_layers"] = len(first) + len(self.unit) * repeats
        text = ",".join([*first, *self.unit]).replace("+", ",")
        mixers, choices = {*text.split(",")}, dict(GENERAL)
        for mixer in sorted(mixers):
            choices |= READ[mixer]
        model |= {name: self.one_of(values) for name, values in choices.items()}
        if "moe" in mixers:
            model["moe.backend"] = self.one_of((ExpertBackend.xla, ExpertBackend.batched))
            model |= self.one_of(({}, {"moe.num_groups": 4, "moe.topk_groups": 2}))
        if mixers <= {*WITHOUT_SCORES, "mlp", "moe", "layer_embedding"}:
            model["attention.num_heads"] = ModelConfig().attention.num_heads  # nothing reads it
        if model["position"] is Position.learned:
            model["max_position"] = LENGTH
        after = (NormPlace.post, NormPlace.post_residual)
        if "+" in model["layers"] and model["norm_place"] not in after:
            model["parallel_norms"] = self.one_of(BOTH)
        return model

    def draw_recipe(self) -> None:
        shards = 8 // self.mesh["pipe"]
        widths = {name: max(64, block * shards) for name, block in BLOCKS.items()}
        recipe = self.one_of([r for r in RECIPES if widths.get(r.value, 0) <= 256])
        self.train["quantization"] = QuantizationConfig(recipe)
        if width := widths.get(recipe.value):
            self.model |= {"hidden_size": width, "mlp.ffn_size": 2 * width}
            sizes = {"moe.ffn_size": width, "moe.shared_ffn_size": width, "moe.latent_size": 0}
            sizes |= {"mla.kv_rank": width, "mla.query_rank": width}
            self.model |= {name: size for name, size in sizes.items() if name in self.model}

    def configs(self) -> tuple[Config, Config]:
        """The run's and that of one device."""
        optim = {"optim.offload": True} if self.offload else {}
        layout = with_fields(tiny(self.model, self.train, **self.mesh), optim)
        return layout, tiny(self.model, self.train | {"micro_batch_size": 0}, fsdp=1)

    def is_valid(self) -> bool:
        try:
            for config in self.configs():
                mesh_of(config)
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        plain = {"packed": self.is_packed, "offload": self.offload}
        settings = {**self.model, **self.train, **self.mesh, **plain}
        settings["quantization"] = self.train["quantization"].recipe.value
        return "; ".join(f"{name}={getattr(v, 'value', v)}" for name, v in settings.items())


def draws_of(seed: int, number: int) -> Iterator[Draw]:
    """The valid draws of this number."""
    draws = (Draw(f"{seed} {number} {n}") for n in itertools.count())
    return (draw for draw in draws if draw.is_valid())


def losses(config: Config, **extra: np.ndarray) -> list[float]:
    """The losses of STEPS steps."""
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step, values = make_train_step(config, mesh, optimizer, abstract), []
    batch = tiny_batch(config, mesh, **extra)
    for _ in range(STEPS):
        state, metrics = step(state, batch, controls(mesh))
        values.append(float(metrics["loss"]))
    return values


def check(draw: Draw) -> None:
    """AssertionError if the layout's numbers are not one device's."""
    extra = documents() if draw.is_packed else {}
    layout, alone = draw.configs()
    loss, gradients = model_gradients(layout, **extra)
    wanted_loss, wanted = model_gradients(alone, **extra)
    recipe = alone.train.quantization.recipe
    is_exact = recipe is QuantizationRecipe.none
    same_loss, same = (TOLERANCE, TOLERANCE) if is_exact else (10 * SAME_LOSS, FLIPPED)
    flipped = 0.0 if is_exact else COARSE if recipe.value.endswith("fp4") else FLIPPED
    assert_equal_but_rounding(({}, gradients), ({}, wanted), same, FLOOR, flipped)
    assert abs(loss - wanted_loss) <= same_loss * abs(wanted_loss), (loss, wanted_loss)
    if draw.offload:
        pairs = [losses(config, **extra) for config in (layout, alone)]
        assert np.allclose(*pairs, rtol=10 * SAME_LOSS, atol=0), pairs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random layouts against one device.")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the run to repeat, in this process")
    options = parser.parse_args(arguments)
    os.environ["XLA_FLAGS"] += FLAGS * (FLAGS not in os.environ["XLA_FLAGS"])
    if options.only is not None:
        for draw in draws_of(options.seed, options.only):
            print(draw, flush=True)
            try:
                check(draw)
                return 0
            except ValueError as error:  # of what only the arrays tell, such as blocks of weights
                print(f"refused: {error}")
    different = 0
    for number in range(options.runs):
        command = [sys.executable, __file__, f"--seed={options.seed}", f"--only={number}"]
        for _ in range(2):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != -signal.SIGABRT or "rendezvous" not in done.stderr:
                break
        different += done.returncode != 0
        result = "same" if done.returncode == 0 else "\n".join(done.stderr.splitlines()[-3:])
        print(f"{number}: {done.stdout.strip()}\n{number}: {result}", flush=True)
    print(f"{options.runs - different} of {options.runs} runs equal one device's")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())

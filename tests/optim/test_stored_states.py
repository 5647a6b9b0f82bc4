"""Small optimizer states in checkpoints, which other meshes and settings restore."""

import jax
import numpy as np
import pytest
from layouts import (
    controls,
    mesh_of,
    tiny,
    tiny_abstract,
    tiny_batch,
    tiny_state,
)

from maxmeg.checkpoint.disk import orders_of, to_tree
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.names import to_arrays
from maxmeg.checkpoint.resume import resume
from maxmeg.config import files
from maxmeg.config.files import CHECKPOINTS
from maxmeg.config.model import DType
from maxmeg.config.schema import Config, Masters, Moments, OptimConfig, Optimizer
from maxmeg.config.setting import with_fields
from maxmeg.inference.load import load_run
from maxmeg.state import TrainState
from maxmeg.step import make_train_step

TOKENIZER = "null:60"
EXACT = ("step", "key", "optimizer.0.count")  # arrays that are no float32
SMALL = {"moments": Moments.float8, "masters": Masters.remainders}
EXPERTS = {"num_layers": 3, "layers": "*(attention,moe)", "moe.num_experts": 4, "moe.top_k": 2}
MESHES = {
    "zero1, fsdp and tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "experts in a padded pipeline": {
        **{"pipe": 2, "pad_layers": True, "fsdp": 1, "expert": 2, "data": 2},
    },
}


def config_of(optim: dict, dtype: DType = DType.bfloat16, **parallel) -> Config:
    train = {"micro_batch_size": 2}
    config = tiny(EXPERTS | {"dtype": dtype, "hidden_size": 64}, train, **{"fsdp": 1} | parallel)
    config.optim, config.data.tokenizer = with_fields(OptimConfig(), optim), TOKENIZER
    return config


class Steps:
    """A state of a configuration, and steps from it."""

    def __init__(self, config: Config, state: TrainState | None = None):
        self.config, self.mesh = config, mesh_of(config)
        self.optimizer, self.abstract = tiny_abstract(config, self.mesh)
        self.state = state or tiny_state(config, self.mesh)[2]
        self.step = make_train_step(config, self.mesh, self.optimizer, self.abstract)

    def run(self, seeds: range) -> dict[str, np.ndarray]:
        for seed in seeds:
            batch = tiny_batch(self.config, self.mesh, seed)
            self.state, metrics = self.step(self.state, batch, controls(self.mesh))
            assert not metrics["skipped"]
        return arrays_of(self.state)

    def save(self, folder) -> Checkpointer:
        checkpointer = Checkpointer(folder / CHECKPOINTS, asynchronous=False)
        config = files.to_dict(self.config)
        metadata = {"config": config, "tokenizer": TOKENIZER}
        orders = orders_of(self.state)
        assert checkpointer.save(int(self.state.step), to_tree(self.state), metadata, orders)
        return checkpointer

    def resumed(self, checkpointer: Checkpointer) -> "Steps":
        found = resume(self.config, checkpointer, self.abstract, TOKENIZER)
        assert found is not None
        kinds = [
            {name: (a.dtype, a.shape, a.sharding) for name, a in to_arrays(state).items()}
            for state in (found.state, self.abstract)
        ]
        assert kinds[0] == kinds[1]
        self.state = found.state
        return self


def arrays_of(state: TrainState) -> dict[str, np.ndarray]:
    """By name, layers in model order, without the padding of a pipeline."""
    arrays, orders = {}, orders_of(state)
    for name, array in jax.device_get(to_arrays(state)).items():
        order = orders.get(name.replace(".", "/"))
        rows = [order.index(n) for n in range(max(order) + 1)] if order else slice(None)
        arrays[name] = array[rows] if array.ndim else array
    return arrays


def assert_same_bits(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        rows = min(len(array), len(found[name])) if array.ndim else None  # of the vocabulary
        same = np.array_equal(found[name][:rows], array[:rows]) if rows else found[name] == array
        assert same and found[name].dtype == array.dtype, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim",
    [
        SMALL | {"ema.decay": 0.75},
        SMALL | {"optimizer": Optimizer.soap},
        {"moments": Moments.float8, "ema.decay": 0.75},
    ],
    ids=str,
)
def test_checkpoints_hold_the_codes_and_restore_on_other_meshes(tmp_path, optim):
    """Also the masters and averages of weights."""
    first = Steps(config_of(optim))
    before = first.run(range(2))
    assert {before[n].dtype.name for n in before if ".mu." in n} >= {"float8_e4m3fn", "float32"}
    saver = first.save(tmp_path)
    for mesh in MESHES.values():
        other = Steps(config_of(optim, **mesh)).resumed(saver)
        assert_same_bits(arrays_of(other.state), before)
        other.run(range(2, 3))
    again = Steps(config_of(optim)).resumed(saver)
    assert_same_bits(again.run(range(2, 4)), first.run(range(2, 4)))


@pytest.mark.slow
def test_checkpoints_of_offloaded_states_are_those_of_the_device(tmp_path):
    """A run goes on bitwise from its own checkpoint, and from that of the other kind."""
    kinds = {name: SMALL | {"offload": name == "host"} for name in ("host", "device")}
    runs = {name: Steps(config_of(optim)) for name, optim in kinds.items()}
    savers = {}
    for name, one in runs.items():
        one.run(range(1))
        savers[name] = one.save(tmp_path / name)
    after = runs["device"].run(range(1, 2))
    for saver in savers.values():
        again = Steps(config_of(kinds["host"])).resumed(saver)
        assert_same_bits(again.run(range(1, 2)), after)
    back = Steps(config_of(kinds["device"])).resumed(savers["host"])
    assert_same_bits(back.run(range(1, 2)), after)


def masters_of(arrays: dict) -> dict:
    """The float32 masters in a state's arrays."""
    masters = {}
    for name, array in arrays.items():
        if name.startswith("model."):
            rest = arrays.get(f"remainders.{name.removeprefix('model.')}")
            if rest is not None:
                upper = array.view(np.uint16) - (rest >> 15)
                array = (np.uint32(upper) << 16 | rest).view(np.float32)
            masters[name] = array
    return masters


@pytest.mark.slow
def test_a_run_resumes_with_other_settings(tmp_path):
    """Masters keep their bits, moments are decoded and encoded again."""
    first = Steps(config_of({"moments": Moments.bfloat16}))
    before = first.run(range(2))
    saver = first.save(tmp_path)
    settings: list[tuple[str, dict]] = [("small", SMALL), ("whole", {})]
    for name, optim in settings:
        other = Steps(config_of(optim, **MESHES["zero1, fsdp and tensor"])).resumed(saver)
        found = arrays_of(other.state)
        assert_same_bits(masters_of(found), masters_of(before))
        if name == "whole":
            decoded = {n: a.astype(np.float32) for n, a in before.items() if n in found}
            assert_same_bits(found, decoded | {n: before[n] for n in EXACT})
        other.run(range(2, 3))
        back = Steps(config_of({})).resumed(other.save(tmp_path / name))
        assert_same_bits(masters_of(arrays_of(back.state)), masters_of(arrays_of(other.state)))
    loaded = load_run(str(tmp_path / "small"), master_weights=True)
    saver = Checkpointer(tmp_path / "small" / CHECKPOINTS)
    small = masters_of(arrays_of(Steps(config_of({})).resumed(saver).state))
    loaded_arrays = {f"model.{n}": np.asarray(a) for n, a in to_arrays(loaded.model).items()}
    assert_same_bits(loaded_arrays, small)

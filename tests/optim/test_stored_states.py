"""Small optimizer states on meshes and in checkpoints, and what they do to a loss."""

import jax
import jax.numpy as jnp
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

from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.resume import resume
from maxmeg.config import files
from maxmeg.config.model import DType
from maxmeg.config.optimizers import MuonConfig
from maxmeg.config.schema import Config, Masters, Moments, OptimConfig, Optimizer
from maxmeg.inference.load import load_run
from maxmeg.planning.cost.memory import device_memory
from maxmeg.planning.cost.workload import workload
from maxmeg.state import CHECKPOINTS, TrainState, orders_of, to_arrays, to_tree
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
    config.optim, config.data.tokenizer = OptimConfig(**optim), TOKENIZER
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
@pytest.mark.parametrize("optimizer", [Optimizer.adamw, Optimizer.soap])
def test_checkpoints_hold_the_codes_and_restore_on_other_meshes(tmp_path, optimizer):
    """Also the masters: from them and back a run goes over all settings."""
    optim = SMALL | {"optimizer": optimizer}
    first = Steps(config_of(optim))
    before = first.run(range(2))
    assert {before[n].dtype.name for n in before if ".mu." in n} >= {"float8_e4m3fn", "float32"}
    saver = first.save(tmp_path)
    for mesh in MESHES.values():
        other = Steps(config_of(optim, **mesh)).resumed(saver)
        assert_same_bits(arrays_of(other.state), before)
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
    small = masters_of(arrays_of(Steps(config_of({})).resumed(saver_of(tmp_path / "small")).state))
    loaded_arrays = {f"model.{n}": np.asarray(a) for n, a in to_arrays(loaded.model).items()}
    assert_same_bits(loaded_arrays, small)


def saver_of(folder) -> Checkpointer:
    return Checkpointer(folder / CHECKPOINTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"), zip(MESHES, (Optimizer.adamw, Optimizer.muon), strict=True)
)
def test_updates_on_a_mesh_are_those_of_one_device(name, optimizer):
    """Almost: where gradients differ by rounding, a code in a thousand is another one."""
    optim = {"optimizer": optimizer, "moments": Moments.float8}
    if optimizer is Optimizer.muon:
        optim["muon"] = MuonConfig(dtype=DType.float32)  # else its updates differ by rounding
    whole = Steps(config_of(optim, DType.float32)).run(range(2))
    found = Steps(config_of(optim, DType.float32, **MESHES[name])).run(range(2))
    for path, array in whole.items():
        if ".mu." in path and array.dtype.itemsize == 1:
            rows = min(len(array), len(found[path]))
            differs = found[path][:rows].view(np.uint8) != array[:rows].view(np.uint8)
            assert differs.mean() < 2e-3, path


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_arguments_of_the_compiled_step_are_those_of_the_plan(name):
    steps = Steps(config_of(SMALL, **MESHES[name]))
    batch, rates = tiny_batch(steps.config, steps.mesh), controls(steps.mesh)
    compiled = steps.step.lower(steps.state, batch, rates).compile()
    others = [batch, rates, steps.state.step, steps.state.key, steps.state.optimizer[0].count]
    beside = sum(
        leaf.addressable_data(0).nbytes for leaf in map(jnp.asarray, jax.tree.leaves(others))
    )
    found = device_memory(workload(steps.config, steps.mesh.size))
    planned = found["master weights"] + found["optimizer"]
    assert compiled.memory_analysis().argument_size_in_bytes == planned + beside


def loss_curve(moments: Moments, masters: Masters, steps: int) -> np.ndarray:
    """Losses of a tiny model that learns 16 batches by heart."""
    config = tiny({"dtype": DType.bfloat16, "hidden_size": 64}, fsdp=1)
    config.optim = OptimConfig(moments=moments, masters=masters)
    steps_of = Steps(config)
    losses = []
    for n in range(steps):
        batch = tiny_batch(config, steps_of.mesh, n % 16)
        steps_of.state, metrics = steps_of.step(steps_of.state, batch, controls(steps_of.mesh))
        losses.append(metrics["loss"])
    return np.array(jax.device_get(losses))


@pytest.mark.slow
def test_losses_are_those_of_float32_states():
    exact = loss_curve(Moments.float32, Masters.float32, 100)
    for moments, masters in ((Moments.bfloat16, Masters.float32), tuple(SMALL.values())):
        found = loss_curve(moments, masters, 100)
        assert np.abs(found - exact)[-20:].mean() < 0.01 * exact[-20:].mean()

"""Models that predict further tokens: what has no place for those layers leaves them out."""

import dataclasses

import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_state

from maxmeg.checkpoint.disk import to_tree
from maxmeg.checkpoint.initialize import base_of
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.names import to_arrays
from maxmeg.config import files
from maxmeg.config.files import CHECKPOINTS
from maxmeg.hf import convert
from maxmeg.hf.families.binding import Place
from maxmeg.hf.formats.safetensors import SafetensorsFolder
from maxmeg.hf.trained import TrainedModel
from maxmeg.inference.load import load_run


def save(folder, config, state) -> None:
    """A run's folder whose checkpoint holds the model alone."""
    config.run_dir = str(folder)
    metadata = {"config": files.to_dict(config), "base": base_of(config), "consumed_samples": 0}
    metadata["tokenizer"] = "null:60"
    tree = {"model": to_tree(state)["model"]}
    checkpointer = Checkpointer(f"{folder}/{CHECKPOINTS}", asynchronous=False)
    assert checkpointer.save(0, tree, metadata)
    files.save(config, folder / "config.yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, config, arrays of the model by name)."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny({"mtp.num_layers": 1, "mtp.loss_weight": 0.3, "max_position": 16}, fsdp=1)
    config.data.tokenizer = "null:60"
    _, _, state = tiny_state(config, mesh_of(config))
    save(folder, config, state)
    return folder, config, {n: np.asarray(a) for n, a in to_arrays(state.model).items()}


def test_an_export_reports_omitted_mtp_layers(run, tmp_path):
    folder, _, arrays = run
    report = convert.export_model(folder, tmp_path / "hf")
    assert "LlamaForCausalLM has no MTP layers" in report.notes[-1]
    assert "model.mtp.num_layers=1" in report.notes[-1]
    actual = SafetensorsFolder(tmp_path / "hf").tensors
    assert {name for name, _ in convert.exported(folder)} == actual.keys()
    count = sum(int(np.prod(info.shape)) for info in actual.values())
    words = sum(3 * 32 for name in arrays if name.endswith("table"))  # the padding
    plain = sum(array.size for name, array in arrays.items() if not name.startswith("mtp."))
    assert count == plain - words


def test_inference_does_not_load_mtp_layers(run):
    trained = load_run(str(run[0]))
    actual = to_arrays(trained.model)
    assert actual.keys() == {name for name in run[2] if not name.startswith("mtp.")}
    for name, array in actual.items():
        np.testing.assert_array_equal(array, run[2][name])


@pytest.mark.slow
def test_a_run_continues_with_more_mtp_layers(run):
    """Those that its weights lack begin as in a new model, on any mesh."""
    folder, config, arrays = run
    made = []
    for parallel, start in (({"fsdp": 1}, ""), ({"pipe": 2, "tensor": 2, "fsdp": 1}, str(folder))):
        fields = {**vars(config.model), "mtp.num_layers": 2}
        new = tiny(fields, {"micro_batch_size": 8}, **parallel)
        new.checkpoint.init_from, new.seed = start, 7
        state = tiny_state(new, mesh_of(new))[2]
        made.append({n: np.asarray(a) for n, a in to_arrays(state.model).items()})
    fresh, actual = made
    assert actual.keys() == fresh.keys() > arrays.keys()
    for name, array in actual.items():
        wanted = arrays.get(name, fresh[name])
        rows = min(len(array), len(wanted))  # the padding of the vocabulary differs
        np.testing.assert_array_equal(array[:rows], wanted[:rows], err_msg=name)


def test_adapters_load_beside_a_base_without_mtp_layers(run, tmp_path):
    folder, config, arrays = run
    config = dataclasses.replace(config, model=config.model.without_mtp())
    config.checkpoint.init_from, config.lora.rank = str(folder), 2
    _, _, state = tiny_state(config, mesh_of(config))
    save(tmp_path / "lora", config, state)
    trained = TrainedModel(tmp_path / "lora")
    np.testing.assert_array_equal(trained.read(Place("final_norm.weight")), 1)
    name = "stack.groups.0.sublayers.0.mixers.attention.query.weight"
    wanted = arrays[name][1]
    np.testing.assert_array_equal(trained.read(Place(name, 1)), wanted)

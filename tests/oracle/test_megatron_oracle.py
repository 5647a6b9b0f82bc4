"""Checkpoints of Megatron import to models with its logits, and damaged ones are refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import megatron_bert
import megatron_fixture as fixture
import megatron_model
import numpy as np
import pytest
import tokenizer_files
import torch

from maxmeg import convert
from maxmeg.checkpoint.stream import StreamReader
from maxmeg.config import files
from maxmeg.config.files import CHECKPOINTS
from maxmeg.config.flags import names_config, run_command
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.data.corpus.indexed import IndexedWriter
from maxmeg.inference.load import load_run
from maxmeg.layers.context import Context
from maxmeg.megatron.convert import import_megatron
from maxmeg.megatron.hybrid import pattern
from maxmeg.megatron.torch_dist import TorchDistReader, UnsafePickleError

LOGITS = 1e-5  # largest error over the scale of the logits
MAKER = Path(megatron_model.__file__)
REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples/from_megatron.sh"


def logits_of(run: Path, ids: np.ndarray) -> np.ndarray:
    model = load_run(str(run), master_weights=True).model
    quick = {"xla_backend_optimization_level": 0}
    forward = jax.jit(lambda model, ids: model(ids), compiler_options=quick)
    return np.asarray(forward(model, jnp.asarray(ids)))


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that megatron_model.py fills."""
    folder = tmp_path_factory.mktemp("megatron")
    commands = [[sys.executable, str(MAKER), str(folder), str(rank)] for rank in (0, 1)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for command in commands]
    errors = [process.communicate(timeout=300)[1].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)
    return folder


def test_a_bert_of_megatron_gives_its_logits_and_pairs(megatron: Path, tmp_path: Path):
    import_megatron(megatron / "bert_stacked", tmp_path)
    model = load_run(str(tmp_path), master_weights=True).model
    ids = jnp.asarray(megatron_model.tokens())
    attended, types = map(jnp.asarray, megatron_bert.inputs(megatron_model.LENGTH))
    ctx = Context(jnp.arange(megatron_model.LENGTH)[None], attended, token_types_BL=types)
    x, _, _ = model.stack(model.embed_tokens(ids, ctx), ctx)
    logits = np.asarray(model.logits(model.outputs(x, ctx)))
    pairs = np.asarray(model.bert.pair_logits(model.normed(x["target"])[:, :1]))
    expected = np.load(megatron / "bert.npy")
    difference = np.abs(logits - expected)[np.asarray(attended) == 1].max()
    assert difference <= LOGITS * np.abs(expected).max()
    np.testing.assert_allclose(pairs, np.load(megatron / "pairs.npy"), rtol=LOGITS, atol=LOGITS)


@pytest.mark.parametrize("name", [name for name in megatron_model.MODELS if name != "bert"])
def test_megatrons_own_checkpoints_give_its_logits(name: str, megatron: Path, tmp_path: Path):
    readers = []
    for naming in megatron_model.MODELS[name][2]:
        report = import_megatron(megatron / f"{name}_{naming}", tmp_path / naming)
        assert report.tokenizer == f"null:{megatron_model.VOCAB}"
        readers.append(StreamReader(tmp_path / naming / CHECKPOINTS, 0))
    for path in readers[0].tensors:
        first, *others = [reader.read(path) for reader in readers]
        assert all((other == first).all() for other in others), path
    expected = np.load(megatron / f"{name}.npy")
    actual = logits_of(tmp_path / naming, megatron_model.tokens())
    assert np.abs(actual - expected).max() <= LOGITS * np.abs(expected).max()


def test_uneven_parts_over_ranks_give_the_logits_of_transformers(tmp_path: Path):
    torch.manual_seed(0)
    model, arguments = fixture.gpt2()
    with torch.no_grad():  # so that biases and norms count
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    fixture.write(tmp_path / "from", fixture.gpt2_tensors(model), arguments, ranks=3)
    import_megatron(tmp_path / "from", tmp_path / "to", tokenizer=f"null:{fixture.VOCAB}")
    table_VD = StreamReader(tmp_path / "to" / CHECKPOINTS, 0).read("model/embedding/table")
    padding = table_VD[fixture.VOCAB :]
    assert len(padding) and not padding.any()
    ids = np.random.default_rng(0).integers(0, fixture.VOCAB, (2, fixture.LENGTH))
    expected = model(torch.tensor(ids)).logits.detach().numpy()
    actual = logits_of(tmp_path / "to", ids)
    assert np.abs(actual - expected).max() <= LOGITS * np.abs(expected).max()


def test_the_example_converts_a_checkpoint_and_trains_it_on(tmp_path: Path):
    model, arguments = fixture.gpt2()
    fixture.write(tmp_path / "from", fixture.gpt2_tensors(model), arguments)
    tokenizer_files.folder(tmp_path / "words")
    with IndexedWriter(str(tmp_path / "text"), vocab_size=fixture.VOCAB) as writer:
        for document in np.random.default_rng(0).integers(0, 7, (40, 100)):
            writer.add_document(document, [len(document)])
    length = f"--data.sequence_length={fixture.LENGTH}"
    command = ["bash", str(EXAMPLE), "from", "text", "words/tokenizer.json", length]
    command += ["--train.num_steps=2", "--train.global_batch_size=2", "--train.eval_every=0"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "XLA_FLAGS": "", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "runs/megatron-finetuned/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows][-1] == 2


SMALL = with_fields(
    ModelConfig(),
    {
        "vocab_size": 10,
        "num_layers": 1,
        "hidden_size": 8,
        "attention.num_heads": 2,
        "attention.num_kv_heads": 1,
        "mlp.ffn_size": 12,
    },
)


def small_tensors() -> dict[str, torch.Tensor]:
    """Return the tensors of the SMALL model, each layer stored separately."""
    layer = "decoder.layers.0"
    shapes = {
        "embedding.word_embeddings.weight": (16, 8),
        "output_layer.weight": (16, 8),
        "decoder.final_layernorm.weight": (8,),
        f"{layer}.input_layernorm.weight": (8,),
        f"{layer}.pre_mlp_layernorm.weight": (8,),
        f"{layer}.self_attention.linear_qkv.weight": (16, 8),
        f"{layer}.self_attention.linear_proj.weight": (8, 8),
        f"{layer}.mlp.linear_fc1.weight": (24, 8),
        f"{layer}.mlp.linear_fc2.weight": (8, 12),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def small_config() -> Config:
    config = Config(model=SMALL)
    config.data.tokenizer = "null:10"
    return config


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of SMALL without arguments."""
    folder = tmp_path_factory.mktemp("small") / "whole"
    fixture.write(folder, small_tensors(), {})
    (folder / "iter_0000007" / "common.pt").unlink()
    return folder


def truncate(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def exchange(folder: Path) -> None:
    """The files of two ranks, each with the other's tensors."""
    (folder / "__0_0.distcp").rename(folder / "other")
    (folder / "__1_0.distcp").rename(folder / "__0_0.distcp")
    (folder / "other").rename(folder / "__1_0.distcp")


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (truncate, "the file is truncated"),
    (exchange, "__._0.distcp"),
    (lambda folder: (folder / "__0_0.distcp").unlink(), "'__0_0.distcp', which"),
    (lambda folder: (folder / ".metadata").unlink(), "has neither .metadata nor"),
    (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04"), ".metadata is damaged"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damage_is_named_and_nothing_is_left(damage, message, written: Path, tmp_path: Path):
    shutil.copytree(written, tmp_path / "from")
    iteration = tmp_path / "from" / "iter_0000007"
    damage(iteration)
    with pytest.raises(ValueError, match=message):
        import_megatron(tmp_path / "from", tmp_path / "to", small_config())
    assert not (tmp_path / "to" / "config.yaml").exists()
    assert not list((tmp_path / "to").rglob("step_*"))


def test_the_command_line_takes_a_config(written: Path, tmp_path: Path, capsys, monkeypatch):
    files.save(small_config(), tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)
    argv = ["convert", "--config=run.yaml", f"--input={written}", "--output=to"]
    assert names_config(argv)
    run_command(convert.main, convert.Options, needs_config=True, argv=argv)
    assert "megatron: 9 tensors, 664 parameters -> to" in capsys.readouterr().out
    model = load_run("to").config.model
    assert (model.num_layers, model.hidden_size) == (1, 8)
    with pytest.raises(SystemExit):
        run_command(
            convert.main, convert.Options, False, ["convert", f"--input={written}", "--list"]
        )
    assert "--list for all others" in capsys.readouterr().err


def test_layers_of_stacked_tensors_are_read_by_themselves(tmp_path: Path):
    tensors = {
        "a": torch.randn(5, 4, 3).bfloat16(),
        "b": torch.randn(()),
        "c": torch.arange(3),
        "d": torch.randn(6, 2).half(),
    }
    fixture.write(tmp_path, tensors, {})
    with TorchDistReader(tmp_path / "iter_0000007") as reader:
        assert set(reader.tensors) == {"a", "b", "d"} and reader.dtypes["c"] == "int64"
        assert reader.arguments()["hidden_size"] == fixture.HIDDEN
        for name in reader.tensors:
            wanted = tensors[name].float().numpy()
            assert (reader.read(name).astype(np.float32) == wanted).all()
            for index in range(len(wanted) if wanted.ndim else 0):
                assert (reader.read(name, index).astype(np.float32) == wanted[index]).all()
        with pytest.raises(ValueError, match="has no entry 5"):
            reader.read("a", 5)
        with pytest.raises(ValueError, match="no weights named c"):
            reader.read("c")


class Command:
    """Runs when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_tensor_that_is_a_command_is_not_run(tmp_path: Path):
    fixture.write(tmp_path, {"a": torch.zeros(1)}, {})
    file = tmp_path / "iter_0000007" / "__0_0.distcp"
    size = file.stat().st_size
    torch.save(Command(f"touch {tmp_path / 'ran'}"), file)
    assert file.stat().st_size <= size
    shift = size - file.stat().st_size
    data = file.read_bytes()
    end = data.rindex(b"PK\x05\x06")  # a comment makes the archive as long as the tensor's
    file.write_bytes(data[: end + 20] + shift.to_bytes(2, "little") + b" " * shift)
    with (
        TorchDistReader(tmp_path / "iter_0000007") as reader,
        pytest.raises(UnsafePickleError, match=r"__0_0.distcp: wants posix.system"),
    ):
        reader.read("a")
    assert not (tmp_path / "ran").exists()


def test_ratios_place_the_layers_that_megatron_places(megatron: Path):
    """As of its releases before the pattern was an argument of its own."""
    for count, *shares, letters in json.loads((megatron / "allocated.json").read_text()):
        arguments = {"num_layers": count, "is_hybrid_model": True}
        arguments |= dict(zip(("hybrid_attention_ratio", "hybrid_mlp_ratio"), shares, strict=True))
        assert pattern(arguments)[1] == letters

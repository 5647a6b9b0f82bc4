"""Eight CPU devices, run-time checked annotations and a compilation cache, set before jax loads."""

import base64
import gc
import hashlib
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jaxtyping
import pytest

pytest_plugins = ["selection"]
REPOSITORY = Path(__file__).parent.parent
XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Virtual devices share the cores: a busy machine must not count as a dead peer.
    "--xla_cpu_collective_call_terminate_timeout_seconds": "300",
    "--xla_cpu_collective_timeout_seconds": "300",
    # As multihost.initialize sets it for runs on virtual devices.
    "--xla_cpu_enable_concurrency_optimized_scheduler": "false",
    # Workers of pytest use the cores already: parts of a program would only cost more.
    "--xla_cpu_parallel_codegen_split_count": "1",
}
if os.environ.get("MAXMEG_TESTS_XLA") != "own":
    # Programs round alike on all processors without FMA, as it depends on the processor which sums
    # and products are fused, and without YNNPACK, which chooses its kernels by the processor. Users
    # run with both: .ci/run also tests with XLA's own choice.
    XLA_FLAGS["--xla_cpu_max_isa"] = "AVX"
    XLA_FLAGS["--xla_cpu_experimental_ynn_fusion_type"] = ""
if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):  # else for GPUs too
    # Programs are compiled in a third of the time; tests run most of them once.
    XLA_FLAGS["--xla_backend_optimization_level"] = "0"
    if metadata.version("jaxlib").startswith("0.10."):  # later ones know it no more
        XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
DEFAULT = "not slow and not gpu"  # as addopts in pyproject.toml
CHOSEN = os.environ.get("JAX_PLATFORMS", "")
MEMORY = 2 * 2**30  # bytes of a process, above which it forgets compiled programs
TEXT = "The quick brown fox jumps over the lazy dog. It's 1234 o'clock: naïve café, 東京 🎉!\n"
CHECKED = ["maxmeg.kernels", "maxmeg.layers", "maxmeg.ops"]
# Without these it cannot even be imported; .ci/run installs `.[oracle]` and runs the folder.
ORACLES = ("torch", "transformers", "peft", "lm_eval", "megatron")
collect_ignore = [] if all(map(importlib.util.find_spec, ORACLES)) else ["oracle"]


def cache_folder() -> Path:
    """One folder per kind of processor: compiled code is not portable between them."""
    processor = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
        processor += flags[0] if flags else ""
    digest = hashlib.sha256(processor.encode()).hexdigest()[:12]
    return REPOSITORY / ".pytest_cache" / "jax" / digest


def set_environment() -> None:
    """What is already set wins; subprocesses of tests inherit it all."""
    given = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.split("=")[0] for flag in given}
    added = [f"{name}={value}" for name, value in XLA_FLAGS.items() if name not in names]
    os.environ["XLA_FLAGS"] = " ".join(given + added)
    os.environ.setdefault("NPROC", "32")  # threads of XLA, as multihost.initialize sets it too
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder()))
    # Else every process of a test would compile the modules that it imports.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        folder = REPOSITORY / ".pytest_cache" / "python"
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder))
    # Of all programs, the smallest too: most are single operations of tests' references.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # Operations without the Python frames that made them: a fifth less to compile.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


set_environment()
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # On a busy machine any example may take long.
    settings.register_profile(
        "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("busy machine")
gc.set_threshold(10_000)  # tracing makes so many objects that looking them over takes a fifth of it
# An int may stand for a float, as PEP 484 says; everything else must be what it is declared.
jaxtyping.install_import_hook(
    CHECKED, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)


def choose_device(config: pytest.Config) -> None:
    """`pytest -m gpu` uses a GPU if there is one. JAX_PLATFORMS=cuda selects `gpu` by default."""
    if "cuda" in CHOSEN and config.option.markexpr == DEFAULT:
        config.option.markexpr = "not slow"
    if config.option.markexpr == "gpu" and not CHOSEN:
        del os.environ["JAX_PLATFORMS"]
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        from maxmeg.runtime.gpu_environment import set_gpu_environment

        set_gpu_environment(deterministic=True)


def pytest_configure(config: pytest.Config) -> None:
    choose_device(config)
    config.addinivalue_line(
        "markers", "slow: what a plain run never takes; run by `pytest -m slow`, and by CI in turns"
    )
    config.addinivalue_line(
        "markers", "gpu: for the device that JAX finds, GPU or CPU; run by `pytest -m gpu`"
    )
    # A killed run can leave half an entry: jax then compiles anew, which is no error.
    config.addinivalue_line(
        "filterwarnings", "ignore:Error reading persistent compilation cache:UserWarning"
    )


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Thousands of programs are gigabytes; until then, files share single operations."""
    yield
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # bytes, on Linux
    if "jax" in sys.modules and used > MEMORY:
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory) -> dict[str, str]:
    """A spec of every kind of tokenizer."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("vocabularies")
    lines = [TEXT.strip(), "another line of words", "dogs and foxes", "words, words."] * 5
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "sp"),
        vocab_size=330,
        byte_fallback=True,
        character_coverage=1.0,
        pad_id=3,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(lines, trainer)
    (folder / "hf").mkdir()
    model.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "gpt2").mkdir()
    model.model.save(str(folder / "gpt2"))
    tokens = [bytes([b]) for b in range(256)] + [b"th", b"the", b" t", b"er"]
    ranks = b"".join(base64.b64encode(t) + f" {i}\n".encode() for i, t in enumerate(tokens))
    (folder / "ranks.tiktoken").write_bytes(ranks)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox", "##es", "hello"]
    words += [mark + c for c in "abcdefghijklmnopqrstuvwxyz0123456789" for mark in ("", "##")]
    words += [*"!'(),.-:[]<>|/", "東", "京", "word"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
    return {
        "bytes": "bytes",
        "null": "null:1000",
        "sentencepiece": f"sentencepiece:{folder / 'sp.model'}",
        "huggingface": f"huggingface:{folder / 'hf' / 'tokenizer.json'}",
        "gpt2": f"gpt2:{folder / 'gpt2'}",
        "wordpiece": f"wordpiece:{folder / 'vocab.txt'}",
        "tiktoken": f"tiktoken:{folder / 'ranks.tiktoken'}",
    }

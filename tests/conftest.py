"""Eight CPU devices, run-time checked annotations and a compilation cache, set before jax loads."""

import base64
import gc
import hashlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jaxtyping
import pytest

REPOSITORY = Path(__file__).parent.parent
XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Virtual devices share the cores: a busy machine must not count as a dead peer.
    "--xla_cpu_collective_call_terminate_timeout_seconds": "300",
    "--xla_cpu_collective_timeout_seconds": "300",
    # As multihost.initialize sets it for runs on virtual devices.
    "--xla_cpu_enable_concurrency_optimized_scheduler": "false",
    # Programs round alike on all processors without FMA, as it depends on the processor which sums
    # and products are fused, and without YNNPACK, which chooses its kernels by the processor.
    "--xla_cpu_max_isa": "AVX",
    "--xla_cpu_experimental_ynn_fusion_type": "",
    # Workers of pytest use the cores already: parts of a program would only cost more.
    "--xla_cpu_parallel_codegen_split_count": "1",
}
if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):  # else for GPUs too
    # Programs are compiled in a third of the time; tests run most of them once.
    XLA_FLAGS["--xla_backend_optimization_level"] = "0"
    if metadata.version("jaxlib").startswith("0.10."):  # later ones know it no more
        XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
# Of the files in folders, those with minutes of tests.
LONGEST = ("test_kernels.py", "test_real_slurm.py", "test_real_weights.py", "test_vllm.py")
DEFAULT = "not slow and not gpu"  # as addopts in pyproject.toml
CHOSEN = os.environ.get("JAX_PLATFORMS", "")
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
    if hasattr(config.option, "loadscopereorder"):  # with pytest-xdist: in the order given below
        config.option.loadscopereorder = False
    config.addinivalue_line(
        "markers", "slow: over about 5 s cold, or a long table; run by `pytest -m slow`, as CI does"
    )
    config.addinivalue_line(
        "markers", "gpu: for the device that JAX finds, GPU or CPU; run by `pytest -m gpu`"
    )
    # A killed run can leave half an entry: jax then compiles anew, which is no error.
    config.addinivalue_line(
        "filterwarnings", "ignore:Error reading persistent compilation cache:UserWarning"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    rows = "I/N: of long tests rows I, I + N, ... of tables over 3 rows, others of every 3rd file"
    parser.addoption("--rows", help=rows)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files and whole programs first: the end must not be left to one worker."""
    if config.option.rows:
        keep_rows(config, items, *map(int, config.option.rows.split("/")))

    def starts_later(item: pytest.Item) -> tuple[bool, bool]:
        is_long = item.path.name in LONGEST
        return not is_long, item.path.parent != Path(__file__).parent

    items.sort(key=starts_later)


def keep_rows(config: pytest.Config, items: list[pytest.Item], first: int, each: int) -> None:
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("gpu"):
            tables.setdefault(item.nodeid.split("[")[0], []).append(item)
    files = {path: i for i, path in enumerate(sorted({table[0].path for table in tables.values()}))}
    left_out = set()
    for table in tables.values():
        if len(table) > 3:
            left_out |= {item for i, item in enumerate(table) if i % each != first}
        elif (files[table[0].path] - first) % 3:
            left_out |= set(table)
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """With `-n`, a file stays in one process: its tests share what they compile."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def remove_node(self, node) -> str | None:
            """The test at which a worker crashed, which xdist would run again."""
            units = [unit for unit in self.assigned_work[node].values() if not all(unit.values())]
            crashed = next((name for name, done in units[0].items() if not done)) if units else None
            if crashed:
                units[0][crashed] = True
            super().remove_node(node)
            return crashed

        def _reschedule(self, node) -> None:
            """A worker starts a test once it knows the next one or the end. One that replaces a
            crashed worker may get a single test, and xdist lets it wait for ever."""
            super()._reschedule(node)
            pending = self._pending_of(self.assigned_work[node])
            while self.workqueue and pending < 2 and not node.shutting_down:
                self._assign_work_unit(node)
                pending = self._pending_of(self.assigned_work[node])
            for other in self.nodes if not self.workqueue else ():
                if not other.shutting_down:
                    other.shutdown()

    return Scheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """What one file compiled is no use to the next, and thousands of programs are gigabytes."""
    yield
    if "jax" in sys.modules:
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

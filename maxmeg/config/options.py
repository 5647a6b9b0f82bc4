"""The options of the commands: --NAME=VALUE beside the settings of a run. No JAX.

They stand here and not with their commands, so that a mistake is answered before JAX is imported.
"""

import dataclasses
import enum
import typing
from collections.abc import Sequence

from maxmeg.config.model import DType
from maxmeg.config.setting import setting


def rare(default: typing.Any, doc: str, **rules: typing.Any) -> typing.Any:
    """Declare an option as `setting` does, which --help leaves out and --help=all shows."""
    field = setting(default, doc, **rules)
    field.metadata = {**field.metadata, "rare": True}
    return field


@dataclasses.dataclass
class Train:
    """What `maxmeg train` does."""

    dry_run: bool = setting(
        False,
        "check settings, data and the checkpoint to resume or begin from, print a summary and "
        "the memory, and stop before the first step",
    )


@dataclasses.dataclass
class Plan:
    """GPUs, methods and output files of a plan."""

    hardware: str = setting("", "GPUs as NAMExCOUNT, h100x64; empty: the pipeline's timeline alone")
    search: bool = setting(False, "rank all layouts and report on the best instead of the config's")
    compile: bool = setting(False, "compile the train step; with --search of the best 3 layouts")
    timeline: str = rare("", "SVG file: ticks x stages of the pipeline")
    json: str = rare("", "JSON file: the whole report")
    html: str = rare("", "HTML file: the whole report as one page")


@dataclasses.dataclass
class ModelOptions:
    """The model that a command loads."""

    run_dir: str = setting("runs/gpt", "folder of a run, or a Hugging Face folder")
    step: int = setting(-1, "step of the checkpoint; -1: the newest intact one", at_least=-1)
    dtype: str = setting("", "compute dtype, float32, bfloat16 or float16; empty: the run's")
    tensor: int = setting(1, "number of tensor-parallel devices", at_least=1)
    average: bool = rare(False, "load the EMA weights (optim.ema) instead of the trained weights")


@dataclasses.dataclass
class Evaluate(ModelOptions):
    """Model, data and tasks of an evaluation."""

    split: str = setting("validation", "train | validation | test", needs="tasks=()")
    paths: tuple[str, ...] = setting(
        (), "prefixes of another corpus, in full; empty: the run's", needs="tasks=()"
    )
    neighbours: str = setting(
        "",
        "of a run with data.objective=retro: nearest | shuffled | none; empty: as in training",
        needs="tasks=()",
    )
    num_batches: int = setting(
        0, "number of batches; 0: the whole split once", at_least=0, needs="tasks=()"
    )
    batch_size: int = setting(16, "samples per batch, >= 1", at_least=1)
    tasks: tuple[str, ...] = setting(
        (),
        "lambada:FILE, wikitext:FILE, and lm-evaluation-harness tasks or files; empty: loss",
        "--task, --valid-data",
    )
    shots: int = setting(
        -1,
        "few-shot examples per question; -1: the task's default",
        at_least=-1,
        needs="tasks",
    )
    limit: int = setting(0, "number of questions per task; 0: all", at_least=0, needs="tasks")


@dataclasses.dataclass
class Retrieve(ModelOptions):
    """Model, corpus and queries of a search."""

    corpus: str = setting("", "file of texts, or prefix of a .bin/.idx file of sentences; needed")
    index: str = setting("", "folder of the corpus' vectors; empty: RUN_DIR/index")
    data: int = rare(1, "number of replicas of the model that embed", at_least=0)
    pooling: str = rare(
        "", "mean | first | pooler: the vectors of a model that is no biencoder; empty: its own"
    )
    query: Sequence[str] = setting((), "text to find; may be given several times")
    queries: str = setting(
        "", "file of queries and the row or text that answers each, for recall; JSON lines"
    )
    count: int = setting(5, "number of texts to find for each query", at_least=1)
    faiss: str = rare(
        "",
        "search by an index of faiss instead, such as Flat or IVF1024,PQ32; empty: exact, by JAX",
    )
    output: str = setting("", "file for what is found, one JSON object per line; empty: the screen")


@dataclasses.dataclass
class Neighbours:
    """The model that embeds chunks of text."""

    encoder: str = setting("runs/bert", "folder of a run, or a Hugging Face folder")
    pooling: str = setting("mean", "of a text's tokens: mean | first | pooler")


class LongRope(enum.Enum):
    """Which length of a generated text chooses between LongRoPE's short and long factors: its
    maximum length, or its current length (as transformers' Phi-3)."""

    longest = "longest"
    current = "current"


@dataclasses.dataclass
class GenerationOptions(ModelOptions):
    """A model that generates text."""

    longrope: str = rare(
        "longest",
        "length that chooses between LongRoPE's short and long factors: longest: maximum length of "
        "the text | current: its current length, as in transformers",
    )


@dataclasses.dataclass
class SamplingOptions(GenerationOptions):
    """A model, and how tokens are sampled from it."""

    num_tokens: int = setting(100, "most tokens to generate per prompt, >= 1", at_least=1)
    temperature: float = setting(
        0.8, "sampling temperature; 0: always the most likely token", at_least=0
    )
    top_k: int = rare(0, "sample from the k most likely tokens; 0: all", at_least=0)
    top_p: float = setting(
        1.0, "sample from the most likely tokens with this total probability", above=0, at_most=1
    )
    seed: int = rare(0, "seed of the sampling")


@dataclasses.dataclass
class Generate(SamplingOptions):
    """Prompts, model and sampling."""

    prompt: Sequence[str] = setting((), "text to continue, or a source; may be given several times")
    prompts: str = setting(
        "",
        "file of prompts and chats instead of --prompt: one JSON object per line, an array, or a "
        "table",
    )
    output: str = setting(
        "", "file for the completions, one JSON object per line; empty: the screen"
    )
    chat: bool = setting(False, "prompts are user messages; use the chat template")
    system: str = setting("", "system message for chats without one")
    opening: bool = rare(
        True,
        "begin prompts with the special tokens of the tokenizer.json, end the source of an "
        "encoder-decoder with the end of text",
    )
    batch: int = rare(8, "most prompts at a time", at_least=1)
    encoder: str = rare(
        "", "for a RETRO run: run folder of the encoder that `maxmeg neighbours` used"
    )
    pooling: str = rare("", "pooling of --encoder: mean | first | pooler; empty: mean")


@dataclasses.dataclass
class Chat(SamplingOptions):
    """Model and sampling."""

    num_tokens: int = setting(1000, "most tokens per answer, >= 1", at_least=1)
    system: str = setting("", "system message at the start of every conversation")


@dataclasses.dataclass
class EngineOptions(GenerationOptions):
    """A model and the sizes of its engine."""

    expert: int = rare(1, "number of devices among which experts are divided", at_least=1)
    data: int = rare(
        0,
        "number of replicas of expert x tensor devices; 0: in one process 1, in several processes "
        "as many as there are devices",
        at_least=0,
    )
    max_num_seqs: int = setting(
        8, "most requests at a time on each replica of the model", at_least=1, former="lanes"
    )
    pages: int = rare(
        0, "number of KV-cache pages per replica; 0: fill the free memory", at_least=0
    )
    block_size: int = rare(32, "number of tokens per KV-cache page", at_least=1, former="slots")
    chunk: int = rare(
        256, "number of prompt tokens that are read at once; on a CPU at most 64", at_least=1
    )
    max_prefill_tokens: int = rare(
        2048, "most prompt tokens that are read while others wait for a token", at_least=1
    )
    share: bool = rare(True, "prefix caching: reuse the KV cache of a common prompt prefix")
    adapters: tuple[str, ...] = setting(
        (), "LoRA adapters beside the model, NAME=FOLDER of a run or of PEFT; requests choose one"
    )
    speculative_tokens: int = setting(
        0,
        "speculative decoding: number of draft tokens per step; 0: off",
        at_least=0,
        former="proposals",
    )
    mtp: bool = rare(False, "draft with the model's MTP layers, not by n-gram lookup")


@dataclasses.dataclass
class Serve(EngineOptions):
    """Model, engine, address and limits."""

    host: str = setting("127.0.0.1", "address to listen at; 0.0.0.0: all of this machine's")
    port: int = setting(8000, "0: one that is free", at_least=0, at_most=65535)
    name: str = setting("", "model name in the API; empty: name of the run's folder")
    api_key: str = setting(
        "",
        "key that requests must have, or @FILE with it; empty: no key, on this machine alone; "
        "none: no key, for any --host",
    )
    log: str = setting("", "file for one JSON line per request, for maxmeg replay; empty: none")
    max_body_mb: float = rare(8.0, "largest body of a request, 10^6 bytes", above=0)
    max_prompt: int = rare(0, "most tokens of a prompt; 0: the model's context", at_least=0)
    max_n: int = rare(16, "most replies to a prompt", at_least=1)
    max_queue: int = rare(256, "most replies that wait in the queue", at_least=0)
    max_grammar: int = rare(65536, "most characters of a schema or grammar", at_least=0)
    grammar_seconds: float = rare(5.0, "most time to compile a grammar", above=0)
    mask_seconds: float = rare(2.0, "most CPU time to follow a grammar in one reply", above=0)
    drain_seconds: float = rare(
        30.0, "time for running requests to finish after SIGTERM", at_least=0
    )


@dataclasses.dataclass
class Replay:
    """A server's log, and the folder of its run."""

    log: str = setting(dataclasses.MISSING, "log of a server")
    run_dir: str = setting("", "folder of the run; empty: as in the log")


class To(enum.Enum):
    maxmeg = "maxmeg"
    huggingface = "huggingface"
    peft = "peft"
    gguf = "gguf"


class Quantize(enum.Enum):
    none = "none"
    int8 = "int8"
    mxfp4 = "mxfp4"
    nvfp4 = "nvfp4"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


@dataclasses.dataclass
class Convert:
    """Input, output and format."""

    input: str = setting(
        dataclasses.MISSING, "folder of Hugging Face, Megatron or a run, or a .gguf file"
    )
    output: str = setting(
        "", "folder to create: a run's, Hugging Face's or PEFT's; or a .gguf file"
    )
    to: To = setting(To.maxmeg, "maxmeg | huggingface | peft | gguf")
    list: bool = setting(False, "show tensors and arrays, write nothing")
    tokenizer: str = rare(
        "",
        "--to=maxmeg: as data.tokenizer, or a tokenizer.json; empty: the input's",
        needs="to=maxmeg",
    )
    dtype: DType = setting(
        DType.bfloat16, "--to=huggingface|gguf: of weights", needs="to=huggingface|gguf"
    )
    quantize: Quantize = setting(
        Quantize.none,
        "of the layers' matrices; --to=huggingface: none | int8 | mxfp4 | nvfp4; --to=gguf: none | "
        "q8_0 | q4_0",
        needs="to=huggingface|gguf",
    )
    step: int = setting(
        -1,
        "step of the checkpoint to export; -1: the newest",
        at_least=-1,
        needs="to=huggingface|peft|gguf",
    )
    average: bool = rare(
        False,
        "--to=huggingface|gguf: export the EMA weights (optim.ema)",
        needs="to=huggingface|gguf",
    )
    shard_gb: float = rare(
        5.0, "--to=huggingface: largest file, in 10^9 bytes", above=0, needs="to=huggingface"
    )
    family: str = rare(
        "",
        "architecture in transformers to export as; empty: the model's",
        needs="to=huggingface|peft",
    )
    base: str = rare(
        "",
        "--to=peft: name or folder of the base model in adapter_config.json; empty: the name in "
        "the config.json that the base was imported with",
        needs="to=peft",
    )


@dataclasses.dataclass
class Doctor:
    """Sizes of the measurements."""

    matrix: int = setting(
        0, "rows and columns of a bfloat16 matrix product; 0: 8192, on a CPU 1024", at_least=0
    )
    size_mb: float = setting(256.0, "MB (10^6 bytes) per device of copy and all-reduce", above=0)
    kernels: bool = setting(
        False,
        "instead, compare every backend of attention, losses, experts, scans and 8-bit products on "
        "the first device with a reference, and keep what was found for backend=auto",
    )


class PlotAxis(enum.Enum):
    step = "step"
    tokens = "tokens"
    seconds = "seconds"


@dataclasses.dataclass
class Plot:
    """Axis and file of a comparison of runs."""

    x: PlotAxis = setting(PlotAxis.step, "horizontal axis: step | tokens | seconds (of training)")
    output: str = setting("runs.html", "HTML file")

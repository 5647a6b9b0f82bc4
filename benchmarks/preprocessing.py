"""What tokenizing a corpus costs: `python benchmarks/cpu.py data`.

    python benchmarks/cpu.py data --vocabulary=FOLDER --text=FILE.jsonl --mb=20

The same text and the same GPT-2 byte pairs (vocab.json and merges.txt; by default trained here, on
the sources of Python's standard library, which are also the text) through Megatron-LM's functions
as its tools/preprocess_data.py calls them, through `tokenizers` and `tiktoken` alone, and through
maxmeg.preprocess. Each runs in a process of its own, with a fifth of the text and with all of it:
MB/s per CPU-second (all processes) is that of the difference, `start_s` what is left over. What
Megatron-LM and maxmeg write is compared byte for byte. Needs megatron-core and transformers for
the first (`pip install 'maxmeg[oracle]'`); what is not installed is named.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

END = "<|endoftext|>"
LEAST_MB = 10
SMALL = 5  # the smaller text is this part of the other


def texts(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def megatron(path: str, vocabulary: str, output: str) -> None:
    """Its worker and its writer, in one process: nothing is sent between processes."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(vocabulary)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{output}_text_document.bin", dtype=dtype)
    for text in texts(path):
        ids, lengths = [], []
        for sentence in [text]:
            found = tokenizer.text_to_ids(sentence)
            if len(found) > 0:
                ids.extend(found)
                lengths.append(len(found))
        if len(ids) > 0:
            ids.append(tokenizer.eod)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(f"{output}_text_document.idx")


def tokenizers_alone(path: str, vocabulary: str, output: str) -> None:
    """Batches of 32 documents, one thread."""
    from maxmeg.data.tokenizers.load import load_tokenizer

    model = load_tokenizer(f"gpt2:{vocabulary}")._model  # pyright: ignore
    found = texts(path)
    while batch := list(itertools.islice(found, 32)):
        for encoded in model.encode_batch(batch):
            assert encoded.ids


def tiktoken_alone(path: str, vocabulary: str, output: str) -> None:
    from maxmeg.data.tokenizers.merged_bytes import of_gpt2

    files = [Path(vocabulary, name).read_bytes() for name in ("vocab.json", "merges.txt")]
    encode = of_gpt2(*files)
    assert encode is not None, "these byte pairs are not tiktoken's"
    for text in texts(path):
        encode(text)


def maxmeg(workers: int) -> Callable[[str, str, str], None]:
    def run(path: str, vocabulary: str, output: str) -> None:
        from maxmeg.data.prepare.encoding import Options
        from maxmeg.data.prepare.run import prepare

        options = Options(f"gpt2:{vocabulary}", append_eod=True)
        prepare([path], output, options, workers)

    return run


CONTENDERS: dict[str, Callable[[str, str, str], None]] = {
    "megatron": megatron,
    "tokenizers": tokenizers_alone,
    "tiktoken": tiktoken_alone,
    "maxmeg": maxmeg(0),
    "maxmeg, 1 worker": maxmeg(1),
    "maxmeg, 2 workers": maxmeg(2),
}


def measure_here(name: str, path: str, vocabulary: str, output: str) -> dict[str, float]:
    """Seconds of this process, of those it started, and on the clock."""
    wall = time.monotonic()
    CONTENDERS[name](path, vocabulary, output)
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, -1))
    return {
        "own": own.ru_utime + own.ru_stime,
        "others": others.ru_utime + others.ru_stime,
        "wall": time.monotonic() - wall,
    }


def measure(name: str, path: str, vocabulary: str, output: str) -> dict[str, float] | str:
    command = [sys.executable, __file__, "here", name, path, vocabulary, output]
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    return json.loads(done.stdout.splitlines()[-1])


def write_texts(found: Iterator[str], path: str, size: int) -> float:
    """MB of UTF-8 written; whole documents."""
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        for text in found:
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode("utf-8"))
            if written >= size:
                break
    return written / 1e6


def train_vocabulary(folder: Path, found: Iterator[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, show_progress=False, special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(found, trainer)
    model.model.save(str(folder))


def copy_vocabulary(source: Path, folder: Path) -> None:
    """Under the names that transformers knows."""
    names = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}
    for path in source.iterdir():
        if path.name in {*names, *names.values()}:
            shutil.copy(path, folder / names.get(path.name, path.name))


def main(arguments: Sequence[str]) -> dict:
    parser = argparse.ArgumentParser("cpu.py data", description=__doc__)
    parser.add_argument("--vocabulary", help="folder of GPT-2's vocab.json and merges.txt")
    parser.add_argument("--text", help="JSON lines; default: Python's standard library")
    parser.add_argument("--mb", type=float, default=LEAST_MB, help="of text that are encoded")
    flags = parser.parse_args(arguments)
    if flags.mb < LEAST_MB:
        parser.error(
            f"--mb={flags.mb} is less than {LEAST_MB}: starting would be part of the speed"
        )
    from maxmeg.data.prepare.standard_library import source_files

    def found() -> Iterator[str]:
        if flags.text:
            return texts(flags.text)
        return (path.read_text("utf-8", "replace") for path in source_files())

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = folder / "vocabulary"
        vocabulary.mkdir()
        if flags.vocabulary:
            copy_vocabulary(Path(flags.vocabulary), vocabulary)
        else:
            train_vocabulary(vocabulary, found())
        settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": END, "bos_token": END}
        settings |= {"unk_token": END, "model_max_length": 1 << 40}
        (vocabulary / "tokenizer_config.json").write_text(json.dumps(settings))
        paths = [str(folder / "small.jsonl"), str(folder / "whole.jsonl")]
        parts = zip(paths, (SMALL, 1), strict=True)
        sizes = [write_texts(found(), p, int(flags.mb * 1e6 / k)) for p, k in parts]
        results: dict = {"text_mb": round(sizes[1], 1)}
        for contender in CONTENDERS:
            output = str(folder / contender.replace(", ", "_").replace(" ", "_"))
            runs = [measure(contender, path, str(vocabulary), output) for path in paths]
            results[contender] = compare(sizes, runs)
        base = results["megatron"].get("mb_per_cpu_second")
        for result in results.values():
            if base and isinstance(result, dict) and "mb_per_cpu_second" in result:
                result["x_megatron"] = round(result["mb_per_cpu_second"] / base, 1)
        results["bytes"] = same_bytes(folder)
    return results


def compare(sizes: Sequence[float], runs: Sequence[dict[str, float] | str]) -> dict:
    small, whole = runs
    if isinstance(small, str) or isinstance(whole, str):
        return {"failed": next(run for run in runs if isinstance(run, str))}
    seconds = [run["own"] + run["others"] for run in (small, whole)]
    speed = (sizes[1] - sizes[0]) / (seconds[1] - seconds[0])
    return {
        "mb_per_cpu_second": round(speed, 2),
        "start_s": round(seconds[1] - sizes[1] / speed, 2),
        "writer_share": round((whole["own"] - small["own"]) / (seconds[1] - seconds[0]), 3),
        "wall_mb_per_s": round((sizes[1] - sizes[0]) / (whole["wall"] - small["wall"]), 2),
    }


def same_bytes(folder: Path) -> str:
    """Whether all that wrote .bin and .idx wrote the same."""
    for suffix in ("bin", "idx"):
        found = {path.name: path.read_bytes() for path in sorted(folder.glob(f"*.{suffix}"))}
        if len(set(found.values())) > 1:
            return f"{sorted(found)} differ"
    return f"the same in {len(found)} outputs"


if __name__ == "__main__":
    if sys.argv[1:2] == ["here"]:
        print(json.dumps(measure_here(*sys.argv[2:])))
    else:
        print(json.dumps(main(sys.argv[1:])))

"""Checks random model folders against transformers: `python benchmarks/model_folders.py [COUNT]`.

Each folder is a tiny model of a random family and random sizes, saved by transformers in float32 or
bfloat16, in one file or in several, with a tokenizer of a random kind; the keys of its config.json
are shuffled, and keys without effect are added. maxmeg reads the folder as it is: logits and greedy
tokens must be those of transformers, and so must those of the export. Needs `.[oracle]`.
"""

import json
import pathlib
import random
import sys
import tempfile
import warnings

import jax.numpy as jnp
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))

from hf_cases import VOCAB, families, sparse, with_states

import maxmeg
from maxmeg.config.model import DType
from maxmeg.hf.convert import export_model
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling

LENGTH, NEW = 20, 6
CLOSE = 2e-5  # relative to the largest logit; both compute in float32
TIE = 1e-3  # between the two largest logits, relative to the largest
WITHOUT_EFFECT = {
    "foo_bar": 3,
    "_commit_hash": "0123abcd",
    "unused_flag": True,
    "training_notes": {"lr": 1e-3, "tokens": [1, 2]},
    "unsloth_version": "2026.1",
    "use_cache": False,
    "temperature": 0.7,
}
TEXTS = ["hello world, the cat sat on the mat", "a b c 1 2 3", "naïve café 東京"] * 5


def sizes(rng: random.Random) -> tuple[int, int, int]:
    """(hidden size, heads, head size of the families that say it)."""
    heads = rng.choice((2, 4, 8))
    return heads * rng.choice((8, 16)), heads, rng.choice((8, 12, 16, 32))


def write_tokenizer(rng: random.Random, folder: pathlib.Path) -> str:
    kind = rng.choice(("byte-level BPE", "unigram", "word pieces", "none"))
    if kind == "none":
        return kind
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    if kind == "byte-level BPE":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special)
    elif kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=VOCAB, special_tokens=special, unk_token="<unk>"
        )
    else:
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=special)
    made.train_from_iterator(TEXTS, trainer)
    made.save(str(folder / "tokenizer.json"))
    return kind


def write_folder(rng: random.Random, folder: pathlib.Path):
    """Returns (transformers' model in float32, what was drawn)."""
    table = families(*sizes(rng)) | sparse(*sizes(rng)) | with_states(*sizes(rng))
    name = rng.choice(sorted(table))
    architecture, settings = table[name]
    kind = getattr(transformers, architecture)
    torch.manual_seed(rng.randrange(2**31))
    theirs = kind._from_config(kind.config_class(**settings), attn_implementation="eager")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    dtype = rng.choice((torch.float32, torch.bfloat16))
    theirs.to(dtype).save_pretrained(folder, max_shard_size=rng.choice(("50KB", "5GB")))
    config = json.loads((folder / "config.json").read_text()) | WITHOUT_EFFECT
    shuffled = rng.sample(sorted(config), len(config))
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in shuffled}))
    tokenizer = write_tokenizer(rng, folder)
    hidden = settings.get("hidden_size", settings.get("n_embd"))
    theirs = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return theirs.eval(), f"{name}, {hidden}, {dtype}, tokenizer {tokenizer}"


def problems_of(folder: pathlib.Path, theirs, ids_BL: np.ndarray) -> list[str]:
    """How the model that maxmeg reads from a folder differs from transformers'."""
    run = maxmeg.load(folder, dtype="float32")
    with torch.no_grad():
        wanted = theirs(torch.tensor(ids_BL)).logits.numpy()[..., :VOCAB]
    actual = np.asarray(run.model(jnp.asarray(ids_BL)))[..., :VOCAB]
    error = np.abs(actual - wanted).max() / np.abs(wanted).max()
    problems = [f"logits differ by {error:.1e}"] if not error < CLOSE else []
    if run.config.model.max_position < LENGTH + NEW:
        return problems
    tokens = [*map(int, ids_BL[0])]
    request = Request(NEW, Sampling(temperature=0))
    [reply] = run.engine.generate([np.array(tokens, np.int32)], request)
    for token in map(int, reply.tokens):
        with torch.no_grad():
            last = theirs(torch.tensor([tokens])).logits[0, -1, :VOCAB].numpy()
        if last.max() - last[token] > TIE * np.abs(last).max():
            problems.append(f"token {len(tokens) - LENGTH} is {token}, not {last.argmax()}")
        tokens.append(token)
    return problems


def main(count: int = 40) -> int:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}, transformers {transformers.__version__}")
    rng, failed = random.Random(seed), 0
    warnings.simplefilter("ignore")
    for number in range(count):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name) / "hf"
            theirs, drawn = write_folder(rng, folder)
            ids_BL = np.random.default_rng(number).integers(4, VOCAB, (2, LENGTH))
            try:
                problems = problems_of(folder, theirs, ids_BL)
                export_model(folder, pathlib.Path(name) / "exported", DType.float32)
                again = type(theirs).from_pretrained(
                    pathlib.Path(name) / "exported", attn_implementation="eager"
                )
                with torch.no_grad():
                    both = (model(torch.tensor(ids_BL)).logits for model in (theirs, again.eval()))
                    if not torch.equal(*both):
                        problems.append("the export has other logits")
            except Exception as error:
                problems = [f"{type(error).__name__}: {str(error)[:300]}"]
        failed += bool(problems)
        print(f"{number:3d} {drawn}: {'; '.join(problems) or 'equal'}", flush=True)
    print(f"{count - failed} of {count} are equal")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))

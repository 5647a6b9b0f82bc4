"""Tasks of lm-evaluation-harness over questions of our own, and what two models make of them."""

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before its libraries load: all files are here

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from maxmeg.config.model import DType
from maxmeg.evals.harness import harness_model
from maxmeg.inference.load import load_run

LIKELIHOOD = 1e-4  # of the largest log-probability of a task, float32
BATCH = 4
NEW_TOKENS = 12

QUESTIONS = [  # and answers, the right one first
    ("What is the capital of France?", ["Paris", "Berlin", "a kind of bread", "Madrid"]),
    ("Which animal says meow?", ["The cat", "The dog", "The horse", "The old grey goose"]),
    ("What do plants need to grow?", ["Light and water", "Darkness", "Salt", "Music"]),
    ("How many days has a week?", ["7", "5", "12", "31"]),
    ("What is frozen water called?", ["Ice", "Steam", "Sand", "Oil"]),
    ("In which direction does the sun rise?", ["In the east", "In the west", "North", "South"]),
    ("What is two plus two?", ["4", "3", "22", "5"]),
    ("Who writes the programs of a computer?", ["A programmer", "A baker", "Nobody", "A whale"]),
    ("What colour is the sky on a clear day?", ["Blue", "Green", "Brown", "Plaid"]),
    ("Where do fish live?", ["In water", "In trees", "On the moon", "In books"]),
]
BEGUN = [  # and how it goes on
    ("The days of the week are Monday, Tuesday, Wednesday,", "Thursday"),
    ("1, 2, 3, 4, 5,", "6"),
    ("The opposite of hot is", "cold"),
    ("Once upon a", "time"),
    ("def add(a, b):\n    return a", "+ b"),
    ("The quick brown fox jumps over the lazy", "dog"),
    ("To be or not to", "be"),
    ("She opened the door and", "saw"),
    ("import numpy as", "np"),
    ("The colours of a traffic light are red, yellow and", "green"),
]
PASSAGES = [
    "Rivers begin as small streams in the hills and end in the sea.",
    "A library is quiet. " * 6,  # longer than the context of a tiny model
    "for i in range(10):\n    print(i, i * i)\n",
]


def tasks(folder: Path) -> list[dict]:
    """Answers to choose from, texts to continue, texts to judge; their data lie in `folder`."""
    asked = [
        {"text": f"Question: {text}\nAnswer:", "choices": answers[i % 4 :] + answers[: i % 4],
         "target": -i % 4}
        for i, (text, answers) in enumerate(QUESTIONS)
    ]  # fmt: skip
    begun = [{"text": text, "target": target} for text, target in BEGUN]
    passages = [{"text": "", "target": text} for text in PASSAGES]
    kinds = {
        "answers": ("multiple_choice", asked, ["acc", "acc_norm"]),
        "continued": ("generate_until", begun, ["exact_match"]),
        "passages": ("loglikelihood_rolling", passages, ["word_perplexity", "bits_per_byte"]),
    }
    made = []
    for name, (kind, records, metrics) in kinds.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(folder)},
            "test_split": "test",
            "output_type": kind,
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{target}}",
            "metric_list": [{"metric": metric} for metric in metrics],
        }
        if kind == "multiple_choice":
            task |= {"doc_to_choice": "{{choices}}"}
        if kind == "generate_until":
            task |= {"generation_kwargs": {"until": ["\n", "."], "max_gen_toks": NEW_TOKENS}}
        made.append(task)
    return made


def both(folder: Path, run: Path, data: Path, tokenizer=None) -> tuple[dict, dict]:
    """What transformers' model in `folder` and ours in `run` make of the tasks, in float32."""
    trained = load_run(str(run), dtype=DType.float32)
    theirs = HFLM(str(folder), tokenizer=tokenizer, dtype="float32", device="cpu", batch_size=BATCH)
    models = (theirs, harness_model(trained, BATCH))
    ours_alone = TaskManager(include_defaults=False)  # to read its own thousands takes 20 s
    actual = [
        simple_evaluate(one, tasks=tasks(data), bootstrap_iters=0, task_manager=ours_alone)
        for one in models
    ]
    return actual[0], actual[1]


def assert_same(theirs: dict, ours: dict) -> None:
    """The scores, and what was answered to every request."""
    assert theirs["samples"].keys() == ours["samples"].keys() == theirs["results"].keys()
    for task, results in theirs["results"].items():
        texts = task == "continued"
        pairs = [
            [
                np.array(sample["resps"], object).ravel().tolist()
                for sample in actual["samples"][task]
            ]
            for actual in (theirs, ours)
        ]
        assert len(pairs[0]) == len(pairs[1]) >= (8 if task != "passages" else 3)
        if texts:
            assert pairs[0] == pairs[1]
            continue
        values, greedy = zip(*[split(answers) for answers in pairs], strict=True)
        np.testing.assert_allclose(
            values[1], values[0], rtol=0, atol=LIKELIHOOD * np.abs(values[0]).max(), err_msg=task
        )
        assert greedy[0] == greedy[1]
        for name, value in results.items():
            if isinstance(value, float):
                np.testing.assert_allclose(ours["results"][task][name], value, rtol=LIKELIHOOD)


def split(answers: list[list]) -> tuple[np.ndarray, list[bool]]:
    flat = [one for answer in answers for one in answer]
    values = [one for one in flat if not isinstance(one, bool)]
    return np.array(values, float), [one for one in flat if isinstance(one, bool)]

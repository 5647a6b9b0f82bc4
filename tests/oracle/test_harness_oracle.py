"""lm-evaluation-harness gives a converted model the scores that it gives transformers' own."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
import transformers
from harness_tasks import BEGUN, PASSAGES, QUESTIONS, assert_same, both, tasks
from hf_folders import LLAMA, random_tensors, write_config, write_tensors

from maxmeg import evaluate
from maxmeg.hf import convert

FAMILY = "LlamaForCausalLM"
BEGIN, END = "<|begin|>", "<|end|>"


def write_tokenizer(folder, opens: bool):
    """Byte-level BPE of the tasks' own texts."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BEGIN, END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for text, _ in [*QUESTIONS, *BEGUN]] + PASSAGES
    made.train_from_iterator(texts, trainer)
    if opens:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)]
        )
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=BEGIN, eos_token=END
    )
    own.save_pretrained(folder)
    return own


@pytest.mark.filterwarnings("ignore")  # of the harness and its libraries
@pytest.mark.parametrize("opens", [False, True])
def test_scores_and_answers_are_the_same(tmp_path, opens, capsys):
    model = dataclasses.replace(LLAMA, vocab_size=400, num_layers=2)
    folder, run, data = tmp_path / "hf", tmp_path / "run", tmp_path / "data"
    tensors = random_tensors(model, FAMILY)
    scaled = {name: array * (0.3 if array.ndim == 2 else 1) for name, array in tensors.items()}
    write_config(folder, model, FAMILY, bos_token_id=0, eos_token_id=1)
    write_tensors(folder, {name: array.astype("f4") for name, array in scaled.items()})
    tokenizer = write_tokenizer(folder, opens)
    convert.import_model(convert.open_folder(folder), run)
    data.mkdir()
    theirs, ours = both(folder, run, data, tokenizer)
    assert_same(theirs, ours)
    texts = [sample["resps"][0][0] for sample in ours["samples"]["continued"]]
    assert len(set(texts)) > 6 and np.mean([len(text) for text in texts]) > 5
    if opens:
        return
    own = data / "answers.yaml"
    own.write_text(json.dumps(tasks(data)[0]))  # JSON is YAML
    options = evaluate.Options(run_dir=str(run), dtype="float32", tasks=(str(own),), limit=8)
    evaluate.main(options)
    score = np.mean([sample["acc"] for sample in ours["samples"]["answers"][:8]])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "|acc     |" in line]
    assert float(row.split("|")[7]) == pytest.approx(score, abs=1e-4)

"""Chats for training are transformers': the same tokens, and the same of them are the assistant's.

Judged by apply_chat_template with return_assistant_tokens_mask, which reads {% generation %} blocks
alone; templates without them are judged by the same templates with blocks.
"""

import json
import random

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from maxmeg.data.chat.answers import encode_turns
from maxmeg.data.chat.template import load_chat_template
from maxmeg.data.chat.turns import BadRow, find_turns
from maxmeg.data.prepare.documents import Record
from maxmeg.data.tokenizers.load import load_tokenizer

WORDS = ["the", " fox", "\n", "  ", "naïve", "東京", "🎉", ".", "1234", "<b>", "Don't", "\t"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
SAID = "what the assistant says"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    f"{SAID}{{% else %}}{{{{ m.content + '<|im_end|>\\n' }}}}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INSTRUCTIONS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + "
    f"' [/INST]' }}}}{{% elif m.role == 'assistant' %}}{SAID}{{% endif %}}{{% endfor %}}"
)
TEMPLATES = {  # and what stands for SAID
    "chatml": (CHATML, "{{ m.content + '<|im_end|>\\n' }}"),
    "instructions": (INSTRUCTIONS, "{{ ' ' + m.content + eos_token }}"),
}


def vocabulary(kind: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<s>" if kind == "metaspace" else None))
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = sorted(set("".join(WORDS)))
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([" ".join(WORDS), "[INST] [/INST] user assistant system\n"], trainer)
    return made


def chats(count: int) -> list[list[dict]]:
    rng = random.Random(0)

    def say(role: str) -> dict:
        # A token that joins a prompt and its answer would have a loss in transformers alone.
        return {"role": role, "content": "the" + "".join(rng.choices(WORDS, k=rng.randint(0, 8)))}

    pairs = [("user", "assistant")] * 3
    return [
        [say("system")] * rng.randint(0, 1)
        + [say(r) for p in pairs[: rng.randint(1, 3)] for r in p]
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(name, kind, tmp_path):
    vocabulary(kind).save(str(tmp_path / "tokenizer.json"))
    rows = chats(60)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    template, said = TEMPLATES[name]
    with_blocks = template.replace(SAID, f"{{% generation %}}{said}{{% endgeneration %}}")
    theirs.chat_template = with_blocks
    wanted = [
        theirs.apply_chat_template(row, return_dict=True, return_assistant_tokens_mask=True)
        for row in rows
    ]
    records = [Record("x", i, json.dumps({"messages": row}).encode()) for i, row in enumerate(rows)]
    for text in (with_blocks, template.replace(SAID, said)):
        settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": text}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        ours = load_tokenizer(f"huggingface:{tmp_path}")
        actual = [turns for _, turns in find_turns(load_chat_template(ours), records)]
        for turns, expected in zip(actual, wanted, strict=True):
            assert not isinstance(turns, BadRow), turns
            ((ids, has_loss),) = encode_turns(ours, turns)
            assert ids.tolist() == list(expected["input_ids"])
            assert has_loss.tolist() == list(expected["assistant_masks"])

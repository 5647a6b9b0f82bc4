"""The tokens that end a generated text, and the end of the turns that chats were trained with."""

import logging
import math

from maxmeg.config.data import DataConfig, Objective
from maxmeg.data.chat.template import (
    ChatTemplate,
    has_chat_template,
    hugging_face_folder,
    load_chat_template,
)
from maxmeg.data.chat.turns import MARKS
from maxmeg.data.tokenizers.load import parse_spec
from maxmeg.data.tokenizers.tokenizer import Tokenizer, json_object, special_name

logger = logging.getLogger("maxmeg")
_ANSWER = "Yqzwx"  # an answer whose end is looked for in the text of a template
_CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]


def end_tokens(tokenizer: Tokenizer, data: DataConfig, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a generated text.

    They are the eos_token_id of generation_config.json, or of config.json, beside a tokenizer.json;
    without these files, or if data.tokenizer sets eod, the end of a document. A run that was
    trained on chats also has the end of the template's turns.
    """
    ends = _named(tokenizer, vocab_size)
    turn_ends, _ = _trained(tokenizer, data)
    return ends if {*ends} & {*turn_ends} else (*ends, *turn_ends[-1:])


def log_ends(tokenizer: Tokenizer, data: DataConfig) -> None:
    """Log the end of turns that training on chats adds; warn if turns have no such end."""
    ends, (turn_ends, text) = _named(tokenizer, math.inf), _trained(tokenizer, data)
    if {*ends} & {*turn_ends}:
        return
    names = ", ".join(repr(special_name(tokenizer, i)) for i in ends)
    if turn_ends:
        added = repr(special_name(tokenizer, turn_ends[-1]))
        logger.info(f"the chat template ends turns with {added}: it ends generation, as {names}")
        return
    trained = f"with {text!r}, which is no special token" if text else "without a token"
    logger.warning(
        f"the loss of an assistant's turn ends {trained}, and generation ends at {names}, which "
        "the turns do not train: the model may not stop; give a template that writes an end of "
        "turn after the answer, within {% generation %} blocks if it has them "
        "(data.chat_template=FILE)"
    )


def _named(tokenizer: Tokenizer, vocab_size: float) -> tuple[int, ...]:
    """The end tokens that the files beside the tokenizer name."""
    has_eod = "eod" in parse_spec(tokenizer.spec).roles
    folder = None if has_eod else hugging_face_folder(tokenizer)
    for name in ("generation_config.json", "config.json") if folder else ():
        assert folder is not None
        eos = json_object(folder / name).get("eos_token_id")
        if eos is None:
            continue
        ends = eos if isinstance(eos, list) else [eos]
        wrong = [i for i in ends if type(i) is not int or not 0 <= i < vocab_size]
        if wrong or not ends:
            raise ValueError(
                f"{folder / name}: eos_token_id={eos!r} must be one or a list of the model's "
                f"token ids, 0 to {vocab_size - 1}"
            )
        return tuple(ends)
    return (tokenizer.eod,)


def _trained(tokenizer: Tokenizer, data: DataConfig) -> tuple[list[int], str]:
    """The special tokens that have a loss after an answer, and the text with a loss there; nothing
    for runs that were not trained on chats."""
    is_chat = data.objective is Objective.sft and has_chat_template(tokenizer, data.chat_template)
    if not is_chat:
        return [], ""
    text = _trained_end(load_chat_template(tokenizer, data.chat_template))
    special = {*tokenizer.special_ids, *tokenizer.added.values()}
    ids = tokenizer.encode_marked(text, tokenizer.added).tolist()
    return [i for i in ids if i in special], text


def _trained_end(template: ChatTemplate) -> str:
    """The text with a loss after an answer; "" if the template does not render this chat."""
    answer = template.answer([{"messages": _CHAT, "add_generation_prompt": False}], MARKS)
    text = "".join(answer["texts"]).rpartition(_ANSWER)[2]
    return text.partition(MARKS[1])[0] if answer["generation"] else text

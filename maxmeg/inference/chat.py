"""The system message of a chat, and the tokens that end a generated text."""

from maxmeg.data.chat.template import Messages, hugging_face_folder
from maxmeg.data.tokenizers.load import parse_spec
from maxmeg.data.tokenizers.tokenizer import Tokenizer, json_object


def with_system(messages: Messages, system: str) -> Messages:
    """Prepend a system message, unless `system` is empty or the messages have one already."""
    if not system or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def end_tokens(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a generated text.

    They are the eos_token_id of generation_config.json, or of config.json, beside a tokenizer.json;
    without these files, or if data.tokenizer sets eod, the end of a document.
    """
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

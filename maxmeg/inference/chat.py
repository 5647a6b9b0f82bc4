"""What a chat needs before and after its template: the system's message, tokens that end a text."""

from maxmeg.data.chat import Messages, hugging_face_folder
from maxmeg.data.tokenizers import Tokenizer, json_object, parse_spec


def with_system(messages: Messages, system: str) -> Messages:
    """The messages after one of the system's, if there is to be one and none is there."""
    if not system or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def end_tokens(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a text: eos_token_id of generation_config.json, or of config.json, beside a
    tokenizer.json; else, or if the tokenizer's spec names it, the end of a document."""
    own = "eod" in parse_spec(tokenizer.spec).roles
    folder = None if own else hugging_face_folder(tokenizer)
    for name in ("generation_config.json", "config.json") if folder else ():
        assert folder is not None
        found = json_object(folder / name).get("eos_token_id")
        if found is None:
            continue
        ends = found if isinstance(found, list) else [found]
        wrong = [i for i in ends if type(i) is not int or not 0 <= i < vocab_size]
        if wrong or not ends:
            raise ValueError(
                f"{folder / name}: eos_token_id={found!r} must be a token of the model's "
                f"vocabulary, 0 to {vocab_size - 1}, or a list of such"
            )
        return tuple(ends)
    return (tokenizer.eod,)

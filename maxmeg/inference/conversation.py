"""A conversation in a terminal."""

import itertools
from collections.abc import Callable, Iterator

Messages = list[dict[str, str]]


def converse(answer: Callable[[Messages, int], Iterator[str]], read: Callable[[], str]) -> None:
    """Read the user's messages and print the answers, until /exit or the end of the input.

    answer(messages, turn): the pieces of the next answer; a ValueError is printed, and the message
    forgotten. Ctrl-C ends the answer, which stays in the conversation as far as it was written.
    """
    messages: Messages = []
    for turn in itertools.count():
        try:
            line = read().strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")
            continue
        if line == "/exit":
            return
        if line == "/reset":
            messages = []
            print("(new conversation)")
        elif line.startswith("/"):
            print(f"({line} is no command: /reset or /exit)")
        elif line:
            question = {"role": "user", "content": line}
            if text := printed(answer([*messages, question], turn)):
                messages += [question, {"role": "assistant", "content": text}]


def printed(pieces: Iterator[str]) -> str:
    """Print the pieces of a text as they come; return it, as far as it came."""
    text = ""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            text += piece
    except KeyboardInterrupt:
        print(" (ended)", end="")
    except ValueError as error:
        print(f"error: {error}", end="")
    print()
    return text

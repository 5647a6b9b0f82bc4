"""What servers of all models have: the endpoints of their names, tokenizers, health and metrics."""

import asyncio
import concurrent.futures
import functools
import math
import time
import typing
from collections.abc import Callable, Sequence

import fastapi
import numpy as np
from starlette.responses import Response

from maxmeg.config.options import Serve
from maxmeg.data.chat.template import hugging_face_folder
from maxmeg.data.tokenizers.tokenizer import Tokenizer, json_object
from maxmeg.inference.load import Trained
from maxmeg.inference.prompts import prompt_tokens
from maxmeg.inference.requests import check_ids
from maxmeg.server.errors import ApiError, Json
from maxmeg.server.fields import Detokenize, Tokenize

LARGEST = {"temperature": 2, "top_p": 1}


class Served:
    """The model that is served, its name and tokenizer, which is used by one thread.

    ValueError and ApiError for what a client did wrong.
    """

    template_text: str | None = None  # of chats

    def __init__(self, trained: Trained, name: str, options: Serve) -> None:
        self.name, self.options, self.tokenizer = name, options, trained.tokenizer
        config = trained.config
        self.names = name, *trained.adapters
        self.config, self.model, self.data = config, config.model, config.data
        self._encoder = concurrent.futures.ThreadPoolExecutor(1)

    def check_name(self, name: str | None) -> None:
        if name not in (None, *self.names):
            names = ", ".join(map(repr, self.names))
            raise ApiError(404, f"model {name!r} is not served, only {names}", "model")

    async def encode(self, function: Callable, *arguments: typing.Any) -> typing.Any:
        """Call a function that uses the tokenizer."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoder, function, *arguments)

    @functools.cached_property
    def longest_token(self) -> float:
        """Most characters that one token stands for; inf if the tokenizer does not tell."""
        lengths = self.tokenizer.token_bytes()
        names = [*self.tokenizer.added]  # special tokens
        return max(map(len, [*lengths.values(), *names])) if lengths else math.inf

    def check_length(self, text: str) -> None:
        """ApiError for a text that cannot fit: it would keep the tokenizer from others."""
        most = self.options.max_prompt or self.model.max_position
        if len(text) > 4 * most and len(text) > most * self.longest_token:
            raise ApiError(
                400,
                f"a text of {len(text)} characters has more than {most} tokens: each stands for at "
                f"most {self.longest_token} characters",
            )

    def tokens(self, text: str, opening: bool = True) -> list[int]:
        self.check_length(text)
        return prompt_tokens(self.tokenizer, self.config, text, opening).tolist()

    def text(self, ids: Sequence[int]) -> str:
        check_ids(np.array([0, *ids]), self.model.vocab_size)
        return self.tokenizer.decode(ids)

    def info(self) -> dict[str, typing.Any]:
        """What lm-eval asks for before it uses the tokenizer of a server, and the settings with
        which the chat page begins."""
        tokenizer = self.tokenizer
        roles = {"eos": tokenizer.eod, "bos": tokenizer.bos, "pad": tokenizer.pad}
        named = {
            f"{k}_token": None if i is None else tokenizer.decode([i]) for k, i in roles.items()
        }
        defaults = generation_defaults(tokenizer)
        return {**named, "chat_template": self.template_text, "generation": defaults}


def generation_defaults(tokenizer: Tokenizer) -> dict[str, float]:
    """Return temperature and top_p of generation_config.json beside a tokenizer.json, as far as
    the server takes their values."""
    folder = hugging_face_folder(tokenizer)
    settings = json_object(folder / "generation_config.json") if folder else {}
    if settings.get("do_sample") is False:
        return {}
    values = {name: settings.get(name) for name in LARGEST}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and 0 < value <= LARGEST[name]
    }


def several(texts: str | Sequence) -> Sequence[str | Sequence[int]]:
    """Return the texts, or lists of token ids, of a field that may hold one of them."""
    is_one = isinstance(texts, str) or (texts and isinstance(texts[0], int))
    return [texts] if is_one else texts


def add_endpoints(
    app: fastapi.FastAPI,
    served: Served,
    is_warm: Callable[[], bool],
    metrics: Callable[[], bytes],
) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        model = {"object": "model", "created": created, "owned_by": "maxmeg"}
        model["max_model_len"] = served.model.max_position
        parents = {each: served.name if each != served.name else None for each in served.names}
        data = [{"id": each, "parent": parent, **model} for each, parent in parents.items()]
        return Json({"object": "list", "data": data})

    @app.post("/tokenize")
    async def tokenize(body: Tokenize) -> Response:
        served.check_name(body.model)
        ids = await served.encode(served.tokens, body.prompt, body.add_special_tokens)
        return Json({"tokens": ids, "count": len(ids), "max_model_len": served.model.max_position})

    @app.post("/detokenize")
    async def detokenize(body: Detokenize) -> Response:
        served.check_name(body.model)
        return Json({"prompt": await served.encode(served.text, body.tokens)})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return Json(await served.encode(served.info))

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if is_warm() else 503)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4")

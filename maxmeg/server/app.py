"""The endpoints."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence

import fastapi
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.pages.templates import render
from maxmeg.server.answers import ChatChoice, Choice, TextChoice, usage
from maxmeg.server.errors import ApiError, Json, add_handlers, as_json, body_of
from maxmeg.server.fields import Chat, Completion, Generation
from maxmeg.server.gate import Gate
from maxmeg.server.metrics import Metrics
from maxmeg.server.served import add_endpoints, several
from maxmeg.server.worker import Ticket, Update, Worker
from maxmeg.server.writer import ServedWriter

DEFAULT_TOKENS = 16  # of /v1/completions, as OpenAI's
PAGE = render("chat.html")


class Api:
    """Answers requests to generate text."""

    def __init__(self, served: ServedWriter, worker: Worker) -> None:
        self.served, self.worker, self.options = served, worker, served.options
        self.name = served.name
        self._watches: set[asyncio.Task] = set()

    async def completion(self, http: fastapi.Request, body: Completion) -> Response:
        self.served.check_name(body.model)
        if body.echo and self.served.model.has_source:
            raise ApiError(400, "echo=true is not supported for encoder-decoder models", "echo")
        limit = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        scores = bool(body.echo) and (body.logprobs is not None or limit == 0)
        sampling = body.sampling(body.logprobs or 0)
        with self.worker.places(self.replies(body, len(several(body.prompt)))):
            prompts = await self.served.encode(self.served.prompts, body.prompt)
            ticket = await self.ticket(http, body, prompts, sampling, limit, scores)
            await self.worker.submit(ticket)

        def choice(number: int) -> Choice:
            prompt = prompts[number // ticket.n]
            return TextChoice(self.served.tokenizer, prompt, bool(body.echo))

        return await self.answer(http, body, ticket, choice, body.logprobs is not None)

    async def chat(self, http: fastapi.Request, body: Chat) -> Response:
        self.served.check_name(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
        limits = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
        sampling = body.sampling(body.top_logprobs or 0)
        with self.worker.places(self.replies(body, 1)):
            prompt = await self.served.chat(body)
            room = self.served.model.max_position - len(prompt)
            limit = limits[0] if limits else max(room, 1)
            ticket = await self.ticket(http, body, [prompt], sampling, limit, False)
            await self.worker.submit(ticket)
        form = self.served.form(body.model) if body.may_call else None
        is_single = body.parallel_tool_calls is False

        def choice(number: int) -> Choice:
            return ChatChoice(self.served.tokenizer, form, is_single)

        return await self.answer(http, body, ticket, choice, bool(body.logprobs))

    def replies(self, body: Generation, prompts: int) -> int:
        """The number of replies to so many prompts; ApiError if the server never takes so many."""
        n, most = body.n or 1, self.worker.capacity
        if n > self.options.max_n:
            raise ApiError(400, f"n={n} exceeds {self.options.max_n}", "n")
        if prompts * n > most:
            raise ApiError(400, f"{prompts * n} replies exceed {most}", "n")
        return prompts * n

    async def ticket(
        self,
        http: fastapi.Request,
        body: Generation,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        limit: int,
        scores: bool,
    ) -> Ticket:
        """Check what the limits of the server and the fields together refuse."""
        options, n = self.options, body.n or 1
        longest = max(map(len, prompts), default=0)
        if not longest:
            raise ApiError(400, "the prompt is empty", "prompt")
        if options.max_prompt and longest > options.max_prompt:
            raise ApiError(400, f"a prompt of {longest} tokens exceeds {options.max_prompt}")
        if body.stream_options and not body.stream:
            raise ApiError(400, "stream_options needs stream=true", "stream_options")
        grammar, source = await self.served.grammar(body)
        if grammar and body.ignore_eos:
            raise ApiError(400, "a grammar decides where the reply ends", "ignore_eos")
        adapter = "" if body.model in (None, self.name) else body.model
        ends = () if body.ignore_eos else self.served.engine.ends
        chosen = ends, body.stops, grammar, scores, adapter
        request = Request(limit, sampling, *chosen)
        seed = secrets.randbits(32) if body.seed is None else body.seed
        return Ticket(http.state.id, prompts, request, seed, n, bool(body.stream), source)

    async def answer(
        self,
        http: fastapi.Request,
        body: Generation,
        ticket: Ticket,
        choice: Callable[[int], Choice],
        logprobs: bool,
    ) -> Response:
        watch = asyncio.create_task(self._watch(http, ticket))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        choices = [choice(number) for number in range(ticket.count)]
        kind = choices[0].object
        head = {"id": ticket.id, "object": kind, "created": int(time.time())}
        head |= {"model": body.model or self.name, "seed": ticket.seed}
        pieces = self._pieces(ticket, choices, logprobs)
        if body.stream:
            with_usage = bool(body.stream_options and body.stream_options.include_usage)
            events = self._events(ticket, pieces, head, with_usage)
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(events, headers=headers, media_type="text/event-stream")
        entries, count = [], 0
        async for index, piece, new in pieces:
            if "delta" in piece:
                piece["message"] = {"content": None, "refusal": None} | piece.pop("delta")
                for call in piece["message"].get("tool_calls", ()):
                    del call["index"]
            entries.append({"index": index, **piece})
            count += new
        entries.sort(key=lambda each: each["index"])
        return Json({**head, "choices": entries, "usage": usage(ticket.prompts, count)})

    async def _pieces(
        self, ticket: Ticket, choices: Sequence[Choice], logprobs: bool
    ) -> AsyncIterator[tuple[int, dict, int]]:
        """The index, the news and the number of new tokens of each update."""
        left = ticket.count
        while left:
            update: Update = await ticket.updates.get()
            if update.reason in ("error", "cancelled", "grammar"):
                status = 400 if update.reason == "grammar" else 500
                raise ApiError(status, update.error or "the reply was cancelled")
            left -= bool(update.reason)
            yield update.index, choices[update.index].update(update, logprobs), len(update.tokens)

    async def _events(
        self, ticket: Ticket, pieces: AsyncIterator, head: dict, with_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events. A piece without text, call, number or reason is left out."""
        head = head | {"object": head["object"].replace("chat.completion", "chat.completion.chunk")}
        count, rest = 0, {"usage": None} if with_usage else {}
        try:
            async for index, piece, new in pieces:
                count += new
                if any(piece.values()):
                    yield event({**head, "choices": [{"index": index, **piece}], **rest})
            if with_usage:
                yield event({**head, "choices": [], "usage": usage(ticket.prompts, count)})
        except ApiError as error:
            yield event(body_of(error.status_code, error.detail))
        yield "data: [DONE]\n\n"

    async def _watch(self, http: fastapi.Request, ticket: Ticket) -> None:
        """Cancel a ticket when its client is gone or its answer has been sent."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.worker.cancel(ticket)


def event(content: dict) -> str:
    return f"data: {as_json(content)}\n\n"


def make_app(
    served: ServedWriter, worker: Worker, metrics: Metrics, failed: Callable[[], None]
) -> ASGIApp:
    """failed: what to call when the engine has ended."""

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        worker.start(asyncio.get_running_loop(), failed)
        yield
        await asyncio.to_thread(worker.stop)

    app = fastapi.FastAPI(title="maxmeg", lifespan=lifespan, docs_url=None, redoc_url=None)
    api = Api(served, worker)
    add_handlers(app)
    add_endpoints(app, served, lambda: worker.is_warm, metrics.text)

    @app.post("/v1/completions")
    async def completions(http: fastapi.Request, body: Completion) -> Response:
        return await api.completion(http, body)

    @app.post("/v1/chat/completions")
    async def chat(http: fastapi.Request, body: Chat) -> Response:
        return await api.chat(http, body)

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise ApiError(400, f"{served.name} predicts tokens, and has no embeddings of texts")

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE)

    options = served.options
    size = int(options.max_body_mb * 1e6)
    return Gate(app, options.api_key, size, served.model.max_position)

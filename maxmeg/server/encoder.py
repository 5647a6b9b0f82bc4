"""The server of a bidirectional model: embeddings of texts.

The requests are computed one after the other, in a thread of their own.
"""

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import fastapi
import numpy as np
import prometheus_client as prometheus
from jaxtyping import Float
from starlette.responses import Response
from starlette.types import ASGIApp

from maxmeg.config.options import EngineOptions, ModelOptions, Serve
from maxmeg.inference.embeddings import Pooling, embedders
from maxmeg.inference.load import Trained
from maxmeg.server.errors import ApiError, Json, add_handlers
from maxmeg.server.fields import Embeddings
from maxmeg.server.gate import Gate
from maxmeg.server.metrics import TIMES
from maxmeg.server.served import Served, add_endpoints, several

MOST_TEXTS = 2048  # in a request, as OpenAI's


class ServedEncoder(Served):
    def __init__(self, trained: Trained, name: str, options: Serve) -> None:
        super().__init__(trained, name, options)
        self.embedder, self.of_queries = embedders(trained, few=True, longest=options.max_prompt)

    def tokens(self, text: str, opening: bool = True) -> list[int]:
        first, last = self.embedder.ends if opening else ([], [])
        return [*first, *self.tokenizer.encode(text).tolist(), *last]


class Numbers:
    """What Prometheus reads, by the names of vLLM's metrics after "maxmeg:"."""

    def __init__(self) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        self.waiting = prometheus.Gauge(
            "maxmeg:num_requests_waiting", "requests without an answer", registry=registry
        )
        self.tokens = prometheus.Counter(
            "maxmeg:prompt_tokens", "tokens of texts", registry=registry
        )
        self.times = prometheus.Histogram(
            "maxmeg:e2e_request_latency_seconds",
            "from the arrival of a request to its end",
            registry=registry,
            buckets=TIMES,
        )

    def text(self) -> bytes:
        return prometheus.generate_latest(self.registry)


class EncoderWorker:
    """Runs the model. failure: what ended it before it was warm."""

    def __init__(self, served: ServedEncoder) -> None:
        self.embedder, self.of_queries = served.embedder, served.of_queries
        self.numbers = Numbers()
        self.most_waiting, self.waiting = served.options.max_queue, 0
        self.is_warm, self.failure = False, None
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    async def run(self, function: Callable, *arguments: typing.Any) -> typing.Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def warm_up(self, failed: Callable[[], None]) -> None:
        try:
            for embedder in dict.fromkeys((self.embedder, self.of_queries)):
                await self.run(embedder.warm_up)
            self.is_warm = True
        except Exception as error:
            self.failure = error
            failed()

    def stop(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The time that a request has to wait for others and to be computed."""
        if not self.is_warm:
            raise ApiError(503, "the model is not ready", retry=5)
        if self.waiting > self.most_waiting:
            raise ApiError(429, f"{self.waiting} requests are under way: try again later", retry=1)
        self.waiting += 1
        self.numbers.waiting.set(self.waiting)
        try:
            with self.numbers.times.time():
                yield
        finally:
            self.waiting -= 1
            self.numbers.waiting.set(self.waiting)

    async def embeddings(
        self, http: fastapi.Request, rows: Sequence[Sequence[int]], pooling: Pooling, queries: bool
    ) -> Float[np.ndarray, "N D"]:
        """Requests take turns after each batch. Ends when the client has gone."""
        embedder = self.of_queries if queries else self.embedder
        vectors = np.zeros((len(rows), embedder.width), np.float32)
        for batch in embedder.batches(rows):
            if await http.is_disconnected():
                raise ApiError(499, "the client has gone")
            numbers = batch.numbers
            vectors[numbers] = await self.run(embedder.run, batch, pooling)
        self.numbers.tokens.inc(sum(map(len, rows)))
        return vectors


def check_options(options: Serve) -> None:
    """ValueError for options that have no meaning for an encoder."""
    names = {f.name for f in dataclasses.fields(EngineOptions)}
    names -= {f.name for f in dataclasses.fields(ModelOptions)}
    names |= {"log", "max_n", "max_grammar", "grammar_seconds", "mask_seconds"}
    default = Serve()
    if changed := sorted(n for n in names if getattr(options, n) != getattr(default, n)):
        raise ValueError(
            f"{', '.join(f'--{name}' for name in changed)}: these options configure text "
            "generation; the model is bidirectional, and only serves embeddings: leave them out"
        )


def make_encoder_app(
    served: ServedEncoder, worker: EncoderWorker, failed: Callable[[], None]
) -> ASGIApp:
    """failed: what to call when the model cannot be run."""
    options = served.options

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        warming = asyncio.create_task(worker.warm_up(failed))
        yield
        worker.stop()
        warming.cancel()

    app = fastapi.FastAPI(title="maxmeg", lifespan=lifespan, docs_url=None, redoc_url=None)
    add_handlers(app)
    add_endpoints(app, served, lambda: worker.is_warm, worker.numbers.text)

    @app.post("/v1/embeddings")
    async def embeddings(http: fastapi.Request, body: Embeddings) -> Response:
        served.check_name(body.model)
        texts, width = several(body.input), served.embedder.width
        pooling = body.pooling or served.embedder.default
        if not 0 < len(texts) <= MOST_TEXTS:
            raise ApiError(400, f"input has {len(texts)} texts: give 1 to {MOST_TEXTS}", "input")
        if body.dimensions not in (None, width):
            text = f"dimensions={body.dimensions}: the model's embeddings have {width} numbers"
            raise ApiError(400, text, "dimensions")
        served.embedder.check(pooling)
        with worker.turn():
            rows = await served.encode(served.embedder.rows, texts, bool(body.truncate))
            is_query = body.input_type == "query"
            array = await worker.embeddings(http, rows, pooling, is_query)
        count = sum(map(len, rows))
        is_coded = body.encoding_format == "base64"
        vectors = [coded(v) for v in array] if is_coded else array.tolist()
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ]
        head = {"object": "list", "model": served.name, "data": data}
        return Json(head | {"usage": {"prompt_tokens": count, "total_tokens": count}})

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def no_text() -> Response:
        raise ApiError(400, f"{served.name} is bidirectional: it has /v1/embeddings, and no text")

    size = int(options.max_body_mb * 1e6)
    return Gate(app, options.api_key, size, served.model.max_position)


def coded(vector: Float[np.ndarray, " D"]) -> str:
    """Return the bytes of the little-endian float32 numbers in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()

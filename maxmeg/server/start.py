"""From options to a server: the engine of a causal model, or the embeddings of another."""

import dataclasses
from collections.abc import Callable

from starlette.types import ASGIApp

from maxmeg.config.options import EngineOptions, Serve
from maxmeg.inference.adapters import named_folders, with_adapters
from maxmeg.inference.engine import Engine
from maxmeg.inference.followers import Leader
from maxmeg.inference.load import Trained, load_chosen
from maxmeg.inference.mesh import serving_mesh
from maxmeg.server.app import make_app
from maxmeg.server.encoder import EncoderWorker, ServedEncoder, check_options, make_encoder_app
from maxmeg.server.journal import Journal
from maxmeg.server.metrics import Metrics
from maxmeg.server.worker import Worker
from maxmeg.server.writer import ServedWriter

UNSHARED = (
    "prefix caching is off: no prefix cache can hold the recurrent state of this model's layers; "
    "each prompt is computed in full"
)


def make_server(
    options: Serve, name: str, trained: Trained, link: Leader, stop: Callable[[], None]
) -> tuple[ASGIApp, Worker | EncoderWorker]:
    """Return the application and what runs the model. stop: ends the server."""
    if not trained.config.model.attention.causal:
        check_options(options)
        encoder = ServedEncoder(trained, name, options)
        worker = EncoderWorker(encoder)
        return make_encoder_app(encoder, worker, stop), worker
    engine = load(options, trained)
    link.lead(engine.programs)
    metrics, served = Metrics(), ServedWriter(engine, name, options)
    observers: list = [metrics]
    if options.log:
        shape = {f.name: getattr(options, f.name) for f in dataclasses.fields(EngineOptions)}
        file = open(options.log, "a", encoding="utf-8")  # noqa: SIM115  (open as long as it serves)
        observers.append(Journal(file, shape | {"step": trained.step}))
    worker = Worker(engine, len(engine.scheduler.lanes) + options.max_queue, observers)
    return make_app(served, worker, metrics, stop), worker


def load_base(options: EngineOptions) -> Trained:
    """ValueError for a bidirectional model in several processes."""
    mesh = serving_mesh(options.tensor, options.expert, options.data)
    trained = load_chosen(options, mesh, options.mtp)
    if mesh.is_multi_process and not trained.config.model.attention.causal:
        raise ValueError("a bidirectional model is served by one process: start no others")
    return trained


def load(options: EngineOptions, base: Trained | None = None) -> Engine:
    """base: the model without its adapters, if it is loaded already."""
    trained = with_adapters(base or load_base(options), named_folders(options.adapters))
    sizes = options.max_num_seqs, options.pages, options.block_size, options.chunk
    proposals = options.speculative_tokens or trained.config.model.mtp.num_layers
    engine = Engine(trained, *sizes, options.max_prefill_tokens, options.share, proposals)
    if options.share and not engine.scheduler.limits.shares:
        print(UNSHARED, flush=True)
    return engine

"""Serve a model over HTTP with OpenAI's API: maxmeg serve runs/smollm2

The API is at http://127.0.0.1:8000/v1, a chat page at http://127.0.0.1:8000. A reply depends on its
request and seed, and not on what else is served: with --log=FILE, `maxmeg replay FILE` repeats all
requests, and says which replies are not the same. Needs pip install 'maxmeg[serve]'.
"""

import sys

if __name__ == "__main__":  # before the imports: a mistake needs no JAX
    from maxmeg.__main__ import run_module

    if sys.argv[1:2] == ["replay"]:  # python -m maxmeg.serve replay LOG
        del sys.argv[1]
        run_module("replay")
    run_module("serve")

import dataclasses
import ipaddress
import signal
import socket
import typing
from pathlib import Path

import uvicorn

from maxmeg.config.options import Replay, Serve
from maxmeg.config.setting import former_names
from maxmeg.inference.adapters import named_folders
from maxmeg.inference.followers import Follower, Leader, together
from maxmeg.runtime.faults.out_of_memory import explains_out_of_memory
from maxmeg.server.connections import Connection, allow_many
from maxmeg.server.journal import read_log, replayed
from maxmeg.server.start import load, load_base, make_server

REMEDY = "lower --max_num_seqs or --pages, set --dtype=bfloat16 or raise --tensor"


@together
@explains_out_of_memory(REMEDY)
def main(options: Serve, link: Leader | Follower) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    if isinstance(link, Follower):
        return link.follow(load(options).programs)
    if options.api_key.startswith("@"):
        key = Path(options.api_key[1:]).read_text("utf-8").strip()
        options = dataclasses.replace(options, api_key=key)
    elif not options.api_key and not is_local(options.host):
        raise ValueError(
            f"--host={options.host} lets other machines use the server without a key: set "
            "--api_key=KEY or --api_key=@FILE, or --api_key=none if everyone may use it"
        )
    elif options.api_key == "none":
        options = dataclasses.replace(options, api_key="")
    allow_many()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    name = options.name or Path(options.run_dir).resolve().name
    named_folders(options.adapters, name)
    with socket.create_server((options.host, options.port), family=family) as listener:
        trained = load_base(options)

        def stop() -> None:
            server.should_exit = server.force_exit = True

        app, worker = make_server(options, name, trained, link, stop)
        grace: typing.Any = options.drain_seconds
        settings: dict[str, typing.Any] = {"log_level": "warning", "access_log": False}
        settings |= {"timeout_graceful_shutdown": grace, "http": Connection}
        server = uvicorn.Server(uvicorn.Config(app, **settings))

        def drain(*_) -> None:  # for a signal before uvicorn runs, which raises others at its end
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, drain)
        host, port = listener.getsockname()[:2]
        print(f"{name}, step {trained.step}, at http://{host}:{port}/v1", flush=True)
        server.run(sockets=[listener])
        if link.connections:  # nothing may be sent after the end
            worker.stop()
        if worker.failure:
            raise worker.failure


def is_local(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def replay(options: Replay) -> None:
    """Repeat the requests of a log. SystemExit with code 1 if a reply is not the same."""
    if repeat(options):
        raise SystemExit(1)


@together
@explains_out_of_memory(REMEDY)
def repeat(options: Replay, link: Leader | Follower) -> int:
    """Repeat the requests of a log; return the number of those whose replies are not the same."""
    shape, lines = read_log(options.log)
    shape |= {"run_dir": options.run_dir} if options.run_dir else {}
    former = former_names(Serve)  # in the logs of earlier servers
    engine, differ = load(Serve(**{former.get(n, n): value for n, value in shape.items()})), 0
    if isinstance(link, Follower):
        link.follow(engine.programs)
        return 0
    link.lead(engine.programs)
    for number, text in replayed(engine, lines):
        differ += bool(text)
        print(f"{number}: {text or 'the same'}")
    print(f"{len(lines)} requests, {differ} of them not the same")
    return differ

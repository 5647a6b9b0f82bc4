"""What Prometheus reads, by the names of vLLM's metrics after "maxmeg:"."""

import prometheus_client as prometheus

from maxmeg.inference.engine import Engine
from maxmeg.server.worker import Ticket

TIMES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
GAUGES = {
    "num_requests_running": "requests in lanes",
    "num_requests_waiting": "requests without a lane",
    "kv_cache_usage_perc": "share of the cache's pages in use, 0 to 1",
    "lane_usage_perc": "share of the lanes of all decode steps that gave a token, 0 to 1",
    "compiles_after_warm_up": "programs compiled while serving; 0 is right",
    "num_preemptions_total": "requests that gave up their pages for others",
    "prefix_cache_hits_total": "tokens of prompts that were in the cache already",
}
COUNTERS = {
    "prompt_tokens": "tokens of prompts",
    "generation_tokens": "new tokens",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "from the arrival of a request",
    "inter_token_latency_seconds": "from one token of a reply to the next",
    "e2e_request_latency_seconds": "from the arrival of a request to its end",
    "step_time_seconds": "of one step of the engine",
}


class Metrics:
    """An observer of a worker; its methods are called in the engine's thread."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        self.gauges, self.counters = (
            {n: kind(f"maxmeg:{n}", text, registry=self.registry) for n, text in names.items()}
            for kind, names in ((prometheus.Gauge, GAUGES), (prometheus.Counter, COUNTERS))
        )
        self.times = {
            name: prometheus.Histogram(
                f"maxmeg:{name}", text, registry=self.registry, buckets=TIMES
            )
            for name, text in HISTOGRAMS.items()
        }
        self.finished = prometheus.Counter(
            "maxmeg:request_success", "ended replies", ["finished_reason"], registry=self.registry
        )
        self._programs: int | None = None

    def text(self) -> bytes:
        return prometheus.generate_latest(self.registry)

    def token(self, count: int, seconds: float, is_first: bool) -> None:
        self.counters["generation_tokens"].inc(count)
        kind = "time_to_first_token_seconds" if is_first else "inter_token_latency_seconds"
        self.times[kind].observe(seconds)

    def ended(self, ticket: Ticket, seconds: float) -> None:
        self.counters["prompt_tokens"].inc(sum(map(len, ticket.prompts)))
        self.times["e2e_request_latency_seconds"].observe(seconds)
        for reply in ticket.replies:
            self.finished.labels(reply.reason).inc()

    def stepped(self, engine: Engine, seconds: float) -> None:
        self.times["step_time_seconds"].observe(seconds)
        scheduler, programs = engine.scheduler, engine.programs.compiled()
        self._programs = programs if self._programs is None else self._programs
        lanes, pages = len(scheduler.lanes), scheduler.pages
        total = sum(scheduler.limits.pages for _ in pages)
        values = {
            "num_requests_running": lanes - scheduler.lanes.count(None),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": 1 - sum(each.available for each in pages) / total,
            "lane_usage_perc": engine.decoded / max(engine.decode_steps * lanes, 1),
            "compiles_after_warm_up": programs - self._programs,
            "num_preemptions_total": scheduler.preemptions,
            "prefix_cache_hits_total": scheduler.shared_tokens,
        }
        for name, value in values.items():
            self.gauges[name].set(value)

"""Makes deploy/grafana/*.json, three dashboards, of one table: each row a panel with its expressions.

`INTERVAL` stands for the range of rates, which Grafana chooses by the zoom; `JOB` for the jobs that are chosen there.
Every expression returns data of a node under load (tests/deploy/test_dashboards.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster.processes.children import ROOT

FOLDER = ROOT / "deploy" / "grafana"
INTERVAL, JOB = "$__rate_interval", "$job"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39  # of Grafana 10.4 and later, which migrate older ones
WIDTH, HEIGHT, IN_ROW = 12, 8, 2


class Panel(NamedTuple):
    """One chart. `shown`: expression and legend of each of its lines; `unit`: as Grafana names it."""

    title: str
    unit: str
    shown: Sequence[tuple[str, str]]
    words: str = ""


FAILED = 'code=~"5.."'


def rate(metric: str, by: str = "", where: str = "") -> str:
    return f"sum {f'by ({by}) ' if by else ''}(rate({metric}{f'{{{where}}}' if where else ''}[{INTERVAL}]))"


def share(part: str, whole: str, by: str = "") -> str:
    """The rate of one counter over that of another one."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def quantiles(metric: str, by: str, *wanted: float) -> Sequence[tuple[str, str]]:
    rates = rate(f"{metric}_bucket", f"le, {by}")
    return [(f"histogram_quantile({each}, {rates})", f"p{100 * each:g} {{{{{by}}}}}") for each in wanted]


def process(metric: str) -> str:
    return f'{metric}{{job=~"{JOB}"}}'


TRAFFIC = (
    Panel("Requests by status", "reqps", [(rate("ranvier_requests_total", "code"), "{{code}}")]),
    Panel("Requests by model", "reqps", [(rate("ranvier_requests_total", "model"), "{{model}}")]),
    Panel("Requests by tenant", "reqps", [(rate("ranvier_requests_total", "tenant"), "{{tenant}}")]),
    Panel(
        "Share of requests that failed",
        "percentunit",
        [
            (
                f"({rate('ranvier_requests_total', where=FAILED)} or vector(0)) / {rate('ranvier_requests_total')}",
                "5xx",
            )
        ],
        "The alert RanvierErrors begins at 2 %.",
    ),
    Panel(
        "Time to the first token",
        "s",
        quantiles("ranvier_time_to_first_token_seconds", "model", 0.5, 0.95, 0.99),
        "Of streams alone, from the complete request.",
    ),
    Panel(
        "Time of each output token",
        "s",
        quantiles("ranvier_time_per_output_token_seconds", "model", 0.5, 0.95),
        "After the first one, of streams whose tokens the engine counted.",
    ),
    Panel("Whole requests", "s", quantiles("ranvier_request_duration_seconds", "model", 0.5, 0.95)),
    Panel(
        "Time in the node before the engine",
        "s",
        quantiles("ranvier_queue_seconds", "model", 0.5, 0.99),
        "Reading, placing, and tries that failed.",
    ),
    Panel(
        "Tokens",
        "short",
        [
            (rate("ranvier_counted_prompt_tokens_total"), "prompt"),
            (rate("ranvier_cached_tokens_total"), "of it cached"),
            (rate("ranvier_output_tokens_total"), "output"),
        ],
        "A second, as the engines count them.",
    ),
    Panel("Requests by engine", "reqps", [(rate("ranvier_backend_requests_total", "backend"), "{{backend}}")]),
    Panel(
        "First token by engine",
        "s",
        quantiles("ranvier_backend_time_to_first_token_seconds", "backend", 0.95),
        "From the sending of the request to the engine.",
    ),
    Panel("Attempts by outcome", "reqps", [(rate("ranvier_outcomes_total", "outcome"), "{{outcome}}")]),
    Panel(
        "In flight",
        "short",
        [
            ("sum by (instance) (ranvier_server_in_flight)", "{{instance}} requests"),
            ("sum by (instance) (ranvier_server_connections)", "{{instance}} connections"),
        ],
    ),
    Panel(
        "Limits",
        "short",
        [
            (f"({rate('ranvier_limits_refused_total')} or vector(0))", "refused a second"),
            ("(min(ranvier_budget_left_ratio) or vector(1))", "least that is left of a budget"),
        ],
    ),
)

CACHES = (
    Panel(
        "Prompt tokens found in caches",
        "percentunit",
        [(share("ranvier_cached_tokens_total", "ranvier_counted_prompt_tokens_total", "model"), "{{model}}")],
        "By the engines' own counts.",
    ),
    Panel(
        "Found in caches, by engine",
        "percentunit",
        [
            (
                share("ranvier_backend_cached_tokens_total", "ranvier_backend_counted_prompt_tokens_total", "backend"),
                "{{backend}}",
            )
        ],
    ),
    Panel(
        "Predicted against counted",
        "percentunit",
        [
            (share("ranvier_predicted_tokens_total", "ranvier_prompt_tokens_total"), "predicted"),
            (share("ranvier_cached_tokens_total", "ranvier_counted_prompt_tokens_total"), "counted"),
        ],
    ),
    Panel(
        "Predictions",
        "percentunit",
        [
            ("avg(ranvier_route_precision)", "of what was predicted, cached"),
            ("avg(ranvier_route_recall)", "of what was cached, predicted"),
        ],
    ),
    Panel(
        "How well caches are known",
        "short",
        [("count by (level) (max by (backend, level) (ranvier_engine_cache_level))", "{{level}}")],
        "Engines by level, exact being the best.",
    ),
    Panel(
        "KV events applied",
        "short",
        [(rate("ranvier_event_stream_applied_total", "backend"), "{{backend}}")],
        "Messages a second, of the node that reads the engine.",
    ),
    Panel("Cache in use", "percentunit", [("max by (backend) (ranvier_engine_cache_usage)", "{{backend}}")]),
    Panel(
        "Running and waiting",
        "short",
        [
            ("max by (backend) (ranvier_engine_running)", "{{backend}} running"),
            ("max by (backend) (ranvier_engine_waiting)", "{{backend}} waiting"),
        ],
        "In the engine, by its own page.",
    ),
    Panel("Placements by reason", "reqps", [(rate("ranvier_decisions_total", "reason"), "{{reason}}")]),
    Panel("Placements by what matched", "reqps", [(rate("ranvier_matches_total", "source"), "{{source}}")]),
    Panel(
        "Routes",
        "short",
        [
            ("max(ranvier_routes_rows)", "rows"),
            ("max(ranvier_routes_capacity)", "capacity"),
            (f"({rate('ranvier_routes_evicted_total')} or vector(0))", "evicted a second"),
        ],
    ),
    Panel(
        "Tokens behind broken prefixes",
        "short",
        [(f"({rate('ranvier_prefix_break_tokens_total')} or vector(0))", "computed again, a second")],
        "`ranvier clients` names the client, the cause and the rule that mends it.",
    ),
    Panel(
        "Answers from the response cache",
        "reqps",
        [(f"({rate('ranvier_response_cache_requests_total', 'result')} or vector(0))", "{{result}}")],
    ),
    Panel(
        "Saved by policies in the shadow",
        "s",
        [("(sum by (policy) (ranvier_shadow_saved_seconds) or vector(0))", "{{policy}}")],
        "Seconds of prefill since the start that the policy would have saved; less than 0 is a loss.",
    ),
)

CLUSTER = (
    Panel("Nodes", "short", [("count by (version) (ranvier_build_info)", "{{version}}")]),
    Panel("What is wrong", "short", [("max by (kind) (ranvier_finding)", "{{kind}}")], "`ranvier status` says more."),
    Panel(
        "Members",
        "short",
        [
            ("max by (instance) (ranvier_gossip_members_alive)", "{{instance}} alive"),
            ("max by (instance) (ranvier_gossip_members_suspects)", "{{instance}} suspected"),
        ],
        "Other nodes, as each one sees them.",
    ),
    Panel(
        "Engines that are healthy",
        "short",
        [
            ("sum by (instance) (ranvier_backend_healthy)", "{{instance}}"),
            ("sum by (instance) (ranvier_backend_draining)", "{{instance}} drained"),
        ],
    ),
    Panel(
        "Gossip by topic",
        "Bps",
        [
            (rate("ranvier_gossip_bytes_sent_total", "topic"), "{{topic}} sent"),
            (rate("ranvier_gossip_bytes_received_total", "topic"), "{{topic}} received"),
        ],
    ),
    Panel(
        "Lag of routes",
        "s",
        quantiles("ranvier_gossip_lag_seconds", "instance", 0.5, 0.99),
        "From learning a route on any node to receiving it.",
    ),
    Panel(
        "Buckets in which tables differ",
        "short",
        [("max by (instance) (ranvier_gossip_routes_differing_buckets)", "{{instance}}")],
        "Of 4,096, in the last comparison.",
    ),
    Panel(
        "Route updates",
        "short",
        [
            (rate("ranvier_gossip_routes_own_total"), "own a second"),
            (rate("ranvier_gossip_routes_received_total"), "received a second"),
            (rate("ranvier_gossip_routes_repairs_total"), "repairs a second"),
        ],
    ),
    Panel(
        "Streams of KV events",
        "short",
        [
            ("sum by (instance) (ranvier_streams_read)", "{{instance}} reads"),
            ("sum by (instance) (ranvier_streams_stood_by)", "{{instance}} stands by"),
        ],
    ),
    Panel(
        "Bugs that were survived",
        "short",
        [("(sum by (place) (increase(ranvier_unexpected_errors_total[1h])) or vector(0))", "{{place}}")],
        "In the last hour, by place.",
    ),
    Panel(
        "Processor",
        "percentunit",
        [(f"rate({process('process_cpu_seconds_total')}[{INTERVAL}])", "{{instance}}")],
        "Share of one core; the tokenizer is a process of its own.",
    ),
    Panel("Memory", "bytes", [(process("process_resident_memory_bytes"), "{{instance}}")]),
    Panel(
        "Open files",
        "percentunit",
        [(f"{process('process_open_fds')} / {process('process_max_fds')}", "{{instance}}")],
    ),
    Panel("Age", "s", [(f"time() - {process('process_start_time_seconds')}", "{{instance}}")]),
)

TABLE: Mapping[str, tuple[str, Sequence[Panel]]] = {
    "traffic": ("Ranvier: traffic", TRAFFIC),
    "caches": ("Ranvier: caches", CACHES),
    "cluster": ("Ranvier: cluster", CLUSTER),
}
"""By the name of its file: title and panels of a dashboard."""


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (dashboard and panel, expression)."""
    for name, (_, panels) in TABLE.items():
        for panel in panels:
            yield from ((f"{name}: {panel.title}", expression) for expression, _ in panel.shown)


def panel_json(number: int, panel: Panel) -> dict[str, Any]:
    place = {"w": WIDTH, "h": HEIGHT, "x": number % IN_ROW * WIDTH, "y": number // IN_ROW * HEIGHT}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.words,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"fillOpacity": 10}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for at, (expression, legend) in enumerate(panel.shown)
        ],
    }


def dashboard(name: str, title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    query = {"query": "label_values(ranvier_build_info, job)", "refId": "jobs"}
    job = {"type": "query", "name": "job", "datasource": SOURCE, "query": query, "refresh": 2}
    return {
        "uid": f"ranvier-{name}",
        "title": title,
        "tags": ["ranvier"],
        "schemaVersion": SCHEMA_VERSION,
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "query": "prometheus"},
                {**job, "includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"}},
            ]
        },
        "links": [{"type": "dashboards", "title": "Ranvier", "tags": ["ranvier"], "keepTime": True}],
        "panels": [panel_json(number, panel) for number, panel in enumerate(panels)],
    }


def dashboards() -> Mapping[Path, str]:
    return {
        FOLDER / f"{name}.json": json.dumps(dashboard(name, title, panels), indent=1) + "\n"
        for name, (title, panels) in TABLE.items()
    }

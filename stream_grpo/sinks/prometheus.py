"""The newest figures as text for Prometheus, on loopback. The only file that imports prometheus_client."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stream_grpo.registry.figure import FREE, Figure
from stream_grpo.registry.names import fields_of, kind_of
from stream_grpo.sinks.sink import is_of_one_problem

PREFIX = "stream_grpo"
LABELS = ("run", "part", "key")
"""The run's name; of a status whose it is; the free words of a figure's name, joined by slashes."""


class PrometheusSink:
    """Keeps the newest line of each kind; all work is done when somebody asks."""

    def __init__(self, run_name: str, port: int) -> None:
        """Listen on loopback; port 0 takes a free one. Raises OSError for a port that is taken."""
        self._run_name = run_name
        self._newest: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._alarms: Counter[str] = Counter()
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)

    @property
    def address(self) -> str:
        """Where the text is."""
        return f"http://127.0.0.1:{self._server.server_port}/metrics"

    def write(self, line: Mapping[str, Any]) -> None:
        """Keep a line until a newer one of its kind comes."""
        if line["event"] == "alarm":
            self._alarms[line["name"]] += 1
        elif line["event"] in ("step", "status", "evaluation"):
            self._newest[kind_of(line), line.get("part", "")] = line

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Every registered figure of the newest lines, but for those of single problems."""
        gauges: dict[str, GaugeMetricFamily] = {}
        for (kind, part), line in list(self._newest.items()):
            for path, value, figure in fields_of(line):
                if figure is None or isinstance(value, bool) or not isinstance(value, (int, float)):
                    continue
                if is_of_one_problem(path):
                    continue
                free = [key for word, key in zip(figure.words, path, strict=True) if FREE in word]
                name = "_".join([PREFIX, kind, *filter(None, map(_clean, figure.words))])
                gauge = gauges.setdefault(name, GaugeMetricFamily(name, _help(figure), labels=LABELS))
                gauge.add_metric([self._run_name, part, "/".join(free)], value)
        yield from gauges.values()
        raised = CounterMetricFamily(f"{PREFIX}_alarms", "alarms raised, by name", labels=("run", "name"))
        for name, num in list(self._alarms.items()):
            raised.add_metric([self._run_name, name], num)
        yield raised


def _help(figure: Figure) -> str:
    return f"{figure.meaning} [{figure.unit}]" if figure.unit else figure.meaning


def _clean(word: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", word).strip("_")

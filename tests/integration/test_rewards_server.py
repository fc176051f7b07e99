"""End of the reward service, whose process ends while threads of evaluators may still run."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import threading, time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from runner.rewards import server
from spangrad.settings import Settings

def served(*_):
    threading.Thread(target=time.sleep, args=[3600]).start()
    trace.get_tracer("judge").start_span("the judge's call").end()
    print("a print of the evaluator")

trace.set_tracer_provider(provider := TracerProvider())
provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(), schedule_delay_millis=600_000))
server.http_server.serve = served
server.serve(Settings(), print)
"""


def test_rewards_serve_end_keeps_prints_and_spans() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert "a print of the evaluator\n" in ended.stdout
    assert '"name": "the judge\'s call"' in ended.stdout

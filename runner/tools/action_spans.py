"""Spans of the actions in a sandbox, whatever protocol asks for them.

In: tool, arguments and outcome of an action. Out: a span `execute_tool` of the trace in which the action was asked for, failed where the
action failed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode

from runner.sandboxes.images import UnpackedImage
from span_processors.context import rollout_attributes
from spangrad import semconv

_SCOPE = "spangrad.tools"


class ActionSpans:
    """Records the actions of one sandbox."""

    def __init__(self, image: UnpackedImage | None, provider: trace.TracerProvider | None = None) -> None:
        """The digest of `image` is recorded; `provider` takes the spans, None: the process's own does."""
        self._image = image
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=provider)

    @contextmanager
    def action(
        self, tool: str, arguments: str, call_id: str | None = None, parent: Context | None = None
    ) -> Generator[Callable[[str, bool], None]]:
        """Open the span of an action for as long as the block; what is yielded takes the action's text, and whether it failed.

        The arguments are JSON; `call_id` is that of the model's call, None: it has none. `parent` is the context of the request, None: the
        current one.
        """
        attributes = {
            semconv.GEN_AI_OPERATION: "execute_tool",
            semconv.GEN_AI_TOOL_NAME: tool,
            semconv.GEN_AI_TOOL_ARGUMENTS: arguments,
            **({semconv.GEN_AI_TOOL_CALL_ID: call_id} if call_id else {}),
            **({semconv.SANDBOX_IMAGE: self._image.digest} if self._image else {}),
            **rollout_attributes(context.get_current() if parent is None else parent, {}),
        }
        with self._tracer.start_as_current_span(f"execute_tool {tool}", context=parent, attributes=attributes) as span:

            def end(text: str, failed: bool) -> None:
                if failed:
                    span.set_status(Status(StatusCode.ERROR, text.rpartition("\n")[2] or text))
                span.set_attribute(semconv.GEN_AI_TOOL_RESULT, text)

            yield end

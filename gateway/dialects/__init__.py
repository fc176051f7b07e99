"""The API dialects in which agents call the policy: one module each, and their table by path."""

from __future__ import annotations

from gateway.dialects.base import Dialect
from gateway.dialects.chat import ChatDialect
from gateway.dialects.completions import CompletionsDialect
from gateway.dialects.messages import MessagesDialect
from gateway.dialects.responses import ResponsesDialect

CHAT = ChatDialect()
DIALECTS: dict[str, Dialect] = {dialect.path: dialect for dialect in (CHAT, CompletionsDialect(), ResponsesDialect(), MessagesDialect())}
"""Dialects by path. Requests to other paths are passed through, and not recorded."""

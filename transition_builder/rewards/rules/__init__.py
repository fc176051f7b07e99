"""Kinds of AIR rules, a file for each thing that they look at.

`tools` that ran, tool calls that were `asked`, `calls` themselves; `functions` are rules that people write.

In: a rule and what is `seen` of the calls. Out: FOUND. Invariant: what nobody recorded is not judged: it gives nothing, in either
direction.
"""

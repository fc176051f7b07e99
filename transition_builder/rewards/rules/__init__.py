"""Kinds of AIR rules, a file for each subject.

`tools` that ran, tool calls that were `asked`, `calls` themselves; `functions` are rules that users write.

In: a rule and what is `seen` of the calls. Out: FINDINGS. Invariant: unrecorded data is not judged: it gives neither a reward nor a
penalty.
"""

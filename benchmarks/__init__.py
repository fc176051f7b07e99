"""Benchmarks: each measures ours and, where there is one, a peer, checks its own results, and prints one JSON object last."""

"""The affinity benchmark's own honesty: it reads vLLM's counters, and sums them over engines."""

from __future__ import annotations

from benchmarks.affinity import counters, summary

METRICS = """
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
vllm:prefix_cache_queries_created{engine="0",model_name="policy"} 1.7e+09
vllm:prefix_cache_queries_total{engine="0",model_name="policy"} 1.5e+03
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 500.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="policy"} 7.0
"""


def test_counters_of_vllm_are_read_from_its_metrics() -> None:
    assert counters(METRICS) == {"queries": 1500.0, "hits": 500.0}
    assert counters("") == {"queries": 0.0, "hits": 0.0}


def test_summary_adds_up_the_engines() -> None:
    figures = summary([{"queries": 300.0, "hits": 100.0}, {"queries": 100.0, "hits": 100.0}], 2.04)
    expected = {"prompt_tokens": 400.0, "cached_tokens": 200.0, "computed_tokens": 200.0, "hit_rate": 0.5, "seconds": 2.0}
    assert figures == expected

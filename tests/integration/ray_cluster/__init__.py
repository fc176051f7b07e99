"""Tests that share one Ray, which ends with the last of them: what other tests fork must not have its threads."""

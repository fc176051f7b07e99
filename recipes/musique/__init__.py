"""MuSiQue: questions of several hops, answered with a dense retrieval service."""

"""Plugin that runs inside vLLM's process and environment, with the standard library, torch and vLLM alone."""

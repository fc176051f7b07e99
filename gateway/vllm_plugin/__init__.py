"""What runs inside vLLM's process and environment: the standard library, torch and vLLM are all there is."""

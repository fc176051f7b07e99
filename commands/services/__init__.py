"""Commands that run a service, or look after one that runs."""

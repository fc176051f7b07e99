"""The overview and the rollouts in a terminal, live: `spangrad watch`."""

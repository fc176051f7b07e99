"""The web page over the span store: rollouts and calls token by token, training steps, versions; read-only, without a build step."""

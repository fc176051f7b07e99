"""Workers: attempts of leased rollouts, in agent processes, programs and containers."""

"""Commands that run agents, build transitions, train policies and search prompts."""

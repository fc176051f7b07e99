"""Agents that spangrad trains, each with its task, a tiny model that does not know it yet, and a command that shows it learning."""

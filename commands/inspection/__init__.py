"""Commands that show what happened, and why."""

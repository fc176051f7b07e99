"""The calculator's task once more, by an agent without a framework."""

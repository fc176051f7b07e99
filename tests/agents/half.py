"""An evaluator for tests: whatever an agent did is worth a half."""


def reward(given: object, output: object) -> float:
    """Half a point."""
    del given, output
    return 0.5

"""The recording gateway and the supervisor of the engine behind it."""

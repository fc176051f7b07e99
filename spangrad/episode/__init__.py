"""Episodes: environments with reset and step, and the state machine that has a model act in them, for training and for use alike."""

"""Capacity planning of a training run: memory and time of a model on GPUs that need not be here, and the settings that fit."""

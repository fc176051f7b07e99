"""Peers: one file each that makes its environment, starts it, and looks like our store to the benchmark."""

"""The tests of every part, and what they share in `tests.support`."""

import os

# Before PyTorch is imported, here and in the processes that tests start: where others run on the same cores, OpenMP's threads, which wait
# for each other by spinning, take tens of times the CPU time of their work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

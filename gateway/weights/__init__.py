"""New weights for running engines: releases, publications and weight sync methods."""

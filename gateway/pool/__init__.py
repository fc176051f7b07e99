"""The backends of each policy: which are healthy, which of them answers a call, and how operators change them."""

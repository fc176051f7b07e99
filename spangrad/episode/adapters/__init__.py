"""Environments of other libraries and of servers, as environments with reset and step."""

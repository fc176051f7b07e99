"""One module a format of export."""

"""The raw HTTP data path: what clients and instances may do to it."""

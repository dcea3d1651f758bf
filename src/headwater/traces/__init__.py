"""Recorded workloads: arrivals, lengths and block hashes, never text."""

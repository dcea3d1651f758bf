"""Decisions only: calls in, values out; no clock, no I/O, no threads."""

"""A fleet of engines with a virtual clock: the same routing, admission and placement as in production."""

"""headwater's tests. A package, so that no `tests` of an installed distribution can stand in its place."""

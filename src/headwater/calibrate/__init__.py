"""Step times of a real engine, measured over its HTTP interface and fitted."""

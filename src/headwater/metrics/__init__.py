"""What a node tells about itself in figures: histograms of calls, Prometheus' text, and the door that serves it."""

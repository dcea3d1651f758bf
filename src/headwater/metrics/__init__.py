"""What a node tells about itself in figures: its state in Prometheus' words, and the door that serves it."""

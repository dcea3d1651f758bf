"""A whole fleet by one command: what to start, the supervision of it, and manifests for fleets beyond one host."""

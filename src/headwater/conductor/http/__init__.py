"""HTTP/1.1 as raw protocols: what clients speak to us, and what we speak to instances."""

"""The process on a host that owns the memory: driver, server and clients."""

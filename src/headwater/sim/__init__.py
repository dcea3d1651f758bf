"""The simulator: the real core under a virtual clock, seeded workloads and faults, checked after every event."""

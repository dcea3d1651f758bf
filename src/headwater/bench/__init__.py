"""`headwater bench`: figures of this machine, each beside its yardstick from the same run (floor 5)."""

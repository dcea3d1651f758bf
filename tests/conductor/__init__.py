"""The Conductor: its parts, and all of it over fake engines."""

"""What goes wrong around a whole Conductor."""

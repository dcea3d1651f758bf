"""Who can keep bytes."""

"""Serving engines: device pages to extents and back."""

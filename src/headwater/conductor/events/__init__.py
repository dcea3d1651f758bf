"""Who holds what, as engines and nodes tell it."""

"""Who can move bytes between processes; `ports.Transport` says what each does."""

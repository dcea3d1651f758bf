"""Who knows which node holds what; `ports.Directory` says what each does."""

"""The house rules that a machine can check. A rule is a function over sources, and has snippets that it must catch."""

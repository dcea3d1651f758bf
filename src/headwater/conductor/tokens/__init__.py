"""Prompts in token ids, as the engine will make them: chat templates, tokenizers, a memo, and who runs them."""

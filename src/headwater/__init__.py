"""headwater: one KV cache for all the LLM serving engines of a host."""

__version__ = "0.1.0"

__all__ = ["__version__"]

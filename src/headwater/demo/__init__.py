"""The main job, shown: two real vLLM instances share one KV cache through a node."""

"""The Conductor: an OpenAI-compatible front that sends each request to where its KV is."""

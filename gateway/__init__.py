"""kvgate: a cache-aware, OpenAI-compatible gateway in front of fleets of vLLM and SGLang workers."""

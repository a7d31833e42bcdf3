"""Measuring caches: what each saves, what it costs in quality and in time. Uses public names of `hf_kvcache` only."""

"""What `hf-kvcache` can be told to do: one command per file, in the table of `cli.py`."""

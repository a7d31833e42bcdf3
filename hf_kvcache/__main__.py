"""`python -m hf_kvcache`."""

from .cli import main

main()

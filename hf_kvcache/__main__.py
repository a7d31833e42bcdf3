"""`python -m hf_kvcache`."""

import sys

from .cli import main

sys.exit(main())

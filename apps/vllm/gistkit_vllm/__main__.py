"""`python -m gistkit_vllm`."""

import sys

from gistkit_vllm.launch import main

sys.exit(main())

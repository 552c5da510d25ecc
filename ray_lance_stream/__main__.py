"""`python -m ray_lance_stream`."""

import sys

from ray_lance_stream.cli.main import main

sys.exit(main())

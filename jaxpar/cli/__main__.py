"""``python -m jaxpar.cli``."""

import sys

from jaxpar.cli import main

sys.exit(main())

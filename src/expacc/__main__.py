"""``python -m expacc``: the command line where the ``expacc`` script is not on the path."""

import sys

from expacc.cli import main

sys.exit(main())

import sys

from esgrpo.cli import main

sys.exit(main())

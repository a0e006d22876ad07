"""``python -m kvseal`` is the ``kvseal`` command."""

from kvseal.cli import main

raise SystemExit(main())

"""``python -m ckpt`` is the same program as the ``ckpt`` command."""

from ckpt.cli import main

if __name__ == "__main__":
    main()

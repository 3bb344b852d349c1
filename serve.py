"""Start the HTTP server: `python serve.py --target ... --draft ...`; the flags live in specdec.server.cli."""

from specdec.server.cli import main

if __name__ == "__main__":
    main()

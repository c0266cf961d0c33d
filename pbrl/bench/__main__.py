"""`python -m pbrl.bench`: how fast everything is."""

from pbrl.bench.program import main

if __name__ == "__main__":
    main()

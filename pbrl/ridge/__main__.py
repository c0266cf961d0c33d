"""`python -m pbrl.ridge`: the paper's synthetic experiment."""

from pbrl.ridge.experiment import main

if __name__ == "__main__":
    main()

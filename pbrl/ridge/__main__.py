"""The paper's synthetic experiment, and its peers: how many comparisons until the gradient is small.

    python -m pbrl.ridge                                    # under a minute
    python -m pbrl.ridge experiment.only=[ncrs,saha_2025]   # some optimisers

docs/ridge.md says what is measured, and how an optimiser of your own joins.
"""

from pbrl.ridge.experiment import main
from pbrl.run.command_line import run_main

if __name__ == "__main__":
    run_main(main, program="pbrl.ridge", config="ridge", groups=(), about=__doc__)

"""How fast everything is, beside its limit and its peers.

    python -m pbrl.bench                                      # half an hour
    python -m pbrl.bench short=true                           # a minute or two
    python -m pbrl.bench tasks=[walker_walk] only=[EnvPool]   # beside EnvPool

It prints tables of medians, and writes them as CSV files.
"""

from pbrl.bench.program import main
from pbrl.run.command_line import run_main

if __name__ == "__main__":
    run_main(main, program="pbrl.bench", config="bench", groups=("oracle",), about=__doc__)

"""`python -m pbrl.finetune`: the paper's language-model experiment."""

from pbrl.finetune.tuning import command

if __name__ == "__main__":
    command()

"""A stand-in for the wandb package that notes what it is told, and fails as a test wants it."""

import json
import os
import random
import sys
import time
from pathlib import Path


def trouble(moment):
    kind = dict(each.split(":") for each in os.environ["TROUBLE"].split()).get(moment)
    if kind == "raise":
        raise RuntimeError(f"no luck\nwith {moment}")
    if kind == "hang":
        time.sleep(1000)
    if kind == "die":
        os._exit(3)


def note(call, **content):
    random.seed(0)  # a library may do as it likes
    print("chatter")
    print("more chatter", file=sys.stderr)
    with Path(os.environ["JOURNAL"]).open("a") as file:
        print(json.dumps({"call": call, **content}), file=file)


class Settings:
    def __init__(self, **settings):
        vars(self).update(settings)


class Video(str):
    """Noted as its path."""


class Run:
    url = "https://example.org/run"

    def __init__(self, offline, folder, run_id):
        self.offline, self.step = offline, int(os.environ["STEP"])
        self.dir = f"{folder}/wandb/{'offline-' if offline else ''}run-{time.time_ns()}-{run_id}/files"
        Path(self.dir).mkdir(parents=True)

    def define_metric(self, name, **settings):
        note("define_metric", name=name, **settings)

    def log(self, row, step):
        trouble("log")
        note("log", row=row, step=step)

    def finish(self):
        trouble("finish")
        note("finish")


def init(mode, settings, **about):
    note("init", mode=mode, timeout=settings.init_timeout, service=os.environ.get("WANDB_SERVICE"), **about)
    trouble("init" if mode == "offline" else "online")
    return Run(mode == "offline", about["dir"], about["id"])


def teardown():
    note("teardown")


if __name__ == "wandb":
    trouble("import")

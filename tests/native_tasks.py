"""The tasks that are promised to be natively batched."""

NATIVE = [
    "walker_stand",
    "walker_walk",
    "walker_run",
    "cheetah_run",
    "hopper_stand",
    "hopper_hop",
    "quadruped_walk",
    "quadruped_run",
    "swimmer_swimmer6",
    "swimmer_swimmer15",
    "fish_upright",
    "fish_swim",
    "humanoid_stand",
    "humanoid_walk",
    "humanoid_run",
]

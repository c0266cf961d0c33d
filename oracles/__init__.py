"""Those who compare: simulated teachers, panels of them, and answers from a log."""

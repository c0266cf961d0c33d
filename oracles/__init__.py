"""Oracles answer comparisons: simulated teachers, panels of them, and answers from a log."""

"""Evals: specdec measured from outside, through its public names.

Each command asks one question, checks that outputs stayed equal while it measured, and writes JSON
lines in the format of `evals.results`. Nothing in specdec knows that this room exists.
"""

"""What kernels do wrong that no decision holds: the catalogue of mistakes, a module a stage.

Each was seen in a public report or planted by a stranger; docs/mistakes.md lists them.
"""

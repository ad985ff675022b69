"""The arithmetic models and the instructions of a real GPU that they stand for."""

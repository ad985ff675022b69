"""Fuzzing: cases drawn until the time is up, failures made small and kept in a corpus."""

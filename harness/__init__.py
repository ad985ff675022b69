"""The harness: inputs, comparison, checks, mutants, witnesses, results, plugin, command."""

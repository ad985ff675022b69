"""How a kernel is called: poisoned outputs, child processes."""

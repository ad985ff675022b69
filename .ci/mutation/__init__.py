"""What `.ci/mutate` is made of: changes, the settings and a session, runs of tests, the report."""

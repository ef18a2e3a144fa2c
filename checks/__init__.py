"""Checks that need hardware the test suite cannot ask for: commands of their own, run by hand."""

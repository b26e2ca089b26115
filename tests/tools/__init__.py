"""Tools of the tests that are commands of their own."""

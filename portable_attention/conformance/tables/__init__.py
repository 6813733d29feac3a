"""The tables of cases."""

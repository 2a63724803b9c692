"""Groups of `fedward node`."""

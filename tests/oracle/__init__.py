"""An independent model of data sets, and random cases that compare the package with it."""

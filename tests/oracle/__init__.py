"""An independent model of data sets, and drawn cases which compare the package with it."""

"""Sources of samples: each lists or streams the samples of one kind of input."""

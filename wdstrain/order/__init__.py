"""Which sample comes when: random bits, epoch plans, mixtures. Integers only."""

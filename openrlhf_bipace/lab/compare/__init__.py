"""``bipace-study compare``: does a better estimator learn faster? Paired runs of many arms, and their statistics."""

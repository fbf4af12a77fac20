"""Episodes of any policy outside training: success with intervals, and a checker of environments."""

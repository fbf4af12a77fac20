"""The oracle lab: how wrong is each estimator, measured where the truth is exactly computable.

`world` holds tasks of `rooms`, a policy and its exact values; `geometry` and `model_world` give hidden states;
`sample` rolls groups out as training does; `arms` runs the trainer's own estimators on them; `gradient` and `measures`
hold the results against the truth; `study` is ``bipace-study oracle``.
"""

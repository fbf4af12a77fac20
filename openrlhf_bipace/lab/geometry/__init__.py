"""The geometry study: what a model's hidden states say about an environment's true state.

`load` finds the model, `players` collects turns, `hidden` reads their hidden states, `measures` holds partitions and
vectors against the true state; `tables` keeps the results as rows, from which `page` and `figures` are made; `study`
is ``bipace-study geometry``.
"""

"""`mxdiag impact`: the model with chosen errors put in, and what each of them does to it.

`inject` says what takes the place of an operand and computes it, `session` runs the model and keeps
`evidence`, `measures` judge it, `results` makes the tables, `verdict` the sentences; `rollout` lets
the quantized model write, `per_layer` quantizes one unit at a time; `command` is the whole of it.
"""

"""The model with chosen errors put in: what each component of the MXFP4 error does to it.

`plan` says what takes the place of an operand and `values` computes it (corrections by
`compositions`), `configurations` lists what is compared by default, `substitute` puts it into a
tapped model, `session` runs the model and keeps `evidence`, `forward`, `backward`, `routing`,
`temperature` and `depth` measure, `noise` and `attribution` judge, `results` makes the tables,
`verdict` the sentences, and `run` is the whole of it.
"""

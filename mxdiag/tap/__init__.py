"""Every product of an activation and a weight of a live model, seen and, if asked, replaced.

`tap` is the way in, `observers` say what is reported and to whom.
"""

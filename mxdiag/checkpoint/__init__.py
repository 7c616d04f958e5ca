"""From stored files to weights, streamed. No torch.

`open` finds the files and what they hold, `safetensors`, `gguf` and `pickle` read their formats,
`encodings` and `decode` turn quantized storage into numbers, `inventory` accounts for every
parameter, `stream` yields the weights piece by piece.
"""

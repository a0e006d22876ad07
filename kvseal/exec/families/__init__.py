"""What a model is: configurations become `ModelSpec`, tensor names become `LayerWeights`.

Never guesses: a key or tensor that KVSeal does not compute is `ModelUnsupported`, a missing or senseless one is `ModelCorrupt`, by name.
One file per source of knowledge: `fields` (reading), `rope` (frequencies), `huggingface` and `gguf` (the two kinds of configuration),
`tensors` (the two kinds of names).
"""

"""Pure numerics: one function per equation, torch tensors in and out, no files, no models, no logging.

Notation, here and in the shapes that docstrings give:

    L    layers                        T    tokens of a prompt
    H    query heads per layer         S    source rows (the tokens whose attention is read)
    K    kv heads per layer            D    documents
    d    model width                   P    placements of the gold documents
    d_h  width of one head             N    samples
    V    vocabulary                    n    heads that vote

A head is `HeadId(layer, head)`, a zero-based query head, printed `L14H22`; its kv head is `head // (H / K)`.
A span is a half-open range of tokens `[start, end)`. Attention is a weight in [0, 1], float32 as captured;
sums, means and scores over it are float64. `mass` is attention summed over a document's tokens, `mean` is
mass divided by the number of tokens; both are averaged over source rows. No function writes to its inputs.
"""

"""HeadRank's offline side and shared core: heads, layouts, votes, banks and the forward pass.

Importing this package loads neither torch nor transformers.
"""

__version__ = "0.1.0"

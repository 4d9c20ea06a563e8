"""HeadRank's HTTP service: rerank dialects in front of one engine process."""

"""Methods of ranking, one file each, all behind `base.Reranker`."""
